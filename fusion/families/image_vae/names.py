"""Stock's names of a file's tensors, for files in diffusers' spelling, or with the convolutions
next to the latents inside of their halves."""

from __future__ import annotations

from collections.abc import Collection

import comfy.diffusers_convert
import torch

DIFFUSERS = "mid_block."
# Prefixes inside of a half, and stock's.
BESIDE = {"decoder.post_quant_conv.": "post_quant_conv.", "encoder.quant_conv.": "quant_conv."}


def stocks(names: Collection[str]) -> Collection[str]:
    if any(DIFFUSERS in name for name in names):
        nothing = torch.empty(0, 0, device="meta")
        names = comfy.diffusers_convert.convert_vae_state_dict(dict.fromkeys(names, nothing)).keys()
    found = []
    for name in names:
        part = next((part for part in BESIDE if name.startswith(part)), "")
        found.append(BESIDE.get(part, "") + name.removeprefix(part))
    return found
