"""LoRA and other patches on streamed weights: the same sums as stock's
`ModelPatcher.patch_weight_to_device`.

Stock patches a weight once, when it loads it, and keeps it. A streamed weight is patched whenever
it arrives, a resident one whenever the set of patches changes. The function, its types and its seed
for rounding are the same, so the numbers are too. Plain LoRA on a GPU has a shorter way
(`lora.py`), unless its kernels are off. Packed weights cannot be written to, so their patches are
applied for each product (`Applied`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import comfy.float
import comfy.lora
import comfy.model_management
import comfy.utils
import torch

from .paged import Paged
from .storage import FP8, in_file_order

# The patches of each key, in order. A patch is a tuple that is made once and handed on to clones.
PatchSet = Mapping[str, tuple[Any, ...]]


def snapshot(patches: Mapping[str, Sequence[Any]], keys: Iterable[str]) -> PatchSet:
    """The patches of these keys as they are now. Clones of a model may add patches later."""
    return {key: tuple(patches[key]) for key in keys if patches.get(key)}


def differs(one: PatchSet, other: PatchSet, key: str) -> bool:
    """Whether a key's patches are not the identical objects."""
    a, b = one.get(key, ()), other.get(key, ())
    return len(a) != len(b) or any(x is not y for x, y in zip(a, b, strict=True))


class _Again:
    """Separates a weight's patches: later ones change the weight as it is held with the earlier
    ones."""


AGAIN = _Again()


def with_hooked(
    patches: Mapping[str, Sequence[Any]], hooked: Mapping[str, Sequence[Any]]
) -> Mapping[str, Sequence[Any]]:
    """A model's patches, followed by those of its hooks."""
    return {**patches, **{key: (*patches.get(key, ()), AGAIN, *more) for key, more in hooked.items()}}


def stages(patches: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """A weight's patches before and after `AGAIN`."""
    at = next((i for i, patch in enumerate(patches) if patch is AGAIN), len(patches))
    return patches[:at], patches[at + 1 :]


def patched(
    paged: Paged, weight: Any, patches: Sequence[Any], device: torch.device, *, as_held: bool = True
) -> torch.Tensor:
    """The patched weight, in the weight's type. as_held: stored by its module, which quantises it
    anew if it is quantised."""
    first, then = stages(patches)
    out = weight = in_file_order(weight)
    module = paged.module if as_held else None
    if first:
        computed = comfy.model_management.lora_compute_dtype(device)
        out = _patched_once(paged, module, out, first, device, computed, None)
    if then:
        # A hook with another model's weights takes its difference from this.
        original = {paged.key: [(weight, None)]}
        out = _patched_once(paged, module, out, then, device, torch.float32, original)
    return out


class Applied:
    """One of a module's `weight_function`s: applies patches by stock's functions to the copy of a
    weight that was made for a product."""

    def __init__(self, paged: Paged, patches: Sequence[Any]) -> None:
        self._paged, self._patches = paged, patches

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """weight: numbers, in any type. The sum is rounded as for a weight in the model's type,
        unless that is fp8."""
        kind = self._paged.stand_in.dtype
        with torch.no_grad():
            held = weight if kind in FP8 else weight.to(kind)
            out = patched(self._paged, held, self._patches, weight.device, as_held=False)
        return out.to(weight.dtype)


def _patched_once(
    paged: Paged,
    module: Any,
    weight: Any,
    patches: Sequence[Any],
    device: torch.device,
    computed: torch.dtype,
    original: Any,
) -> torch.Tensor:
    key = paged.key
    convert = getattr(module, f"convert_{paged.attribute}", None)
    store = getattr(module, f"set_{paged.attribute}", None)
    wide = comfy.model_management.cast_to_device(weight, device, computed, copy=True)
    if convert is not None:
        wide = convert(wide, inplace=True)
    out: torch.Tensor = comfy.lora.calculate_weight(list(patches), wide, key, original_weights=original)
    if out.shape != weight.shape:
        raise ValueError(
            f"A LoRA changes the shape of {key} from {list(weight.shape)} to {list(out.shape)}, which cannot be done while "
            "weights stream. Remove it, or load a .safetensors file with vram_budget 0 in its FuseStream loader."
        )
    seed = comfy.utils.string_to_seed(key)
    if store is None:
        return comfy.float.stochastic_rounding(out, weight.dtype, seed=seed)  # type: ignore[no-any-return]
    return store(out, inplace_update=False, seed=seed, return_weight=True)  # type: ignore[no-any-return]
