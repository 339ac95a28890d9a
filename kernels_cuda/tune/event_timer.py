"""Times of work on a GPU, by events that are read when it is done: nobody waits for them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

QUEUEING = 60e-6  # seconds: what the host takes to put a few launches into the queue
LONGER = 1.5  # than the host took the last time
MOST = 400e-6
CACHE = 32 << 20  # bytes, where torch does not tell them
MOST_AHEAD = 2e-3  # of several laps together
CLOCK = 1.7e9  # cycles a second of a card, more or less

# Private to torch, so its absence is no error.
_spin: Callable[[int], None] | None = getattr(torch.cuda, "_sleep", None)


def spin(device: torch.device, seconds: float) -> None:
    """Have the device do nothing for so long, where torch can."""
    if _spin is not None:
        with torch.cuda.device(device):
            _spin(round(CLOCK * seconds))


_rooms: weakref.WeakValueDictionary[torch.device, Room] = weakref.WeakValueDictionary()


class Room:
    """As much memory of a device as its cache holds. There while anybody sweeps."""

    def __init__(self, device: torch.device) -> None:
        nbytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", CACHE)
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)


class Sweeper:
    """Before each of several laps on the same operands, what the last one has read is swept out of the device's cache, as it is
    where a model's other weights pass through it between two calls."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        room = _rooms.get(device)
        if room is None:
            room = _rooms[device] = Room(device)
        self._room = room

    def begin(self, laps: int) -> None:
        """The device has something to do while the host asks for them."""
        spin(self._device, min(laps * QUEUEING, MOST_AHEAD))

    def sweep(self) -> None:
        self._room.bytes.zero_()


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
        if before is not None or self._stream.query():
            spin(device, min(max(QUEUEING, LONGER * (before or 0.0)), MOST))
        self._began = time.perf_counter()
        self._start.record(self._stream)

    def end(self) -> None:
        self._end.record(self._stream)
        self.host = time.perf_counter() - self._began
        self.waited = self._start.query()

    def seconds(self) -> float | None:
        """None while the device has not come so far."""
        return float(self._start.elapsed_time(self._end)) * 1e-3 if self._end.query() else None
