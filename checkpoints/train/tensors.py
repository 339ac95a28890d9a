"""What the three networks share: where their weights start, and products in the dtype of the
activation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..weights import Table

Tensors = dict[str, torch.Tensor]


def start(table: Table, seed: int, device: torch.device | str, gains: dict[str, float]) -> Tensors:
    """fp32 weights to begin with: matrices drawn as the table says, gains of one, shifts of zero.

    gains   part of a name -> what its matrix is multiplied by
    """
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, spec in table.items():
        if spec.mean:
            tensor = torch.full(spec.shape, spec.mean)
        elif name.endswith(".bias"):
            tensor = torch.zeros(spec.shape)
        else:
            gain = next((gain for part, gain in gains.items() if part in name), 1.0)
            tensor = torch.randn(spec.shape, generator=generator) * (spec.std * gain)
        out[name] = tensor.to(device)
    return out


def count_blocks(weights: Tensors, prefix: str) -> int:
    """Blocks are numbered behind their prefix, from 0 on."""
    return len({name[len(prefix) :].partition(".")[0] for name in weights if name.startswith(prefix)})


def linear(weights: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    """`x` [..., in] times a matrix, or a convolution of one pixel, in x's dtype."""
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    return F.linear(x, weight.reshape(len(weight), -1).to(x.dtype), None if bias is None else bias.to(x.dtype))


def rms_norm(x: torch.Tensor, gain: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Over the last axis, in fp32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * gain
