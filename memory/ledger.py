"""What the pager did: bytes by route, waits, peaks, and a timeline. Cheap enough to be always on.

An entry is a tuple in a ring buffer of fixed length; sums are kept beside it, so nothing grows with the run. Times are
seconds of `time.perf_counter`.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["copy", "stall", "use"]

MOST_ENTRIES = 50_000

now = time.perf_counter


@dataclass(frozen=True)
class Entry:
    """One stretch of time of one layer: its bytes on the way, compute waiting for them, compute using them."""

    kind: Kind
    layer: str
    start: float
    end: float
    nbytes: int = 0


class Ledger:
    """Written by the pager's threads, read by the report."""

    def __init__(self, most: int = MOST_ENTRIES) -> None:
        self._lock = threading.Lock()
        self._entries: deque[Entry] = deque(maxlen=most)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()
        self._route_bytes: Counter[str] = Counter()
        self._stalls: defaultdict[str, float] = defaultdict(float)
        self._held: Counter[str] = Counter()
        self._peaks: Counter[str] = Counter()
        self._notes: dict[str, str] = {}

    def add(self, kind: Kind, layer: str, start: float, end: float, nbytes: int = 0, route: str = "") -> None:
        """A stretch that is over. `route` says where the bytes of a copy came from."""
        with self._lock:
            self._entries.append(Entry(kind, layer, start, end, nbytes))
            self._seconds[kind] += end - start
            self._counts[kind] += 1
            if route:
                self._route_bytes[route] += nbytes
            if kind == "stall":
                self._stalls[layer] += end - start

    def hold(self, what: str, nbytes: int) -> None:
        """Memory of a kind was taken, or with a negative number given back."""
        with self._lock:
            self._held[what] += nbytes
            self._peaks[what] = max(self._peaks[what], self._held[what])

    def note(self, what: str, why: str) -> None:
        """A decision and its reason, for the report: which backend, which way to read."""
        with self._lock:
            self._notes[what] = why

    @property
    def entries(self) -> list[Entry]:
        with self._lock:
            return list(self._entries)

    def held(self, what: str) -> int:
        with self._lock:
            return self._held[what]

    def peak(self, what: str) -> int:
        with self._lock:
            return self._peaks[what]

    def summary(self) -> dict[str, Any]:
        """Sums over the whole run, as plain values."""
        with self._lock:
            return {
                "seconds": dict(self._seconds),
                "counts": dict(self._counts),
                "bytes by route": dict(self._route_bytes),
                "stalls by layer": dict(self._stalls),
                "held bytes": dict(self._held),
                "peak bytes": dict(self._peaks),
                "notes": dict(self._notes),
            }

    def to_json(self) -> str:
        rows = [[e.kind, e.layer, e.start, e.end, e.nbytes] for e in self.entries]
        return json.dumps({"summary": self.summary(), "timeline": rows})

    def chrome_trace(self) -> str:
        """The timeline for chrome://tracing or Perfetto: a track for the bus, one for compute."""
        tracks = {"copy": 1, "stall": 2, "use": 2}
        named = [
            {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": name}}
            for tid, name in ((1, "bus"), (2, "compute"))
        ]
        events = [
            {
                "ph": "X",
                "pid": 0,
                "tid": tracks[e.kind],
                "name": e.layer if e.kind != "stall" else f"waits for {e.layer}",
                "cat": e.kind,
                "ts": e.start * 1e6,
                "dur": (e.end - e.start) * 1e6,
                "args": {"bytes": e.nbytes},
            }
            for e in self.entries
        ]
        return json.dumps({"traceEvents": named + events})
