"""A layer's bytes in its files: the fewest pieces that are contiguous both there and on the
device."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy

from .file import Extent
from .layer import Layer, Weight
from .open_file import OpenFile

# Two stretches of a file with at most this between them are mapped as one, because a mapping costs
# more than some pages.
MERGED_GAP = 1 << 20


@dataclass(frozen=True)
class Run:
    """Bytes `[begin, begin + nbytes)` of a file. Without a weight they go to byte `at` of the
    layer's room as they are. With one they go to the conversion that writes it there, in another
    type or order."""

    file: OpenFile
    begin: int
    nbytes: int
    at: int
    weight: Weight | None = None


def runs_of(layer: Layer, home: Callable[[Extent], OpenFile]) -> tuple[Run, ...]:
    """The layer's runs; unstaged neighbours are merged. `home` tells an extent's file."""
    runs: list[Run] = []
    for weight, at in zip(layer.weights, layer.offsets, strict=True):
        file, extent = home(weight.extent), weight.extent
        if not extent.nbytes:
            continue
        if weight.is_staged:
            runs.append(Run(file, extent.begin, extent.nbytes, at, weight))
            continue
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.weight is None
            and last.file is file
            and last.begin + last.nbytes == extent.begin
            and last.at + last.nbytes == at
        ):
            runs[-1] = Run(file, last.begin, last.nbytes + extent.nbytes, last.at)
        else:
            runs.append(Run(file, extent.begin, extent.nbytes, at))
    return tuple(runs)


@dataclass(frozen=True)
class Span:
    """Whole pages of a file, `[begin, end)`, that hold some of a layer's bytes."""

    file: OpenFile
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def spans_of(runs: Sequence[Run]) -> tuple[Span, ...]:
    """The pages of these runs, each once. Spans of different layers may share a page."""
    step = mmap.ALLOCATIONGRANULARITY  # where a mapping may begin: a page, on Windows 64 KiB
    spans: list[Span] = []
    for run in sorted(runs, key=lambda run: (str(run.file.path), run.begin)):
        begin = run.begin // step * step
        end = -(-(run.begin + run.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = spans[-1] if spans else None
        if last is not None and last.file is run.file and begin <= last.end + MERGED_GAP:
            spans[-1] = Span(last.file, last.begin, max(last.end, end))
        else:
            spans.append(Span(run.file, begin, end))
    return tuple(spans)


def address_of(mapped: mmap.mmap) -> int:
    """Address of a mapping. The caller keeps the mapping alive."""
    address: int = numpy.frombuffer(mapped, numpy.uint8).ctypes.data
    return address
