"""Times of work on a GPU, by events that are read when it is done: nobody waits for them."""

from __future__ import annotations

import time
from typing import Any

import torch


class Lap:
    """One stretch of torch's current stream. Host and device are timed apart."""

    def __init__(self, device: torch.device) -> None:
        event: Any = torch.cuda.Event
        self._stream = torch.cuda.current_stream(device)
        self._start, self._end = event(enable_timing=True), event(enable_timing=True)
        self.host = 0.0  # seconds
        self._began = time.perf_counter()
        self._start.record(self._stream)

    def end(self) -> None:
        self._end.record(self._stream)
        self.host = time.perf_counter() - self._began

    def seconds(self) -> float | None:
        """None while the device has not come so far."""
        return float(self._start.elapsed_time(self._end)) * 1e-3 if self._end.query() else None
