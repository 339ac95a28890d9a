"""Notices that a user should read although the run goes on: written to the log, and passed to
listeners such as the page. A sentence is shown as a toast, a line on the node that runs.

An error ends a run and explains itself; mere facts, such as the kernels that served, are in the
report.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger("fusestream")

Listener = Callable[[str], None]
_listeners: list[Listener] = []  # of sentences
_writers: list[Listener] = []  # of lines on a node
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


def write(line: str) -> None:
    """Write a line on the node that runs. It is for the page alone; the log has it from the caller."""
    for writer in _writers:
        _tell(writer, line)


def listen(listener: Listener, writer: Listener | None = None) -> None:
    """Call this listener for every sentence, and this writer for every line, from now on. Repeated
    calls do no harm."""
    if listener not in _listeners:
        _listeners.append(listener)
    if writer is not None and writer not in _writers:
        _writers.append(writer)


def _tell(listener: Listener, words: str) -> None:
    try:
        listener(words)
    except Exception:  # showing it is not worth a failed run
        log.warning("this could not be shown", exc_info=True)


def _current_run() -> str | None:
    """The prompt that ComfyUI executes, or None: a program without a server is one run."""
    from comfy_execution.utils import get_executing_context  # noqa: PLC0415 - not while nodes are being listed

    running = get_executing_context()
    return None if running is None else running.prompt_id
