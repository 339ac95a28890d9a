"""FusedTransformerEncoderLayer: torch's nn.TransformerEncoderLayer over our attention, products and
norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..ops.attention.attention import ATTENTION
from ..ops.matmul.linear import Activation, linear
from ..ops.matmul.mlp import mlp
from ..ops.norm.norm_modulate import norm_modulate
from ..policy import STANDARD, KernelPolicy
from .attending import attended, batches_first, refused, unserved
from .fallback import (
    general_obstacle,
    hand_back,
    own_obstacle,
    replaced,
    unlike,
)
from .feed_forward import activation_of
from .multihead_attention import FusedMultiheadAttention
from .sharing import sharing

FUNCTIONS: dict[Callable[..., Tensor], Activation] = {
    functional.relu: "relu",
    torch.relu: "relu",
    functional.gelu: "gelu",
    functional.silu: "silu",
}


class FusedTransformerEncoderLayer(nn.TransformerEncoderLayer):
    """nn.TransformerEncoderLayer: its arguments, its state dict, its call. May stand in an
    nn.TransformerEncoder.

    policy: which of our kernels may compute. "on" makes it an error if they cannot; see
    `KernelPolicy`.

    Kernels of ours compute it for fp16 on an NVIDIA card, in eval mode without gradients, with
    ReLU, GELU or SiLU; otherwise torch does. `obstacle(...)`, called as the module is, gives the
    reason.
    """

    policy: KernelPolicy

    def __init__(
        self, d_model: int, nhead: int, *arguments: Any, policy: KernelPolicy = STANDARD, **options: Any
    ) -> None:
        """All arguments, options and defaults are torch's: dim_feedforward, dropout, activation,
        layer_norm_eps, batch_first, norm_first, bias, device, dtype."""
        super().__init__(d_model, nhead, *arguments, **options)
        self.policy = policy

    @classmethod
    def of(cls, layer: nn.TransformerEncoderLayer, *, policy: KernelPolicy = STANDARD) -> FusedTransformerEncoderLayer:
        """Make one from an existing layer: its parts are shared."""
        made = sharing(cls, layer, nn.TransformerEncoderLayer)
        made.policy = policy
        return made

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As nn.TransformerEncoderLayer: src's shape and dtype."""
        reason = self._reason(src, src_mask, src_key_padding_mask, is_causal)
        if reason is not None:
            hand_back(type(self).__name__, ATTENTION.name, reason, src, self.policy)
            given: Tensor = super().forward(src, src_mask, src_key_padding_mask, is_causal)
            return given
        x = batches_first(self.self_attn, src)
        masks = src_key_padding_mask, src_mask, is_causal and src_mask is not None
        if self.norm_first:
            x = self._attention(self._normed(x, self.norm1), x, masks)
            x = self._products(self._normed(x, self.norm2), x)
        else:
            x = self._normed(self._attention(x, x, masks), self.norm1)
            x = self._normed(self._products(x, x), self.norm2)
        return x if self.self_attn.batch_first else x.transpose(0, 1)

    def obstacle(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> str | None:
        """Why our kernels cannot compute this call, in words for a user; None if they can."""
        reason = self._reason(src, src_mask, src_key_padding_mask, is_causal)
        if reason is not None:
            return reason
        x = batches_first(self.self_attn, src)
        masks = src_key_padding_mask, src_mask, is_causal and src_mask is not None
        return refused(self.self_attn, x, x, x, masks, self.policy)

    def extra_repr(self) -> str:
        return "" if self.policy == STANDARD else f"policy={self.policy!r}"

    # ------------------------------------------------------------------------------------------------------ the pieces

    def _normed(self, x: Tensor, norm: nn.LayerNorm) -> Tensor:
        return norm_modulate(x, weight=norm.weight, bias=norm.bias, eps=norm.eps, policy=self.policy)

    def _attention(self, x: Tensor, residual: Tensor, masks: tuple[Tensor | None, Tensor | None, bool]) -> Tensor:
        out = self.self_attn.out_proj
        value = attended(self.self_attn, x, x, x, *masks, self.policy)
        return linear(value, out.weight, out.bias, residual=residual, policy=self.policy)

    def _products(self, x: Tensor, residual: Tensor) -> Tensor:
        first, second, activation = self.linear1, self.linear2, self._activation()
        assert activation is not None  # `_reason` asked
        ends: Any = {"activation": activation, "residual": residual, "policy": self.policy}
        return mlp(x, first.weight, second.weight, first.bias, second.bias, **ends)

    def _activation(self) -> Activation | None:
        """The epilogue's name for the activation; None if it lacks it."""
        if isinstance(self.activation, nn.Module):
            return activation_of(self.activation)  # type: ignore[return-value]
        return FUNCTIONS.get(self.activation)

    def _reason(
        self, src: Tensor, src_mask: Tensor | None, src_key_padding_mask: Tensor | None, is_causal: bool
    ) -> str | None:
        """Why torch computes; None if we do."""
        reason = own_obstacle(ATTENTION, self, self.policy)
        if reason is not None:
            return reason
        if self.training:
            return "the layer is in training mode"
        attention = (
            FusedMultiheadAttention if type(self.self_attn) is FusedMultiheadAttention else nn.MultiheadAttention
        )
        known = (
            ("self_attn", self.self_attn, attention),
            ("linear1", self.linear1, nn.Linear),
            ("linear2", self.linear2, nn.Linear),
            ("norm1", self.norm1, nn.LayerNorm),
            ("norm2", self.norm2, nn.LayerNorm),
            ("dropout", self.dropout, nn.Dropout),
            ("dropout1", self.dropout1, nn.Dropout),
            ("dropout2", self.dropout2, nn.Dropout),
        )
        found = (replaced(*one) for one in known)
        reason = next((reason for reason in found if reason is not None), None)
        if reason is not None:
            return reason
        if self._activation() is None:
            return f"the activation is {self.activation}, the kernels have relu, gelu and silu"
        if isinstance(src, Tensor) and src.ndim != 3:
            return f"src {list(src.shape)} is not of three dimensions"
        own = [t for part in (self.linear1, self.linear2, self.norm1, self.norm2) for t in part.parameters()]
        reason = general_obstacle(src, own) or unlike(src, own)
        causal = is_causal and src_mask is not None
        return reason or unserved(self.self_attn, src, src, src, src_key_padding_mask, src_mask, causal)
