"""LoRA and its kin on weights that come and go: the same sums as stock's `ModelPatcher.patch_weight_to_device`.

Stock patches a weight once, when it loads it, and keeps it. A streamed weight is patched whenever it arrives, a resident
one whenever the set of patches changes. The function is the same, in the same types and with the same seed for rounding,
so the numbers are too. Plain LoRA on a GPU has a shorter way (`lora.py`), unless its kernels are off.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import comfy.float
import comfy.lora
import comfy.model_management
import comfy.utils
import torch

from .blocks import Paged

# Of each key its patches, in order. A patch is a tuple that is made once and handed on to clones.
PatchSet = Mapping[str, tuple[Any, ...]]


def snapshot(patches: Mapping[str, Sequence[Any]], keys: Iterable[str]) -> PatchSet:
    """The patches of these keys as they are now; clones of a model may grow theirs later."""
    return {key: tuple(patches[key]) for key in keys if patches.get(key)}


def differs(one: PatchSet, other: PatchSet, key: str) -> bool:
    """Whether a key's patches are not the very same ones."""
    a, b = one.get(key, ()), other.get(key, ())
    return len(a) != len(b) or any(x is not y for x, y in zip(a, b, strict=True))


def patched(paged: Paged, patches: Sequence[Any], device: torch.device) -> torch.Tensor:
    """What becomes of the weight that the module holds now: of its type, quantised anew if it is quantised."""
    module, key = paged.module, paged.key
    weight = getattr(module, paged.attribute)
    convert = getattr(module, f"convert_{paged.attribute}", None)
    store = getattr(module, f"set_{paged.attribute}", None)
    computed = comfy.model_management.lora_compute_dtype(device)
    wide = comfy.model_management.cast_to_device(weight, device, computed, copy=True)
    if convert is not None:
        wide = convert(wide, inplace=True)
    out: torch.Tensor = comfy.lora.calculate_weight(list(patches), wide, key)
    if out.shape != weight.shape:
        raise ValueError(
            f"A LoRA changes the shape of {key} from {list(weight.shape)} to {list(out.shape)}, which cannot be done while "
            "weights stream. Remove it, or set vram_budget to 0 in its FuseStream loader."
        )
    seed = comfy.utils.string_to_seed(key)
    if store is None:
        out = comfy.float.stochastic_rounding(out, weight.dtype, seed=seed)
    else:
        out = store(out, inplace_update=False, seed=seed, return_weight=True)
    return out
