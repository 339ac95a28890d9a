"""The display on a loader while its model samples: the meter of its memory, and a line of text.

The front end gets the memory four times a second, and draws the meter. Each block that has run
calls its stream's watcher, which mostly only looks at the clock. The text is ComfyUI's own progress
text, which both of its kinds of nodes show.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...fusion.base.hooks import STREAM
from . import user_files
from .front_end import tell, write_on

if TYPE_CHECKING:
    import torch

    from ...fusion.sampling.step_timer import Reading

EVENT, LEFT = "fusestream.meter", "fusestream.left"
EVERY = 0.25  # seconds between two messages of a kind

log = logging.getLogger("fusestream.meter")
Send = Callable[[dict[str, Any]], None]
SendText = Callable[[str, str, float | None], None]


def watch(patcher: Any, hidden: Any) -> None:
    """Let this model's stream, if it has one, report for the loader that `hidden` names."""
    stream = getattr(getattr(patcher, "model", None), STREAM, None)
    node = getattr(hidden, "unique_id", None)
    if stream is not None and node is not None:
        stream.watcher = Meter(stream, node, patcher.load_device, send)


def watch_sampling(patcher: Any, hidden: Any) -> None:
    """Let samplings with this model be shown as words on the loader that `hidden` names."""
    from ...fusion.sampling.step_timer import pace_of  # noqa: PLC0415 - the server starts without it

    pace, node = pace_of(patcher), getattr(hidden, "unique_id", None)
    if pace is not None and node is not None:
        pace.listener = ProgressText(node, send_text)


def send(reading: dict[str, Any]) -> None:
    tell(EVENT, reading)


def send_text(text: str, node: str, left: float | None) -> None:
    """Send a text, and the seconds that are left, to the page that queued the prompt, unless its
    user has switched the meter off."""
    if user_files.value(user_files.METER, True):
        write_on(node, text)
        tell(LEFT, {"node": node, "seconds": left})


class Meter:
    """The meter of one stream, which it does not keep alive."""

    def __init__(
        self, stream: Any, node: str, device: torch.device, send: Send, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._node, self._send, self._clock = weakref.ref(stream), node, send, clock
        self._memory = "RAM" if device.type == "cpu" else "VRAM"  # where the blocks are held
        self._since, self._copied, self._waited = clock(), 0, 0.0
        self._broken = False

    def __call__(self, i: int) -> None:
        now = self._clock()
        if now - self._since < EVERY or self._broken:
            return
        try:
            stream: Any = self._stream()
            self._send(self._reading(stream, i, now))
        except Exception:
            self._broken = True  # a meter is not worth a failed run
            log.warning("the live meter is off for this model", exc_info=True)

    def _reading(self, stream: Any, i: int, now: float) -> dict[str, Any]:
        """Bytes, counts, and since the last reading: bytes a second and the share of waiting."""
        seconds, self._since = now - self._since, now
        summary, plan = stream.residency.ledger.summary(), stream.residency.pager.plan
        copied, waited = sum(summary["bytes by route"].values()), summary["seconds"].get("stall", 0.0)
        moved, stalled = copied - self._copied, waited - self._waited
        self._copied, self._waited = copied, waited
        return {
            "node": self._node,
            "memory": self._memory,
            "held": summary["held bytes"].get("VRAM", 0),
            "limit": max(stream.residency.wanted, stream.residency.held),
            "block": i,
            "blocks": len(plan.sizes),
            "resident": sorted(plan.resident),
            "rate": moved / seconds,
            "waiting": min(1.0, stalled / seconds),
        }


class ProgressText:
    """The progress text of one loader: the step, the time of a step, the remaining time."""

    def __init__(self, node: str, send: SendText, clock: Callable[[], float] = time.monotonic) -> None:
        self._node, self._send, self._clock = node, send, clock
        self._since = -EVERY
        self._broken = False

    def __call__(self, reading: Reading) -> None:
        from ...fusion.estimate.words import running  # noqa: PLC0415

        now = self._clock()
        is_due = reading.is_over or reading.step == 0 or now - self._since >= EVERY
        if self._broken or not is_due:
            return
        self._since = now
        try:
            self._send(running(reading), self._node, None if reading.is_over else reading.left)
        except Exception:
            self._broken = True  # a line of text is not worth a failed run
            log.warning("the progress text is off for this model", exc_info=True)
