"""Plain LoRA on fp16 matrices: one product adds onto the weight in its place, weight += up @ down *
scale.

Stock writes the whole difference first, in fp32, scales it, rounds it to fp16 and adds that to a
copy of the weight: some 36 bytes move for each element, and the copy and the difference need room.
Here 4 bytes move, and no other memory is needed. The sum is rounded once instead of twice, so it is
at least as near to the exact one.

The alternative would be side products, x @ down.T @ up.T added to the product with the unpatched
weight. They do not touch the weight, but read and write activations once more: three times tokens *
width against two times width * width. Measured on an H200, 14B, rank 32, ms a block: one pass 0.64
for any video; side products 0.54 for 4500 tokens, where the block's copy takes 13, 1.06 for 9000,
3.4 for 32760; and GELU in the product would be lost. So there are none.

Weights stored in fewer bits (fp8, int8, ggml's blocks) become fp16 for each product anyway, and the
LoRA is added to that copy (`Added`), as stock's dynamic memory does. Rounding the sum to fp8,
stochastically with a random number each, would cost more than the product's cast and lose most of a
small LoRA.

Other contents of LoRA files (LoCon, DoRA, LoKr, differences, replacements), and weights of other
types, are left to stock's own functions (`patches.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from comfy.weight_adapter.lora import LoRAAdapter
from torch import Tensor


def serves(device: torch.device) -> bool:
    """Whether LoRAs are added in one pass on this device. On the CPU they are added as stock does
    there, in fp32."""
    return device.type == "cuda"


class Pair(NamedTuple):
    """weight [n, k] gains up [n, rank] @ down [rank, k] * scale."""

    up: Tensor
    down: Tensor
    scale: float


def pairs_of(patches: Sequence[Any], weight: Tensor) -> list[Pair] | None:
    """The patches of a weight [n, k], in their order, if all of them are plain LoRA; else None."""
    if weight.ndim != 2:
        return None
    found = [_pair_of(patch, weight.shape) for patch in patches]
    return None if None in found else found  # type: ignore[return-value]


def _pair_of(patch: Sequence[Any], shape: torch.Size) -> Pair | None:
    strength, adapter, strength_of_model, offset, function = patch[:5]
    if type(adapter) is not LoRAAdapter or strength_of_model != 1.0 or offset is not None or function is not None:
        return None
    up, down, alpha, middle, lengths, reshaped = adapter.weights
    if any(part is not None for part in (middle, lengths, reshaped)):
        return None
    if up.ndim != 2 or down.ndim != 2 or up.shape[1] != down.shape[0] or (up.shape[0], down.shape[1]) != tuple(shape):
        return None  # stock reports what is wrong with it, and leaves the weight as it is
    if not (up.is_floating_point() and down.is_floating_point()):
        return None
    return Pair(up, down, float(strength) * (1.0 if alpha is None else float(alpha) / down.shape[0]))


def halved(pair: Pair) -> Pair | None:
    """The pair with fp16 factors; None: a factor is not finite. Factors of another type are first
    brought near one by a power of two, which goes into the scale, because fp16 would lose small
    numbers."""
    up, of_up = _halved(pair.up)
    down, of_down = _halved(pair.down)
    scale = pair.scale * of_up * of_down
    return Pair(up, down, scale) if math.isfinite(scale) else None


def _halved(factor: Tensor) -> tuple[Tensor, float]:
    if factor.dtype is torch.float16:
        return factor, 1.0
    wide = factor.float()
    largest = float(wide.abs().amax()) if wide.numel() else 0.0
    if not math.isfinite(largest):
        return factor, math.nan
    power = 2.0 ** math.floor(math.log2(largest)) if largest > 0 else 1.0
    return (wide / power).half(), power


def added(weight: Tensor, pairs: Sequence[Pair], *, in_place: bool) -> Tensor:
    """weight [n, k] with these pairs added, in its own memory or in a new tensor."""
    out = weight
    for pair in pairs:
        target = out if in_place or out is not weight else torch.empty_like(weight)
        up, down = (factor.to(weight.device, weight.dtype, non_blocking=True) for factor in (pair.up, pair.down))
        out = torch.addmm(out, up, down, alpha=pair.scale, out=target)
    return out


class Added:
    """One of a module's `weight_function`s: adds to the copy of a weight that was made for a
    product."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.pairs = pairs

    def __call__(self, weight: Tensor) -> Tensor:
        return added(weight, self.pairs, in_place=True)
