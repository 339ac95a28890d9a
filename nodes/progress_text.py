"""What stands under a loader while its model samples: the step, how long one takes, how long it still takes.

ComfyUI's own progress text, which the front end draws in both of its kinds of nodes. Four messages a second at most.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import user_settings
from .front_end import write_on

if TYPE_CHECKING:
    from ..fusion.sampling.step_timer import Reading

EVERY = 0.25  # seconds between two messages

log = logging.getLogger("fusestream.progress_text")
Send = Callable[[str, str], None]


def watch(patcher: Any, hidden: Any) -> None:
    """Let the samplings with this model be told to the loader node that `hidden` names."""
    from ..fusion.sampling.step_timer import pace_of  # noqa: PLC0415 - the server starts without it

    pace, node = pace_of(patcher), getattr(hidden, "unique_id", None)
    if pace is not None and node is not None:
        pace.listener = ProgressText(node, send)


def send(text: str, node: str) -> None:
    """To the page of the one who queued the prompt, if there is one, and who has not switched the meter off."""
    if user_settings.value(user_settings.METER, True):
        write_on(node, text)


class ProgressText:
    """Of one loader."""

    def __init__(self, node: str, send: Send, clock: Callable[[], float] = time.monotonic) -> None:
        self._node, self._send, self._clock = node, send, clock
        self._since = -EVERY
        self._broken = False

    def __call__(self, reading: Reading) -> None:
        from ..fusion.estimate.words import running  # noqa: PLC0415

        now = self._clock()
        is_due = reading.is_over or reading.step == 0 or now - self._since >= EVERY
        if self._broken or not is_due:
            return
        self._since = now
        try:
            self._send(running(reading), self._node)
        except Exception:
            self._broken = True  # a line of text is not worth a run
            log.warning("the progress text is off for this model", exc_info=True)
