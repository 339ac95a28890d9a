"""Timing on the GPU: device time from events around graph replays, cold cache, medians.

Several sets of inputs, together more than twice the L2, are worked through in turn, so no set finds itself in the
cache. Outputs are kept apart, one per set, for the same reason. The launches of one turn are captured in a CUDA graph:
what is timed is the device, not Python.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ROUNDS = 9
TURN_SECONDS = 4e-3
MOST_SETS = 64


def sets_for(size: int) -> int:
    """How many sets of `size` bytes make a turn that is cold throughout."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(3, min(MOST_SETS, -(-2 * l2 // max(size, 1)) + 1))


def device_seconds(run: Callable[..., Any], inputs: Sequence[Sequence[Any]]) -> float:
    """Median device seconds of one run over these input sets."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for each in inputs[:2]:
            run(*each)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [run(*each) for each in inputs]
    replays = max(1, int(TURN_SECONDS / max(_replay(graph, 1), 1e-6)))
    seconds = statistics.median(_replay(graph, replays) for _ in range(ROUNDS)) / len(inputs)
    del kept
    return seconds


def eager_seconds(run: Callable[..., Any], inputs: Sequence[Sequence[Any]]) -> float:
    """The same without a graph, for what may not be captured: right where the device takes longer than the host."""

    def turn() -> None:
        for each in inputs:
            run(*each)

    turn()
    replays = max(1, int(TURN_SECONDS / max(_timed(turn, 1), 1e-6)))
    return statistics.median(_timed(turn, replays) for _ in range(ROUNDS)) / len(inputs)


def seconds_of_one(run: Callable[..., Any], inputs: Sequence[Any]) -> float:
    """Of one call, the middle of three: for what takes so long that more would cost more than they tell."""
    run(*inputs)
    return statistics.median(_timed(lambda: run(*inputs), 1) for _ in range(3))


def _replay(graph: torch.cuda.CUDAGraph, times: int) -> float:
    return _timed(graph.replay, times)


def _timed(run: Callable[[], object], times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / times


_copies: dict[int, float] = {}


def copy_bandwidth(size: int) -> float:
    """Bytes per second of a device-to-device copy that reads and writes `size` bytes in all, cold, in this process.

    The faster of two: the driver's copy, which in a graph is not always the fastest way, and an elementwise kernel.
    """
    if size not in _copies:
        half = max(size // 32 * 16, 16)
        room = torch.empty(sets_for(size), 2, half // 4, dtype=torch.int32, device="cuda")
        pairs = [tuple(each) for each in room]
        ways = (lambda a, b: b.copy_(a), lambda a, b: torch.bitwise_not(a, out=b))
        _copies[size] = 2 * half / min(device_seconds(way, pairs) for way in ways)
    return _copies[size]


def host_seconds(run: Callable[[], Any], launches: int = 400) -> float:
    """Best-of-rounds seconds that one call keeps the host, the device being faster."""
    best = float("inf")
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(launches):
            run()
        best = min(best, (time.perf_counter() - start) / launches)
    torch.cuda.synchronize()
    return best


def sum_bytes(*tensors: Tensor | None) -> int:
    """Bytes of the distinct elements of these tensors: what a perfect kernel moves for them."""
    total = 0
    for t in tensors:
        if t is not None:
            distinct = 1
            for size, stride in zip(t.shape, t.stride(), strict=True):
                distinct *= size if stride else 1
            total += distinct * t.element_size()
    return total
