"""Times of work on a GPU, by events that are read when it is done: nobody waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

QUEUEING = 60e-6  # seconds: what the host takes to put a few launches into the queue
LONGER = 1.5  # than the host took the last time
MOST = 400e-6
CLOCK = 1.7e9  # cycles a second of a card, more or less

# Private to torch, so its absence is no error.
_spin: Callable[[int], None] | None = getattr(torch.cuda, "_sleep", None)


class Lap:
    """One stretch of torch's current stream. Host and device are timed apart.

    Where the device has nothing to do it waits for the host, and a short kernel takes what it takes to launch it. So an idle device
    first spins while the host puts the launches into its queue; and a busy one too, if the last time it was done before they came.

    host    seconds that the host was at it
    waited  whether the device was ready before the host was, so that its time is partly the host's
    """

    def __init__(self, device: torch.device, before: float | None = None) -> None:
        """before: seconds that the host took for this work at a time when the device waited for it."""
        event: Any = torch.cuda.Event
        self._stream = torch.cuda.current_stream(device)
        self._start, self._end = event(enable_timing=True), event(enable_timing=True)
        self.host, self.waited = 0.0, False
        if _spin is not None and (before is not None or self._stream.query()):
            seconds = min(max(QUEUEING, LONGER * (before or 0.0)), MOST)
            with torch.cuda.device(device):
                _spin(round(CLOCK * seconds))
        self._began = time.perf_counter()
        self._start.record(self._stream)

    def end(self) -> None:
        self._end.record(self._stream)
        self.host = time.perf_counter() - self._began
        self.waited = self._start.query()

    def seconds(self) -> float | None:
        """None while the device has not come so far."""
        return float(self._start.elapsed_time(self._end)) * 1e-3 if self._end.query() else None
