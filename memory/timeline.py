"""Device time in the ledger: pairs of events become stretches of time, once they are reached and never waited for."""

from __future__ import annotations

import threading
from collections import deque

from .device import Device, Event
from .ledger import Kind, Ledger, now

# An event's time is told as milliseconds since another one, in 32 bits: the other one must not be hours ago.
ANCHOR_SECONDS = 5.0


class Timeline:
    """One device's clock, as the host's."""

    def __init__(self, device: Device, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._pending: deque[tuple[Kind, str, Event, Event, int, str]] = deque()
        self._anchor = device.compute_event()
        self._anchor.synchronize()
        self._anchor_time = now()

    def add(self, kind: Kind, layer: str, start: Event, end: Event, nbytes: int = 0, route: str = "") -> None:
        with self._lock:
            self._pending.append((kind, layer, start, end, nbytes, route))

    def harvest(self, most: int = 6) -> None:
        """Hand what is over to the ledger, in the order it was added, at most so many."""
        with self._lock:
            for _ in range(min(most, len(self._pending))):
                kind, layer, start, end, nbytes, route = self._pending[0]
                if not end.query() or not start.query():
                    self._pending.rotate(-1)  # of another order, perhaps: the next one may be over
                    continue
                self._pending.popleft()
                begun = self._anchor_time + self._anchor.elapsed_time(start) * 1e-3
                over = self._anchor_time + self._anchor.elapsed_time(end) * 1e-3
                self._ledger.add(kind, layer, begun, over, nbytes, route)
                if over - self._anchor_time > ANCHOR_SECONDS:
                    self._anchor, self._anchor_time = end, over

    def finish(self) -> None:
        """Everything; the device is done with it."""
        self.harvest(len(self._pending))
