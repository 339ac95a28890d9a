"""What the tests of the U-Nets share: a tiny one, streamed and under a policy, and how near its latents are to stock's."""

from __future__ import annotations

from typing import Any

import torch

from fusestream.kernels_cuda import LEDGER


def handed_back() -> set[str]:
    """Why parts of a U-Net were stock's."""
    return {refusal.reason for refusal in LEDGER.refusals if refusal.op == "u-net block"}


def lora_for(model: Any) -> dict[str, torch.Tensor]:
    """For every third matrix and convolution, in blocks and outside of them: pairs, one of Kronecker's, one difference."""
    found, generator = {}, torch.Generator().manual_seed(3)
    shapes = {key: value.shape for key, value in model.model_state_dict().items() if key.endswith(".weight")}
    for key in [key for key, shape in sorted(shapes.items()) if len(shape) > 1][::3]:
        name, (rows, columns, *taps) = key.removesuffix(".weight"), shapes[key]
        found[f"{name}.lora_up.weight"] = torch.randn(rows, 2, *(1 for _ in taps), generator=generator) * 0.1
        down = torch.randn(2, columns, *taps, generator=generator)
        found[f"{name}.lora_down.weight"] = down * down[0].numel() ** -0.5
    block = next(key for key in sorted(shapes) if key.endswith("attn1.to_v.weight")).removesuffix(".weight")
    rows, columns = shapes[f"{block}.weight"]
    for part in ("up", "down"):
        found.pop(f"{block}.lora_{part}.weight", None)
    found[f"{block}.lokr_w1"] = torch.randn(4, 4, generator=generator) * 0.3
    found[f"{block}.lokr_w2"] = torch.randn(rows // 4, columns // 4, generator=generator) * columns**-0.5
    norm = next(key for key in sorted(shapes) if key.endswith("in_layers.0.weight")).removesuffix(".weight")
    found[f"{norm}.diff"] = torch.randn(shapes[f"{norm}.weight"], generator=generator) * 0.1
    return found
