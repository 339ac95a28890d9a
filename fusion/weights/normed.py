"""A norm's output that products read: made once their weights are known.

Where all of them are integers, the rows leave the norm rounded as their products want them
(`norm_to_int8`, `norm_to_int4`): the halves in between are never written. Else it is
`norm_modulate`, and who multiplies integers rounds its halves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...kernels_cuda import (
    IntegerMatrix,
    KernelPolicy,
    RoundedRows,
    norm_modulate,
    norm_to_int4,
    norm_to_int8,
)
from ...kernels_cuda.ops.norm.norm_modulate import Kind
from .operands import Weights, is_here, operands

ROUNDING: Mapping[int, Callable[..., RoundedRows]] = {8: norm_to_int8, 4: norm_to_int4}  # by bits


@dataclass(frozen=True)
class Normed:
    """norm(x) * weight + bias, then * (1 + scale) + shift, as fp16 [batch, ..., d].

    x  fp16 or fp32; the others as `norm_modulate` has them
    """

    x: Tensor
    scale: Tensor | None = None
    shift: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    kind: Kind = "layer"
    eps: float = field(kw_only=True)

    @property
    def like(self) -> Tensor:
        """A tensor of the output's shape and type; what it holds has no meaning."""
        x = self.x
        return x if x.dtype is torch.float16 else x.new_empty((), dtype=torch.float16).expand(x.shape)

    def halves(self, policy: KernelPolicy) -> Tensor:
        """The output itself."""
        return norm_modulate(self.x, **self._operands, out_dtype=torch.float16, policy=policy)

    def rounded(self, weight: IntegerMatrix, policy: KernelPolicy) -> RoundedRows:
        """The output rounded for a weight: turned as its rows are, to as many bits."""
        return ROUNDING[weight.bits](self.x, **self._operands, rotation=weight.rotation, policy=policy)

    @property
    def _operands(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "shift": self.shift,
            "weight": self.weight,
            "bias": self.bias,
            "eps": self.eps,
            "kind": self.kind,
        }


def kept_weights(norm: Any, x: Tensor, policy: KernelPolicy) -> Weights:
    """Weight and bias [d] of one of stock's norms in fp16 on x's device, for as long as they are
    needed. One that is brought from another device is copied, because the next one takes its
    buffer."""
    with operands(x.new_empty(0, dtype=torch.float16), policy, norm) as [own]:
        if own.weight is None or is_here(norm, x.device):
            return own
        return Weights(own.weight.clone(), None if own.bias is None else own.bias.clone())
