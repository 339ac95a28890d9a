"""Lanes for the stages of a frame: one after the other, or each on a CUDA stream of its own. Then a
frame is decoded while the next is in the network and the one behind it is encoded.

The host sets stages going in order, and waits only for finished frames. A stage's result carries an
event for the stream that takes it, and is kept from the allocator until that stream is done with
it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

STAGES = ("encode", "steps", "decode")
WORK = "steps"  # runs on the stream that stock samples on, because streamed weights arrive there


@dataclass(frozen=True)
class Handed:
    """A stage's result. end: an event behind it; None: it is there already."""

    value: Tensor
    end: Any = None


@dataclass(frozen=True)
class Ran:
    """A stage of a group of frames, in seconds since the run began."""

    stage: str
    group: int
    start: float
    end: float


class Lanes(Protocol):
    """A way to run stages. ahead: groups under way before the first is waited for."""

    ahead: int

    def run(self, stage: str, group: int, work: Callable[..., Tensor], *given: Handed) -> Handed:
        """Set a stage of a group of frames going."""

    def take(self, handed: Handed) -> Tensor:
        """Wait for a result and return it."""

    def ran(self, group: int) -> list[Ran]:
        """The stages of a group whose last result was taken. Told once."""


class InOrder:
    """Stages one after the other, on the stream or CPU of the host's thread."""

    ahead = 0

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._ran: list[Ran] = []

    def run(self, stage: str, group: int, work: Callable[..., Tensor], *given: Handed) -> Handed:
        start = time.perf_counter()
        made = Handed(work(*(one.value for one in given)))
        self._ran.append(Ran(stage, group, start - self._began, time.perf_counter() - self._began))
        return made

    def take(self, handed: Handed) -> Tensor:
        return handed.value

    def ran(self, group: int) -> list[Ran]:
        found = [one for one in self._ran if one.group == group]
        self._ran = [one for one in self._ran if one.group != group]
        return found


class OnStreams:
    """Stages on a stream each; the network's on the current one."""

    ahead = 2

    def __init__(self, device: torch.device) -> None:
        self._main = torch.cuda.current_stream(device)
        self._streams = {
            stage: self._main if stage == WORK else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for stage in STAGES
        }
        for stream in self._streams.values():
            stream.wait_stream(self._main)  # weights were brought on this one
        self._began = _event(self._main)
        self._events: list[tuple[str, int, Any, Any]] = []

    def run(self, stage: str, group: int, work: Callable[..., Tensor], *given: Handed) -> Handed:
        stream = self._streams[stage]
        with torch.cuda.stream(stream):
            for one in given:
                if one.end is not None:
                    stream.wait_event(one.end)
                if one.value.is_cuda:
                    one.value.record_stream(stream)
            start = _event(stream)
            value = work(*(one.value for one in given))
            end = _event(stream)
        self._events.append((stage, group, start, end))
        return Handed(value, end)

    def take(self, handed: Handed) -> Tensor:
        handed.end.synchronize()
        return handed.value

    def ran(self, group: int) -> list[Ran]:
        done = [one for one in self._events if one[1] == group]
        self._events = [one for one in self._events if one[1] != group]
        return [
            Ran(stage, number, *(self._began.elapsed_time(at) / 1e3 for at in (start, end)))
            for stage, number, start, end in done
        ]

    def close(self) -> None:
        """Put later work on the main stream, such as giving back memory, behind all stages."""
        for stream in self._streams.values():
            self._main.wait_stream(stream)


def _event(stream: Any) -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


@contextlib.contextmanager
def lanes_for(device: torch.device) -> Iterator[Lanes]:
    """Streams on a CUDA card, else stages in order."""
    if device.type != "cuda":
        yield InOrder()
        return
    lanes = OnStreams(device)
    try:
        yield lanes
    finally:
        lanes.close()
