"""Notices that a user should read although the run goes on: written to the log, and passed to
listeners such as the page.

An error ends a run and explains itself; mere facts, such as the kernels that served, are in the
report.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger("fusestream")

Listener = Callable[[str], None]
_listeners: list[Listener] = []
_run: str | None = None  # the run of the sentences in `_said`
_said: set[str] = set()


def warn(sentence: str) -> None:
    """Say a sentence that names the thing and the remedy, once in a run. It may be called
    repeatedly."""
    global _run  # noqa: PLW0603 - a process has one run at a time
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
    """Call this listener for every sentence from now on. Repeated calls do no harm."""
    if listener not in _listeners:
        _listeners.append(listener)


def _tell(listener: Listener, sentence: str) -> None:
    try:
        listener(sentence)
    except Exception:  # showing it is not worth a failed run
        log.warning("this could not be shown", exc_info=True)


def _current_run() -> str | None:
    """The prompt that ComfyUI executes, or None: a program without a server is one run."""
    from comfy_execution.utils import get_executing_context  # noqa: PLC0415 - not while nodes are being listed

    running = get_executing_context()
    return None if running is None else running.prompt_id
