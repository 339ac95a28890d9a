"""Times of work on a GPU, from events that are read once they are reached; they are not waited
for."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

QUEUEING = 60e-6  # seconds that the host takes to queue a few launches
LONGER = 1.5  # times the host's last time
MOST = 400e-6
CACHE = 32 << 20  # bytes, if torch does not tell them
MOST_AHEAD = 2e-3  # seconds, for several laps together
CLOCK = 1.7e9  # cycles a second of a card, approximately

# Private to torch, so its absence is no error.
_spin: Callable[[int], None] | None = getattr(torch.cuda, "_sleep", None)


def spin(device: torch.device, seconds: float) -> None:
    """Keep the device busy with nothing for so long, if torch can."""
    if _spin is not None:
        with torch.cuda.device(device):
            _spin(round(CLOCK * seconds))


_rooms: weakref.WeakValueDictionary[torch.device, Room] = weakref.WeakValueDictionary()


class Room:
    """As much memory of a device as its cache holds. It lives while a sweeper does."""

    def __init__(self, device: torch.device) -> None:
        nbytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", CACHE)
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)


class Sweeper:
    """Sweeps what the last lap has read out of the device's cache, before each of several laps on
    the same operands. In a model, other weights pass through the cache between two calls."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        room = _rooms.get(device)
        if room is None:
            room = _rooms[device] = Room(device)
        self._room = room

    def begin(self, laps: int) -> None:
        """Give the device something to do while the host asks for the laps."""
        spin(self._device, min(laps * QUEUEING, MOST_AHEAD))

    def sweep(self) -> None:
        self._room.bytes.zero_()


class Lap:
    """One stretch of torch's current stream. Host and device are timed apart.

    An idle device waits for the host, and a short kernel then takes as long as its launch. So an
    idle device first spins while the host queues the launches. A busy device spins too if last time
    it was done before they came.

    host    seconds that the host took
    waited  whether the device was ready before the host, so that its time is partly the host's
    """

    def __init__(self, device: torch.device, before: float | None = None) -> None:
        """before: seconds that the host took for this work when the device waited for it."""
        event: Any = torch.cuda.Event
        self._stream = torch.cuda.current_stream(device)
        self._start, self._end = event(enable_timing=True), event(enable_timing=True)
        self.host, self.waited = 0.0, False
        if before is not None or self._stream.query():
            spin(device, min(max(QUEUEING, LONGER * (before or 0.0)), MOST))
        self._began = time.perf_counter()
        self._start.record(self._stream)

    def end(self) -> None:
        self._end.record(self._stream)
        self.host = time.perf_counter() - self._began
        self.waited = self._start.query()

    def seconds(self) -> float | None:
        """Seconds on the device; None while it is not done."""
        return float(self._start.elapsed_time(self._end)) * 1e-3 if self._end.query() else None
