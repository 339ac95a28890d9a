"""The operations that move values without changing them. A band stays along one dimension; it is
followed through views that divide that dimension or join it with others."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..bands import Span
from .rules import aten, moving, run, wrap
from .tensor import Banded, Unreadable


def _axis(x: Banded) -> int:
    assert x.axis is not None
    return x.axis


def _view(x: Banded, held: Tensor, dim: int) -> Banded:
    return x.view_as_band(held, dim, x.span, x.whole)


@moving(aten.alias, aten.detach)
def alias(x: Banded) -> Banded:
    """The same once more."""
    return _view(x, x.held.narrow(_axis(x), 0, x.held.shape[_axis(x)]), _axis(x))


@moving(aten.permute)
def permute(x: Banded, order: Any) -> Banded:
    """Another order of the dimensions."""
    order = [d % x.ndim for d in order]
    return _view(x, x.held.permute(order), order.index(_axis(x)))


@moving(aten.transpose, aten.t)
def transpose(x: Banded, one: int = 0, other: int = 1) -> Banded:
    """Two dimensions change places."""
    order = list(range(x.ndim))
    order[one], order[other] = order[other], order[one]
    return permute(x, order)


@moving(aten.unsqueeze)
def unsqueeze(x: Banded, at: int) -> Banded:
    """A dimension more."""
    at %= x.ndim + 1
    return _view(x, x.held.unsqueeze(at), _axis(x) + (at <= _axis(x)))


@moving(aten.squeeze)
def squeeze(x: Banded, dims: Any = None) -> Banded:
    """Without dimensions of size 1. A band of one row is still one of many."""
    wanted = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = sorted({d % x.ndim for d in wanted if x.shape[d] == 1})
    held = x.held
    for d in reversed(gone):
        held = held.squeeze(d)
    return _view(x, held, _axis(x) - sum(d < _axis(x) for d in gone))


@moving(aten.expand)
def expand(x: Banded, sizes: Any, **_: Any) -> Banded:
    """Repeated without a copy."""
    sizes = list(sizes)
    dim = _axis(x) + len(sizes) - x.ndim
    if sizes[dim] not in (-1, x.whole):
        raise Unreadable("it expands pictures")
    sizes[dim] = -1
    return _view(x, x.held.expand(sizes), dim)


@moving(aten.select)
def select(x: Banded, dim: int, index: int) -> Banded:
    """One of a dimension."""
    dim %= x.ndim
    if dim == x.axis:
        raise Unreadable("it takes single rows")
    return _view(x, x.held.select(dim, index), _axis(x) - (dim < _axis(x)))


@moving(aten.unbind)
def unbind(x: Banded, dim: int = 0) -> list[Banded]:
    """All of a dimension, apart."""
    return [select(x, dim, index) for index in range(x.shape[dim])]


@moving(aten.slice)
def slice_(x: Banded, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Banded:
    """A range of a dimension; of the one that is cut, what of it is there."""
    dim %= x.ndim
    first, last, _ = slice(start, end).indices(x.shape[dim])
    if dim != x.axis:
        return _view(x, aten.slice(x.held, dim, start, end, step), _axis(x))
    if (first, last) == (0, x.whole) and step == 1:
        return alias(x)
    low, high = max(first, x.span[0]), min(last, x.span[1])
    if step != 1 or low >= high:
        raise Unreadable("it takes single rows")
    return x.view_as_band(x.part((low, high)), dim, (low - first, high - first), last - first)


@moving(aten.split, aten.split_with_sizes)
def split(x: Banded, sizes: Any, dim: int = 0) -> list[Banded]:
    """In parts."""
    dim %= x.ndim
    whole = x.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, whole - at) for at in range(0, whole, sizes)]
    parts, at = [], 0
    for size in sizes:
        parts.append(slice_(x, dim, at, at + size))
        at += size
    return parts


@moving(aten.cat)
def cat(tensors: Any, dim: int = 0) -> Banded:
    """Joined along another dimension: the rows that all have."""
    first = next(t for t in tensors if isinstance(t, Banded))
    dim %= first.ndim
    if dim == first.axis or any(
        isinstance(t, Banded) and (t.axis, t.whole) != (first.axis, first.whole) for t in tensors
    ):
        raise Unreadable("it joins pictures side by side")
    spans = [t.span for t in tensors if isinstance(t, Banded)]
    span = max(low for low, _ in spans), min(high for _, high in spans)
    if span[0] >= span[1]:
        raise Unreadable("the bands are too narrow")
    parts = [
        t.part(span) if isinstance(t, Banded) else t.narrow(_axis(first), span[0], span[1] - span[0]) for t in tensors
    ]
    return wrap(first, run(aten.cat.default, first, parts, dim), first.axis, span, first.whole)


@moving(aten.stack)
def stack(tensors: Any, dim: int = 0) -> Banded:
    """Joined along a new dimension."""
    ndim = next(t for t in tensors if isinstance(t, Banded)).ndim
    made: Banded = cat([t.unsqueeze(dim % (ndim + 1)) for t in tensors], dim % (ndim + 1))
    return made


@moving(aten.repeat)
def repeat(x: Banded, times: Any) -> Banded:
    """Copies one behind the other."""
    dim = _axis(x) + len(times) - x.ndim
    if times[dim] != 1:
        raise Unreadable("it repeats pictures")
    return x.like(run(aten.repeat.default, x, x.held, times), dim, x.span, x.whole)


@moving(aten.repeat_interleave)
def repeat_interleave(x: Banded, times: Any, dim: int | None = None, **_: Any) -> Banded:
    """Each value several times."""
    if not isinstance(times, int) or dim is None:
        raise Unreadable("it repeats unevenly")
    dim %= x.ndim
    made = run(aten.repeat_interleave.self_int, x, x.held, times, dim)
    if dim != x.axis:
        return x.like(made, _axis(x), x.span, x.whole)
    return x.like(made, dim, (times * x.span[0], times * x.span[1]), times * x.whole)


@moving(aten.index_select)
def index_select(x: Banded, dim: int, index: Tensor) -> Banded:
    """Some of another dimension."""
    if dim % x.ndim == x.axis:
        raise Unreadable("it takes single rows")
    return x.like(run(aten.index_select.default, x, x.held, dim, index), _axis(x), x.span, x.whole)


@moving(aten.contiguous)
def contiguous(x: Banded, **kwargs: Any) -> Banded:
    """The same values without gaps."""
    held = x.held.contiguous(**kwargs)
    return x if held is x.held else x.like(held, _axis(x), x.span, x.whole)


@moving(aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias)
def view(x: Banded, shape: Any, *_: Any) -> Banded:
    """Dimensions divided and joined. Rows that would be divided at a cut are dropped."""
    if isinstance(shape, torch.dtype):
        raise Unreadable("it reads its numbers as others")
    sizes = list(shape)
    if -1 in sizes:
        at = sizes.index(-1)
        sizes[at] = math.prod(x.shape) // -math.prod(sizes)
    dim = _place(x, sizes)
    rows = math.prod(x.shape[_axis(x) + 1 :])
    left = math.prod(sizes[dim + 1 :])
    # How many of the new ones a row is, or how many rows are a new one.
    gives, takes = (rows // left, 1) if rows >= left else (1, left // rows)
    if rows % left and left % rows:
        raise Unreadable("it divides pictures unevenly")
    low, high = -(-x.span[0] // takes), x.span[1] // takes
    if low >= high:
        raise Unreadable("the bands are too narrow")
    held = x.part((low * takes, high * takes))
    span: Span = (low * gives, high * gives)
    whole, sizes[dim] = sizes[dim], span[1] - span[0]
    made = held.reshape(sizes)
    return x.view_as_band(made, dim, span, whole)


def _place(x: Banded, sizes: list[int]) -> int:
    """The new dimension along which the band lies."""
    ahead, before = math.prod(x.shape[: _axis(x)]), 1
    for dim, size in enumerate(sizes):
        if before == ahead and size != 1:
            return dim
        before *= size
    raise Unreadable("it joins rows with what is before them")
