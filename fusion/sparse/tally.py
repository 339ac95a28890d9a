"""A count of what an override did: how many attentions, the share of visited blocks, their time,
and why others stayed dense.

Nothing waits for the device: its numbers are added up there, and read when a report is made.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from ...kernels_cuda import BlockList

Kind = Literal["sparse", "dense"]
MOST_TIMES = 128  # of each kind: the latest are kept


@dataclass(frozen=True)
class Tallied:
    """The counts as plain values.

    sparse    number of sparse attentions
    visited   their share of visited blocks; None: there were none
    seconds   median time of one of each kind, if any was timed
    dense     (reason, count) of the others, most first
    """

    sparse: int
    visited: float | None
    seconds: dict[Kind, float]
    dense: tuple[tuple[str, int], ...]


class Tally:
    """The counts of one override. Several threads may run its model, each on its own card."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sparse = 0
        self._dense: Counter[str] = Counter()
        # All blocks; and the visited ones, as far as the host knows.
        self._blocks, self._known = 0, 0.0
        self._visited: dict[torch.device, Tensor] = {}
        self._times: dict[Kind, deque[tuple[Moment, Moment]]] = defaultdict(lambda: deque(maxlen=MOST_TIMES))

    def sparse(self) -> None:
        with self._lock:
            self._sparse += 1

    def dense(self, why: str) -> None:
        with self._lock:
            self._dense[why] += 1

    def visited(self, blocks: BlockList, key_blocks: int) -> None:
        """Add the blocks that a list for each batch row and head visits, of so many key blocks:
        counted on the device."""
        count = blocks.counts.sum()
        with self._lock:
            self._blocks += blocks.counts.numel() * key_blocks
            before = self._visited.get(count.device)
            self._visited[count.device] = count if before is None else before + count

    def visited_share(self, share: float, blocks: int) -> None:
        """Add a list whose share is known on the host."""
        with self._lock:
            self._blocks += blocks
            self._known += share * blocks

    @contextmanager
    def timed(self, kind: Kind, device: torch.device) -> Iterator[None]:
        """Time how long the device is busy with the calls inside."""
        start = Moment(device)
        yield
        self._times[kind].append((start, Moment(device)))

    def read(self) -> Tallied:
        """The counts so far. Waits for the device."""
        with self._lock:
            visited = self._known + sum(int(count) for count in self._visited.values())
            share = visited / self._blocks if self._blocks else None
            sparse, dense = self._sparse, tuple(self._dense.most_common())
        times = {kind: [start.until(end) for start, end in list(pairs)] for kind, pairs in self._times.items()}
        return Tallied(sparse, share, {kind: median(found) for kind, found in times.items() if found}, dense)


class Moment:
    """The moment at which a device got here."""

    def __init__(self, device: torch.device) -> None:
        self._at: float | torch.cuda.Event
        if device.type == "cuda":
            self._at = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._at.record(torch.cuda.current_stream(device))
        else:
            self._at = time.perf_counter()

    def until(self, end: Moment) -> float:
        """Seconds until another moment of the same device. Waits for it."""
        if isinstance(self._at, float):
            assert isinstance(end._at, float)
            return end._at - self._at
        assert not isinstance(end._at, float)
        end._at.synchronize()
        return float(self._at.elapsed_time(end._at)) / 1e3
