"""What many ops check.

Obstacles: each function yields reasons, in words a user understands; none means no obstacle. The `check_` functions are
for an op's `validate`, and raise ValueError for what no implementation could serve.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**127  # what a parameter struct holds as a normal float
MOST_STEPS = 10_000  # of the search for a shared byte: views of real buffers take some dozens


def word(value: Tensor | torch.dtype) -> str:
    """`float16`."""
    return str(value.dtype if isinstance(value, Tensor) else value).removeprefix("torch.")


def listed(known: Collection[torch.dtype]) -> str:
    """`float16, float32 and bfloat16`."""
    *others, last = map(word, known)
    return f"{', '.join(others)} and {last}" if others else last


def wrong_dtype(known: Collection[torch.dtype], **tensors: Tensor | None) -> Iterator[str]:
    """A tensor of a type no kernel was compiled for."""
    for name, t in tensors.items():
        if t is not None and t.dtype not in known:
            yield f"{name} is {word(t)}, the kernels take {listed(known)}"


def beside(x: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Types that kernels take of what is read beside x: fp32, and one of two bytes, bf16 beside bf16 and else fp16."""
    return (torch.bfloat16 if x.dtype is torch.bfloat16 else torch.float16), torch.float32


def wrong_output(known: Collection[torch.dtype], dtype: torch.dtype) -> Iterator[str]:
    """A result of a type that no kernel writes."""
    if dtype not in known:
        yield f"the output is {word(dtype)}, the kernels write {listed(known)}"


def unseen(view: object, name: str = "") -> Iterator[str]:
    """A view of rows or tiles (rows.py, tiles.py) that is none, but the reason why."""
    if isinstance(view, str):
        yield f"{name}: {view}" if name else view


def bias_obstacles(bias: Tensor | None) -> Iterator[str]:
    """A vector that cannot be read 16 bytes at a time."""
    if bias is not None and (bias.stride(0) != 1 or bias.data_ptr() % 16):
        yield "bias is not contiguous, or does not start at a multiple of 16 bytes"


def not_contiguous(**tensors: Tensor | None) -> Iterator[str]:
    """Operands of so few dimensions that no strides need to be told."""
    for name, t in tensors.items():
        if t is not None and not t.is_contiguous():
            yield f"{name} is not contiguous"


def scattered(**tensors: Tensor | None) -> Iterator[str]:
    """Operands that are not contiguous, with their strides."""
    for name, t in tensors.items():
        if t is not None and not t.is_contiguous():
            yield f"{name} is not contiguous (strides {t.stride()})"


def misplaced(**tensors: Tensor) -> Iterator[str]:
    """Tensors that cannot be read 16 bytes at a time from their first element on."""
    for name, t in tensors.items():
        if t.data_ptr() % 16:
            yield f"{name} does not start at a multiple of 16 bytes"


def ragged(unit: int, **tensors: Tensor | None) -> Iterator[str]:
    """Tensors that are not, from end to end, accesses of so many bytes."""
    for name, t in tensors.items():
        if t is not None and (not t.is_contiguous() or t.data_ptr() % unit):
            yield f"{name} is not contiguous, or does not start at a multiple of {unit} bytes (strides {t.stride()})"


def no_multiples(unit: int, **sizes: int) -> Iterator[str]:
    """Sizes that would leave a part of an access over."""
    for name, size in sizes.items():
        if size % unit:
            yield f"{name} is {size}, the kernels take multiples of {unit}"


def mixed_dtypes(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Operands that must be of one type and are not."""
    if len({t.dtype for t in tensors.values()}) > 1:
        yield f"{', '.join(f'{name} is {word(t)}' for name, t in tensors.items())}; the kernels take one type"


def check_shape(name: str, t: Tensor | None, like: Tensor, of: str = "x") -> None:
    """A tensor that does not broadcast: it has the shape of another."""
    if t is not None and t.shape != like.shape:
        raise ValueError(f"{name}: {list(t.shape)} is not {of}'s shape {list(like.shape)}")


def check_vector(name: str, t: Tensor | None, size: int) -> None:
    """A tensor that has one number for each of so many columns."""
    if t is not None and t.shape != (size,):
        raise ValueError(f"{name}: {list(t.shape)} is not [{size}]")


def check_result(name: str, t: Tensor | None, shape: Sequence[int]) -> None:
    """A tensor that the result is written to, or that is added to it."""
    if t is not None and t.shape != tuple(shape):
        raise ValueError(f"{name}: {list(t.shape)} is not the result's shape {list(shape)}")


def check_one_of(name: str, value: object, known: Collection[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(known)}")


def check_eps(eps: float) -> None:
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps is {eps}, expected a finite number that is not negative")


def check_scale(scale: float) -> None:
    """A factor that takes no digits."""
    if math.frexp(scale)[0] != 0.5 or not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise ValueError(f"scale is {scale}, expected a power of two that fp32 holds")


def check_into(outs: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, **read: Tensor | None) -> None:
    """A place for a result of this shape and type that lies over nothing that is read. outs: it, or none."""
    for out in outs:
        if out.shape != tuple(shape) or out.dtype is not dtype:
            raise ValueError(f"out: {out.dtype} {list(out.shape)} cannot take {list(shape)} as {word(dtype)}")
        check_written({"out": out}, read)


def check_written(
    written: Mapping[str, Tensor | None], read: Mapping[str, Tensor | None], itself: Collection[str] = ()
) -> None:
    """Tensors written in place have each element once, and lie apart from each other and from those read.

    itself  of those read, the ones that may also be a written tensor, element for element

    Addresses are not part of a signature: like all of `validate` this sees the first call of one. A caller that keeps
    handing over memory that overlaps is found, one that does so later is not.
    """
    targets = {name: t for name, t in written.items() if t is not None and t.numel()}
    for name, t in targets.items():
        if any(stride == 0 and size > 1 for size, stride in zip(t.shape, t.stride(), strict=True)):
            raise ValueError(
                f"{name}: {list(t.shape)} with strides {t.stride()} is written, and its elements share memory"
            )
    names = list(targets)
    pairs = [(one, two, targets[two]) for i, one in enumerate(names) for two in names[i + 1 :]]
    pairs += [(one, two, t) for one in names for two, t in read.items() if t is not None]
    for one, two, t in pairs:
        target = targets[one]
        if two in itself and _same(target, t):
            continue
        if overlap(target, t):
            raise ValueError(f"{one}: {list(target.shape)} is written, and overlaps {two} {list(t.shape)} in memory")


def _same(a: Tensor, b: Tensor) -> bool:
    return (
        a.data_ptr() == b.data_ptr()
        and a.dtype == b.dtype
        and a.shape == b.shape
        and all(m == n for size, m, n in zip(a.shape, a.stride(), b.stride(), strict=True) if size > 1)
    )


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have a byte in common. Exact for views that interleave, such as q and k of one projection.

    Some byte of a is some byte of b: a sum of steps, each taken 0 to `most` times, equals a distance. The steps of b,
    which are subtracted, are counted from its last byte, so that all of them are positive.
    """
    if a.device != b.device or a.device.type == "meta" or not a.numel() or not b.numel():
        return False
    distance = b.data_ptr() - a.data_ptr()
    steps: dict[int, int] = {}
    for t, is_b in ((a, False), (b, True)):
        unit = t.element_size()
        dims = [(stride * unit, size - 1) for size, stride in zip(t.shape, t.stride(), strict=True)]
        for step, most in ((1, unit - 1), *dims):
            if step and most:
                steps[step] = steps.get(step, 0) + most  # equal steps of both are one: that keeps the search short
                distance += step * most if is_b else 0
    ordered = sorted(steps.items(), reverse=True)
    reach = [sum(step * most for step, most in ordered[i:]) for i in range(len(ordered) + 1)]
    open_ends, taken = [(0, distance)], 0
    while open_ends:
        at, left = open_ends.pop()
        if not 0 <= left <= reach[at]:
            continue
        if left in (0, reach[at]):
            return True
        step, most = ordered[at]
        fewest = max(0, -((reach[at + 1] - left) // step))
        choices = range(fewest, min(most, left // step) + 1)
        taken += len(choices)
        if taken > MOST_STEPS:
            return False  # not known to: an error must be certain
        open_ends += [(at + 1, left - step * n) for n in choices]
    return False
