"""Times of work on a GPU, by events that are read when it is done: nobody waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

QUEUEING = 100_000  # cycles, some 60 us: what the host takes to put a few launches into the queue

# Private to torch, so its absence is no error.
_spin: Callable[[int], None] | None = getattr(torch.cuda, "_sleep", None)


class Lap:
    """One stretch of torch's current stream. Host and device are timed apart.

    Where the device has nothing to do it waits for the host, and a short kernel takes what it takes to launch it. So an idle device
    first spins while the host puts the launches into its queue.
    """

    def __init__(self, device: torch.device) -> None:
        event: Any = torch.cuda.Event
        self._stream = torch.cuda.current_stream(device)
        self._start, self._end = event(enable_timing=True), event(enable_timing=True)
        self.host = 0.0  # seconds
        if _spin is not None and self._stream.query():
            with torch.cuda.device(device):
                _spin(QUEUEING)
        self._began = time.perf_counter()
        self._start.record(self._stream)

    def end(self) -> None:
        self._end.record(self._stream)
        self.host = time.perf_counter() - self._began

    def seconds(self) -> float | None:
        """None while the device has not come so far."""
        return float(self._start.elapsed_time(self._end)) * 1e-3 if self._end.query() else None
