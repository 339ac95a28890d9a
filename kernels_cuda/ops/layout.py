"""split_projection, concat_tokens, swap_heads: copies into another order, where a view does not serve.

The layout and the access pattern stand at the head of src/layout.cu.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..call import Call, Plan
from ..launcher import Card, Launch, Pointer, output, parameter_struct
from ..policy import STANDARD, KernelPolicy
from ..registry import CudaCandidate, Op, StockCandidate
from . import boxes
from .boxes import PACK, Box, triple
from .checks import word
from .rows import row_class

THREADS = 256  # kThreads
HELD = 4  # kHeld
MOST_PARTS = 4  # kMostParts


def split_projection(x: Tensor, sizes: Sequence[int], *, policy: KernelPolicy = STANDARD) -> tuple[Tensor, ...]:
    """The parts of a fused projection, each contiguous.

    x      [..., n] of any 2-byte dtype, with one to three dimensions before the last; rows anywhere
    sizes  widths of up to four parts, which add up to n: (d, d, d) takes [b, s, 3 d] apart
    Where the reader takes strides, x.split(sizes, -1) costs nothing: prefer it.
    """
    if not 1 <= len(sizes) <= MOST_PARTS or min(sizes) < 0:
        raise ValueError(f"sizes: {list(sizes)} are not the widths of one to {MOST_PARTS} parts")
    widths = (*sizes, *[-1] * (MOST_PARTS - len(sizes)))  # plain numbers: an op's options are hashed
    return tuple(SPLIT_PROJECTION((x,), widths, policy))


def concat_tokens(a: Tensor, b: Tensor, *, policy: KernelPolicy = STANDARD) -> Tensor:
    """[batch, s1, d] and [batch, s2, d] of one 2-byte dtype, rows anywhere -> contiguous [batch, s1 + s2, d]."""
    out: Tensor = CONCAT_TOKENS((a, b), (), policy)
    return out


def swap_heads(x: Tensor, *, policy: KernelPolicy = STANDARD) -> Tensor:
    """[b, s, h, d] -> contiguous [b, h, s, d], and the way back, which is the same exchange. Any 2-byte dtype."""
    out: Tensor = SWAP_HEADS((x,), (), policy)
    return out


# ---------------------------------------------------------------------------------------------------------- the maths


def split_parts(x: Tensor, *widths: int) -> list[Tensor]:
    """The oracle and what stock runs: the copies are exact."""
    return [
        part.clone(memory_format=torch.contiguous_format) for part in x.split_with_sizes(check_widths(x, widths), -1)
    ]


def concat_parts(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat((a, b), dim=1)


def swapped(x: Tensor) -> Tensor:
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def fake_split(x: Tensor, *widths: int) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], width)) for width in check_widths(x, widths)]


def fake_concat(a: Tensor, b: Tensor) -> Tensor:
    check_tokens(a, b)
    return a.new_empty((a.shape[0], a.shape[1] + b.shape[1], a.shape[2]))


def fake_swap(x: Tensor) -> Tensor:
    check_heads(x)
    return x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3]))


def check_widths(x: Tensor, widths: Sequence[int]) -> list[int]:
    """Those of the parts there are, which come first."""
    present = [width for width in widths if width >= 0]
    if not present or list(widths[: len(present)]) != present:
        raise ValueError(f"sizes: {list(widths)} are not the widths of one to {MOST_PARTS} parts")
    if not 2 <= x.ndim <= 4 or sum(present) != x.shape[-1]:
        raise ValueError(f"x: {list(x.shape)} does not split into parts of {present}")
    return present


def check_tokens(a: Tensor, b: Tensor) -> None:
    if a.ndim != 3:
        raise ValueError(f"a: {list(a.shape)} is not [batch, tokens, d]")
    if b.ndim != 3 or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[2] or a.dtype != b.dtype:
        wanted = f"{word(a)} [{a.shape[0]}, tokens, {a.shape[2]}] as a is"
        raise ValueError(f"b: {word(b)} {list(b.shape)} is not {wanted}")


def check_heads(x: Tensor) -> None:
    if x.ndim != 4:
        raise ValueError(f"x: {list(x.shape)} is not [b, s, h, d]")


# --------------------------------------------------------------------------------------------------------- the kernel

LayoutParams = parameter_struct(
    "LayoutParams", (Pointer, "from0 from1 from2 from3 to0 to1 to2 to3"), (boxes.Part * MOST_PARTS, "parts")
)


def validate(call: Call) -> None:
    """Shapes that no implementation could serve."""
    CHECKS[call.op](*call.tensors, *call.options)


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call."""
    for t in call.present:
        if t.element_size() != 2:
            yield f"elements are {word(t)}, the kernels move elements of two bytes"
        if t.shape[-1] > 1 and t.stride(-1) != 1:
            yield f"elements of a row are {t.stride(-1)} apart, not adjacent"


def _prepare(call: Call, card: Card, areas: Sequence[Box], offsets: Sequence[int]) -> Launch:
    """One launch for all areas. `offsets`: elements from a tensor's start (source or target) to its box."""
    packs = call.aligned and all(box.in_packs for box in areas) and all(offset % PACK == 0 for offset in offsets)
    packs = packs and max(box.rows * box.width for box in areas) < PACK * 2**31
    unit = PACK if packs else 1
    parts = (boxes.Part * MOST_PARTS)(*(box.part(unit) for box in areas))
    blocks = max(-(-box.rows * box.width // unit // (THREADS * HELD)) for box in areas)
    kernel = card.kernel("layout", "layout_packs" if packs else "layout_any")
    return kernel.prepare(LayoutParams(parts=parts), grid=(blocks, len(areas), 1), block=THREADS, shape=call.describe())


def plan_split(call: Call, card: Card, _tactic: object) -> Plan:
    (x,) = call.present
    widths = check_widths(x, call.options)
    lead, strides = triple(x.shape[:-1], 1), triple(x.stride()[:-1], 0)
    new_parts = [output((*x.shape[:-1], width), x.dtype, card.index) for width in widths]
    if x.numel() == 0:
        return lambda _: [new() for new in new_parts]
    areas = [Box(lead, width, strides, (lead[1] * lead[2] * width, lead[2] * width, width)) for width in widths]
    starts = [sum(widths[:i]) for i in range(len(widths))]
    launch = _prepare(call, card, areas, starts)
    none = [0] * (MOST_PARTS - len(widths))

    def run(x: Tensor) -> list[Tensor]:
        parts = [new() for new in new_parts]
        start = x.data_ptr()
        launch(*[start + 2 * at for at in starts], *none, *[part.data_ptr() for part in parts], *none)
        return parts

    return run


def plan_concat(call: Call, card: Card, _tactic: object) -> Plan:
    a, b = call.present
    batches, tokens, d = a.shape[0], a.shape[1] + b.shape[1], a.shape[2]
    new_out = output((batches, tokens, d), a.dtype, card.index)
    if batches * tokens * d == 0:
        return lambda *_: new_out()
    areas = [Box(triple(t.shape[:-1], 1), d, triple(t.stride()[:-1], 0), (0, tokens * d, d)) for t in (a, b)]
    behind = a.shape[1] * d
    launch = _prepare(call, card, areas, [behind])

    def run(a: Tensor, b: Tensor) -> Tensor:
        out = new_out()
        start = out.data_ptr()
        launch(a.data_ptr(), b.data_ptr(), 0, 0, start, start + 2 * behind, 0, 0)
        return out

    return run


def plan_swap(call: Call, card: Card, _tactic: object) -> Plan:
    (x,) = call.present
    b, s, h, d = x.shape
    new_out = output((b, h, s, d), x.dtype, card.index)
    if x.numel() == 0:
        return lambda _: new_out()
    by_batch, by_token, by_head, _ = x.stride()
    launch = _prepare(call, card, [Box((b, h, s), d, (by_batch, by_head, by_token), (h * s * d, s * d, d))], [])

    def run(x: Tensor) -> Tensor:
        out = new_out()
        launch(x.data_ptr(), 0, 0, 0, out.data_ptr(), 0, 0, 0)
        return out

    return run


def shape_class(call: Call) -> str:
    return f"{' '.join(row_class(t) for t in call.present)} {call.options}"


KERNELS: dict[str, tuple[str, ...]] = {"layout": ("layout_packs", "layout_any")}
CHECKS: dict[str, Callable[..., object]] = {
    "split_projection": lambda x, *widths: check_widths(x, widths),
    "concat_tokens": check_tokens,
    "swap_heads": check_heads,
}

SPLIT_PROJECTION = Op(
    name="split_projection",
    schema="(Tensor x, int n0, int n1, int n2, int n3, str policy) -> Tensor[]",
    reference=split_parts,
    fake=fake_split,
    candidates=(CudaCandidate("cuda", obstacles, plan_split), StockCandidate(split_parts)),
    shape_class=shape_class,
    validate=validate,
    kernels=KERNELS,
)

CONCAT_TOKENS = Op(
    name="concat_tokens",
    schema="(Tensor a, Tensor b, str policy) -> Tensor",
    reference=concat_parts,
    fake=fake_concat,
    candidates=(CudaCandidate("cuda", obstacles, plan_concat), StockCandidate(concat_parts)),
    shape_class=shape_class,
    validate=validate,
    kernels=KERNELS,
)

SWAP_HEADS = Op(
    name="swap_heads",
    schema="(Tensor x, str policy) -> Tensor",
    reference=swapped,
    fake=fake_swap,
    candidates=(CudaCandidate("cuda", obstacles, plan_swap), StockCandidate(swapped)),
    shape_class=shape_class,
    validate=validate,
    kernels=KERNELS,
)
