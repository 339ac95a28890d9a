"""What an override did: how many attentions, how much of them was visited, how long they took, and why others stayed dense.

Nothing waits for the device: what it has to say is added up there, and read when a report is made.
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
MOST_TIMES = 128  # of each kind: the latest


@dataclass(frozen=True)
class Tallied:
    """What was counted, as plain values.

    sparse    how many attentions were, and of those
    visited   which share of the blocks was visited; None: there were none
    seconds   how long one of each kind took, typically, where one was timed
    dense     (why, how many) of the others, most first
    """

    sparse: int
    visited: float | None
    seconds: dict[Kind, float]
    dense: tuple[tuple[str, int], ...]


class Tally:
    """Of one override. Several threads may run its model, each on a card of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sparse = 0
        self._dense: Counter[str] = Counter()
        self._blocks, self._known = 0, 0.0  # blocks in all; of them visited, where the host knows
        self._visited: dict[torch.device, Tensor] = {}
        self._times: dict[Kind, deque[tuple[Moment, Moment]]] = defaultdict(lambda: deque(maxlen=MOST_TIMES))

    def sparse(self) -> None:
        with self._lock:
            self._sparse += 1

    def dense(self, why: str) -> None:
        with self._lock:
            self._dense[why] += 1

    def visited(self, blocks: BlockList, key_blocks: int) -> None:
        """What a list for each batch row and head visits of so many key blocks: counted on the device."""
        count = blocks.counts.sum()
        with self._lock:
            self._blocks += blocks.counts.numel() * key_blocks
            before = self._visited.get(count.device)
            self._visited[count.device] = count if before is None else before + count

    def visited_share(self, share: float, blocks: int) -> None:
        """The same of a list that is known."""
        with self._lock:
            self._blocks += blocks
            self._known += share * blocks

    @contextmanager
    def timed(self, kind: Kind, device: torch.device) -> Iterator[None]:
        """How long the device is busy with what is called in here."""
        start = Moment(device)
        yield
        self._times[kind].append((start, Moment(device)))

    def read(self) -> Tallied:
        """Waits for the device."""
        with self._lock:
            visited = self._known + sum(int(count) for count in self._visited.values())
            share = visited / self._blocks if self._blocks else None
            sparse, dense = self._sparse, tuple(self._dense.most_common())
        times = {kind: [start.until(end) for start, end in list(pairs)] for kind, pairs in self._times.items()}
        return Tallied(sparse, share, {kind: median(found) for kind, found in times.items() if found}, dense)


class Moment:
    """When a device got here."""

    def __init__(self, device: torch.device) -> None:
        self._at: float | torch.cuda.Event
        if device.type == "cuda":
            self._at = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._at.record(torch.cuda.current_stream(device))
        else:
            self._at = time.perf_counter()

    def until(self, end: Moment) -> float:
        """Seconds, on the same device. Waits for the end."""
        if isinstance(self._at, float):
            assert isinstance(end._at, float)
            return end._at - self._at
        assert not isinstance(end._at, float)
        end._at.synchronize()
        return float(self._at.elapsed_time(end._at)) / 1e3
