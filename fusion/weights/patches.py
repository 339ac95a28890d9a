"""LoRA and its kin on weights that come and go: the same sums as stock's `ModelPatcher.patch_weight_to_device`.

Stock patches a weight once, when it loads it, and keeps it. A streamed weight is patched whenever it arrives, a resident
one whenever the set of patches changes. The function is the same, in the same types and with the same seed for rounding,
so the numbers are too. Plain LoRA on a GPU has a shorter way (`lora.py`), unless its kernels are off. Packed weights cannot be
written to, so theirs are applied for each product (`Applied`).
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

# Of each key its patches, in order. A patch is a tuple that is made once and handed on to clones.
PatchSet = Mapping[str, tuple[Any, ...]]


def snapshot(patches: Mapping[str, Sequence[Any]], keys: Iterable[str]) -> PatchSet:
    """The patches of these keys as they are now; clones of a model may grow theirs later."""
    return {key: tuple(patches[key]) for key in keys if patches.get(key)}


def differs(one: PatchSet, other: PatchSet, key: str) -> bool:
    """Whether a key's patches are not the very same ones."""
    a, b = one.get(key, ()), other.get(key, ())
    return len(a) != len(b) or any(x is not y for x, y in zip(a, b, strict=True))


class _Again:
    """Between a weight's patches: those that follow change the weight as it is held with those before."""


AGAIN = _Again()


def with_hooked(
    patches: Mapping[str, Sequence[Any]], hooked: Mapping[str, Sequence[Any]]
) -> Mapping[str, Sequence[Any]]:
    """A model's patches, and on top of them those of its hooks."""
    return {**patches, **{key: (*patches.get(key, ()), AGAIN, *more) for key, more in hooked.items()}}


def stages(patches: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """A weight's patches before and after `AGAIN`."""
    at = next((i for i, patch in enumerate(patches) if patch is AGAIN), len(patches))
    return patches[:at], patches[at + 1 :]


def patched(
    paged: Paged, weight: Any, patches: Sequence[Any], device: torch.device, *, as_held: bool = True
) -> torch.Tensor:
    """What becomes of this weight: of its type, and `as_held`, by its module, quantised anew if it is quantised."""
    first, then = stages(patches)
    out = weight = in_file_order(weight)
    module = paged.module if as_held else None
    if first:
        computed = comfy.model_management.lora_compute_dtype(device)
        out = _patched_once(paged, module, out, first, device, computed, None)
    if then:
        original = {paged.key: [(weight, None)]}  # from which a hook with another model's weights takes its difference
        out = _patched_once(paged, module, out, then, device, torch.float32, original)
    return out


class Applied:
    """One of a module's `weight_function`s: a weight's patches, by stock's functions, on what was made of it for a product."""

    def __init__(self, paged: Paged, patches: Sequence[Any]) -> None:
        self._paged, self._patches = paged, patches

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """weight: numbers, in any type. The sum is rounded as that of a weight in the model's type is, unless that is fp8."""
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
