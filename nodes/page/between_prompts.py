"""Work on models that is done when no prompt runs: at once, or as soon as a prompt is done.

The queue is locked while models are touched, so that no prompt starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from .front_end import running_server

Work = Callable[[], object]

log = logging.getLogger("fusestream.between_prompts")

_waiting: list[Work] = []  # once
_always: list[Work] = []  # after each prompt


def attach() -> None:
    """Let the server's queue tell us when a prompt is done. Called once."""
    server = running_server()
    if server is not None:
        _watch(server.prompt_queue)


def always(work: Work) -> None:
    """Do this after each prompt, before the work that waited for it."""
    _always.append(work)


def do(work: Work) -> bool:
    """Do this now if no prompt runs, else after the running one. Returns whether it is done."""
    server = running_server()
    if server is None:
        work()
        return True
    with server.prompt_queue.mutex:
        if server.prompt_queue.currently_running:
            _waiting.append(work)
            return False
        work()
    return True


def _watch(queue: Any) -> None:
    stocks = queue.task_done

    def task_done(*args: Any, **kwargs: Any) -> None:
        stocks(*args, **kwargs)
        for work in _always:
            _try(work)
        with queue.mutex:
            while _waiting:
                _try(_waiting.pop(0))

    queue.task_done = task_done


def _try(work: Work) -> None:
    try:
        work()
    except Exception:  # it is no part of the prompt, and must not end the thread that runs prompts
        log.exception("what was to be done after the prompt was not")
