"""What a user should know of a run that goes on all the same: said in the log, and to who listens, such as
the page.

An error ends a run and says so itself; what is only the case, such as the kernels that served, stands in the report.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger("fusestream")

Listener = Callable[[str], None]
_listeners: list[Listener] = []
_run: str | None = None  # whose sentences are in `_said`
_said: set[str] = set()


def warn(sentence: str) -> None:
    """Say this, once in a run: a sentence that names the thing and the remedy. Called as often as it is so."""
    global _run  # noqa: PLW0603 - of the one run that a process has at a time
    run = _current_run()
    if run != _run:
        _run = run
        _said.clear()
    if sentence in _said:
        return
    _said.add(sentence)
    log.warning("%s", sentence)
    for listener in _listeners:
        _tell(listener, sentence)


def listen(listener: Listener) -> None:
    """From now on this hears every sentence. Called as often as one likes."""
    if listener not in _listeners:
        _listeners.append(listener)


def _tell(listener: Listener, sentence: str) -> None:
    try:
        listener(sentence)
    except Exception:  # whoever shows it is not worth a run
        log.warning("this could not be shown", exc_info=True)


def _current_run() -> str | None:
    """The prompt that ComfyUI works at, or None: a program without a server is one run."""
    from comfy_execution.utils import get_executing_context  # noqa: PLC0415 - not while nodes are being listed

    running = get_executing_context()
    return None if running is None else running.prompt_id
