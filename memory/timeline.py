"""Device time in the ledger: pairs of events become stretches of time once they are reached; they
are not waited for."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from .device import Device, Event
from .ledger import Kind, Ledger, now

# An event's time is told in 32 bits as milliseconds since an anchor, so the anchor must not be
# hours old.
ANCHOR_SECONDS = 5.0


@dataclass(frozen=True)
class Pending:
    """A stretch that is not in the ledger yet."""

    kind: Kind
    layer: str
    start: Event
    end: Event
    there: Event | None = None
    nbytes: int = 0
    route: str = ""

    @property
    def over(self) -> bool:
        """Whether all its events are reached. The end alone does not tell, because a layer may be
        acquired in one stream and released in another."""
        return self.end.query() and self.start.query() and (self.there is None or self.there.query())


class Timeline:
    """One device's clock, translated to the host's."""

    def __init__(self, device: Device, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._pending: deque[Pending] = deque()
        self._anchor = device.compute_event()
        self._anchor.synchronize()
        self._anchor_time = now()

    def add(self, kind: Kind, layer: str, start: Event, end: Event, nbytes: int = 0, route: str = "") -> None:
        with self._lock:
            self._pending.append(Pending(kind, layer, start, end, nbytes=nbytes, route=route))

    def add_use(self, layer: str, asked: Event, there: Event | None, over: Event) -> None:
        """Add a use: compute came to `asked`, waited for `there` if that was later, and used the
        layer until `over`."""
        with self._lock:
            self._pending.append(Pending("use", layer, asked, over, there=there))

    def harvest(self, most: int = 40) -> None:
        """Hand finished stretches to the ledger. Looks at `most` at most."""
        with self._lock:
            for _ in range(min(most, len(self._pending))):
                one = self._pending[0]
                if not one.over:
                    self._pending.rotate(-1)  # perhaps of another order: the next one may be over
                    continue
                self._pending.popleft()
                begun, over = self._time(one.start), self._time(one.end)
                there = begun if one.there is None else self._time(one.there)
                if there > begun:
                    self._ledger.add("stall", one.layer, begun, there)
                self._ledger.add(one.kind, one.layer, max(begun, there), over, one.nbytes, one.route)
                if over - self._anchor_time > ANCHOR_SECONDS:
                    self._anchor, self._anchor_time = one.end, over

    def _time(self, event: Event) -> float:
        return self._anchor_time + self._anchor.elapsed_time(event) * 1e-3

    def finish(self) -> None:
        """Hand everything to the ledger; the device is done with it."""
        self.harvest(len(self._pending))
