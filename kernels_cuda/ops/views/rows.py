"""How tensors are seen as rows: shared by the ops that work along the last dimension.

A row operand is [batch, token, d]. A broadcast operand (scale, shift, gate) is a row of d that a batch, a run of tokens
(a frame) or one token has for itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...call import Tensors, round_up
from ...launcher import MAX_GRID

MOST_ROWS = 2**31 - 1
ALIGNED = 8  # elements: rows that are read 16 bytes at a time start at multiples of it


@dataclass(frozen=True)
class Rows:
    """A tensor as [batch, token, d] with any strides between rows."""

    batches: int
    tokens: int
    d: int
    batch_stride: int
    row_stride: int

    def places(self, name: str) -> dict[str, int]:
        """The fields of a struct for an operand of this name."""
        return {f"{name}_batch": self.batch_stride, f"{name}_row": self.row_stride}


@dataclass(frozen=True)
class SharedRow:
    """A broadcast operand: its strides, 0 where it is shared, and how many tokens share a row."""

    batch_stride: int
    frame_stride: int
    tokens_per_frame: int

    def places(self, name: str) -> dict[str, int]:
        """The fields of a struct for an operand of this name."""
        return {f"{name}_batch": self.batch_stride, f"{name}_frame": self.frame_stride}


def rows(t: Tensor) -> Rows | str:
    """The row view of a tensor of any rank, or why there is none."""
    if t.ndim < 2:
        return "a tensor of rank 1 has no rows"
    shape, strides = list(t.shape), list(t.stride())
    if shape[-1] > 1 and strides[-1] != 1:
        return f"elements of a row are {strides[-1]} apart, not adjacent"
    d, shape, strides = shape[-1], shape[:-1], strides[:-1]
    while len(shape) > 2:  # fold [batch, a, b] into [batch, a * b]
        inner, outer = shape[-1], shape[-2]
        if outer > 1 and inner > 1 and strides[-2] != strides[-1] * inner:
            return f"dimensions {tuple(t.shape[1:-1])} with strides {tuple(t.stride()[1:-1])} do not fold into rows"
        step = strides[-1] if inner > 1 else strides[-2]
        shape[-2:], strides[-2:] = [outer * inner], [step]
    if len(shape) == 1:
        shape, strides = [1, *shape], [0, *strides]
    # The stride of a dimension of one is never used, and torch leaves anything there.
    batch_stride, row_stride = (stride if size > 1 else 0 for size, stride in zip(shape, strides, strict=True))
    return Rows(shape[0], shape[1], d, batch_stride, row_stride)


def row_view(t: Tensor) -> Rows:
    """`rows` of a tensor that is known to have them."""
    view = rows(t)
    if isinstance(view, str):
        raise ValueError(view)
    return view


def folded(view: Rows) -> Rows:
    """All rows as one batch, where they are equally far apart."""
    if view.tokens == 1:
        return Rows(1, view.batches, view.d, 0, view.batch_stride)
    if view.batches == 1 or view.batch_stride == view.tokens * view.row_stride:
        return Rows(1, view.batches * view.tokens, view.d, 0, view.row_stride)
    return view


def tokens_per_frame(tokens: int, frames: int, name: str) -> int:
    """How stock spreads `frames` rows of modulation over the tokens (repeat_e in comfy/ldm/wan/model.py)."""
    if frames == 1 or tokens == 0:
        return max(tokens, 1)
    if frames < 1 or frames > tokens:
        raise ValueError(f"{name}: {frames} rows of modulation cannot be spread over {tokens} tokens")
    exact = tokens // frames
    return exact if exact * frames == tokens else exact + 1


def frames_of(t: Tensor, batches: int, d: int, name: str) -> Tensor:
    """A broadcast operand as [1 or batch, frames, d]. Takes [d], [frames, d] and, for video, [batch, frames, 1, d]."""
    view = t
    if view.ndim == 1:
        view = view[None, None]
    elif view.ndim == 2:
        view = view[None]
    elif view.ndim == 4 and view.shape[2] == 1:
        view = view[:, :, 0]
    if view.ndim != 3 or view.shape[-1] != d or view.shape[0] not in (1, batches):
        raise ValueError(f"{name}: {list(t.shape)} does not broadcast over {batches} x tokens x {d}")
    return view


def check_frames(t: Tensor, x: Tensor, d: int, name: str) -> None:
    """Raise ValueError for a broadcast operand that cannot be spread over x's rows, to results of d."""
    batches, tokens, _ = batch_sizes(x)
    tokens_per_frame(tokens, frames_of(t, batches, d, name).shape[1], name)


def shared_row(t: Tensor | None, like: Rows, name: str) -> SharedRow | str | None:
    """A broadcast operand's strides, or why the kernels cannot read it, or None if it is absent."""
    if t is None:
        return None
    view = frames_of(t, like.batches, like.d, name)
    if view.shape[-1] > 1 and view.stride(-1) != 1:
        return f"{name}: elements of a row are {view.stride(-1)} apart, not adjacent"
    run = tokens_per_frame(like.tokens, view.shape[1], name)
    frame_stride = view.stride(1) if view.shape[1] > 1 else 0
    if not frame_stride:  # one row for all tokens, also where it was expanded to frames
        run = max(like.tokens, 1)
    return SharedRow(view.stride(0) if view.shape[0] > 1 else 0, frame_stride, run)


def shared_view(t: Tensor | None, like: Rows, name: str) -> SharedRow:
    """`shared_row` of an operand that is known to have one; of an absent one, strides of 0."""
    view = shared_row(t, like, name) or SharedRow(0, 0, like.tokens)
    if isinstance(view, str):
        raise ValueError(view)
    return view


def spread(t: Tensor, tokens: int, batches: int, d: int, name: str) -> Tensor:
    """A broadcast operand as a tensor that broadcasts against [batch, tokens, d]: what stock computes with."""
    view = frames_of(t, batches, d, name)
    frames = view.shape[1]
    if frames in (1, tokens):
        return view
    run = tokens_per_frame(tokens, frames, name)
    return torch.repeat_interleave(view, run, dim=1)[:, :tokens]


def row_class(t: Tensor) -> str:
    """A coarse name for a row tensor: exact width, number of rows to the next power of two."""
    d = t.shape[-1] if t.ndim else 1
    return f"{str(t.dtype).removeprefix('torch.')}[{round_up(t.numel() // max(d, 1))}x{d}]"


def row_classes(tensors: Tensors, *, layout: bool = False) -> str:
    """The classes of a call's operands. layout: and which of them are not contiguous."""
    return " ".join(
        "-" if t is None else row_class(t) + (" strided" if layout and not t.is_contiguous() else "") for t in tensors
    )


def batch_sizes(t: Tensor) -> tuple[int, int, int]:
    """(batches, tokens, d) of [batch, ..., d]. A tensor of rank 2 is one batch."""
    batches, middle = (t.shape[0], t.shape[1:-1]) if t.ndim > 2 else (1, t.shape[:-1])
    return batches, math.prod(middle), t.shape[-1]


def rows_apart(**tensors: Tensor) -> Iterator[str]:
    """Why rows of a head of [batch, tokens, heads, d] cannot be read 16 bytes at a time."""
    for name, t in tensors.items():
        if t.stride(3) != 1:
            yield f"{name}: elements of a head are {t.stride(3)} apart, not adjacent"
        strides = [stride for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True) if size > 1]
        if t.data_ptr() % 16 or any(stride % ALIGNED for stride in strides):
            yield f"{name}: rows do not start at multiples of 16 bytes (strides {t.stride()})"


def head_obstacles(q: Tensor, heads: Collection[int]) -> Iterator[str]:
    """Queries [batch, tokens, heads, d] with another width of heads, or too many for a grid."""
    b, _, h, d = q.shape
    if d not in heads:
        yield f"heads have {d} elements, the kernels serve {', '.join(map(str, heads))}"
    if h > MAX_GRID[1] or b > MAX_GRID[2]:
        yield f"{b} x {h} batch rows and heads exceed a grid"
