"""The root mean square that references divide by; maths and checks of rms_rope_sums and rms_rope_keep.

Both take heads in parts, normalise them and turn elements j and j + d/2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...launcher import MAX_GRID
from ..views.checks import mixed_dtypes, wrong_dtype
from ..views.half_range import saturated

TYPES = (torch.float16, torch.float32)  # of weights
WARPS = 4  # kWarps: heads of a block
WIDEST = 256  # elements of a head
QUAD = 4  # of which its width is a multiple: pairs in either half


def by_its_rms(x: Tensor, eps: float, over: int | tuple[int, ...] = -1) -> Tensor:
    """x, in x's own type, with a mean square of one over these dimensions, but for eps."""
    return x * torch.rsqrt(x.square().mean(over, keepdim=True) + eps)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., d] turned by cos and sin [..., d/2], in x's own type."""
    low, high = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((torch.addcmul(cos * low, sin, high, value=-1), torch.addcmul(cos * high, sin, low)), -1)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same as fp16, which saturates."""
    return saturated(rotated(x, cos, sin)).half()


def check_halves(q: Tensor) -> None:
    """Raise ValueError for heads of an odd number of elements."""
    if q.shape[-1] % 2:
        raise ValueError(f"q: {list(q.shape)}, a head of {q.shape[-1]} elements has no halves to turn")


def type_obstacles(weights: dict[str, Tensor], of_floats: dict[str, Tensor]) -> Iterator[str]:
    """Operands of other types than the kernels take."""
    yield from wrong_dtype((torch.float32,), **of_floats)
    yield from wrong_dtype(TYPES, **weights)
    yield from mixed_dtypes(weights)


def head_obstacles(d: int, heads: int, **tensors: Tensor) -> Iterator[str]:
    """Too wide or too many heads; tensors that cannot be read two elements at a time."""
    if d % QUAD or d > WIDEST:
        yield f"heads have {d} elements, the kernel takes multiples of {QUAD} up to {WIDEST}"
    for name, t in tensors.items():
        steps = [stride for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True) if size > 1]
        if t.shape[-1] > 1 and t.stride(-1) != 1:
            yield f"{name}: elements are {t.stride(-1)} apart, not adjacent"
        if t.data_ptr() % (2 * t.element_size()) or any(step % 2 for step in steps):
            yield f"{name}: pairs of elements do not start at multiples of their size (strides {t.stride()})"
    if heads > MAX_GRID[0] * WARPS:
        yield f"{heads} heads of all tokens exceed a grid"
