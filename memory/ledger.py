"""Record of the pager's work: bytes by route, waits, peaks, and a timeline. Cheap enough to be
always on.

An entry is a tuple in a ring buffer of fixed length; sums are kept beside it, so nothing grows with
the run. Times are seconds of `time.perf_counter`.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["copy", "stall", "use", "evict", "fill"]

MOST_ENTRIES = 50_000

now = time.perf_counter


@dataclass(frozen=True)
class Entry:
    """One stretch of a layer's time: its bytes on the way (copy), compute waiting for them (stall)
    or using them (use); with managed memory also its pages being filled or leaving the device."""

    kind: Kind
    layer: str
    start: float
    end: float
    nbytes: int = 0


class Ledger:
    """Written by the pager's threads, read by the report."""

    def __init__(self, most: int = MOST_ENTRIES) -> None:
        self._lock = threading.RLock()  # taken again where the model is collected by the thread that has it
        self._entries: deque[Entry] = deque(maxlen=most)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()
        self._route_bytes: Counter[str] = Counter()
        self._by_layer: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._counts_by_layer: Counter[tuple[str, str]] = Counter()
        self._copied = 0
        self._held_changes: deque[tuple[float, str, int]] = deque(maxlen=most)
        self._held: Counter[str] = Counter()
        self._peaks: Counter[str] = Counter()
        self._notes: dict[str, str] = {}

    def add(self, kind: Kind, layer: str, start: float, end: float, nbytes: int = 0, route: str = "") -> None:
        """Add a stretch that is over. `route` says where the bytes of a copy came from."""
        with self._lock:
            self._entries.append(Entry(kind, layer, start, end, nbytes))
            self._seconds[kind] += end - start
            self._counts[kind] += 1
            if kind == "copy":
                self._copied += nbytes
            if route:
                self._route_bytes[route] += nbytes
            self._by_layer[kind, layer] += end - start
            self._counts_by_layer[kind, layer] += 1

    def hold(self, what: str, nbytes: int) -> None:
        """Record that memory of a kind was taken or, with a negative number, given back."""
        with self._lock:
            self._held[what] += nbytes
            self._held_changes.append((now(), what, nbytes))
            self._peaks[what] = max(self._peaks[what], self._held[what])

    def note(self, what: str, why: str) -> None:
        """Record a decision and its reason for the report, such as the backend or the way to
        read."""
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

    def mean_seconds(self, kind: Kind, layer: str) -> float:
        """Mean length of a layer's stretches of that kind; 0 if there are none."""
        with self._lock:
            return self._by_layer[kind, layer] / max(self._counts_by_layer[kind, layer], 1)

    def rate(self) -> float:
        """Bytes per second of the copies while one was under way; 0 before the first."""
        with self._lock:
            return self._copied / self._seconds["copy"] if self._seconds["copy"] else 0.0

    def overlap(self) -> float:
        """The share of the copies' time, within the timeline, in which compute used a layer."""
        entries = self.entries
        return overlap_of([e for e in entries if e.kind == "copy"], [e for e in entries if e.kind == "use"])

    def residency(self) -> list[tuple[float, str, int]]:
        """The latest changes as (time, kind of memory, bytes taken or, if negative, given back)."""
        with self._lock:
            return list(self._held_changes)

    def summary(self) -> dict[str, Any]:
        """Sums over the whole run, as plain values."""
        with self._lock:
            return {
                "seconds": dict(self._seconds),
                "counts": dict(self._counts),
                "bytes by route": dict(self._route_bytes),
                "stalls by layer": {layer: s for (kind, layer), s in self._by_layer.items() if kind == "stall"},
                "held bytes": dict(self._held),
                "peak bytes": dict(self._peaks),
                "notes": dict(self._notes),
            }

    def to_json(self) -> str:
        rows = [[e.kind, e.layer, e.start, e.end, e.nbytes] for e in self.entries]
        return json.dumps({"summary": self.summary(), "timeline": rows, "memory": self.residency()})

    def chrome_trace(self) -> str:
        """The timeline for chrome://tracing or Perfetto: a track each for bus, compute and pages,
        and the memory held by kind."""
        tracks = {"copy": 1, "stall": 2, "use": 2, "evict": 3, "fill": 3}
        named = [
            {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": name}}
            for tid, name in ((1, "bus"), (2, "compute"), (3, "pages"))
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
        return json.dumps({"traceEvents": named + events + self._counters()})

    def _counters(self) -> list[dict[str, Any]]:
        """Held bytes over time. Changes that fell out of the ring count as its starting value."""
        changes = self.residency()
        held = Counter({what: self.held(what) for _, what, _ in changes})
        for _, what, nbytes in changes:
            held[what] -= nbytes
        counters = []
        for when, what, nbytes in changes:
            held[what] += nbytes
            counters.append({"ph": "C", "pid": 0, "name": what, "ts": when * 1e6, "args": {"held": held[what]}})
        return counters


def overlap_of(copies: Sequence[Entry], uses: Sequence[Entry]) -> float:
    """The share of the copies' time in which there were uses."""
    busy, used = (_union((e.start, e.end) for e in entries) for entries in (copies, uses))
    total = sum(end - start for start, end in busy)
    return _common(busy, used) / total if total else 0.0


def _union(stretches: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same stretches without overlaps, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(stretches):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _common(left: list[tuple[float, float]], right: list[tuple[float, float]]) -> float:
    """Seconds that two such lists have in common."""
    seconds, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        seconds += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return seconds
