"""FusedMultiheadAttention: torch's nn.MultiheadAttention with our products around our attention;
and FusedAttention, with one input and one result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops.attention.attention import ATTENTION
from ..ops.matmul.linear import linear
from ..policy import STANDARD, KernelPolicy
from .attending import attended, batches_first, refused, unserved
from .fallback import hand_back, own_obstacle
from .sharing import sharing


class FusedMultiheadAttention(nn.MultiheadAttention):
    """nn.MultiheadAttention: its arguments, its state dict, its call.

    policy: which of our kernels may compute. "on" makes it an error if they cannot; see
    `KernelPolicy`.

    Kernels of ours compute it for fp16 on an NVIDIA card without gradients if the attention weights
    are not asked for: pass `need_weights=False`, as torch's own layers do. `add_bias_kv` and
    `add_zero_attn` are torch's. Otherwise torch computes; `obstacle(...)`, called as the module is,
    gives the reason. One thing differs: a query that may see no key gives the bias of the output
    projection, where torch gives NaN.
    """

    policy: KernelPolicy

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        policy: KernelPolicy = STANDARD,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            device=device,
            dtype=dtype,
        )
        self.policy = policy

    @classmethod
    def of(cls, attention: nn.MultiheadAttention, *, policy: KernelPolicy = STANDARD) -> FusedMultiheadAttention:
        """Make one from an existing attention: parameters are shared."""
        made = sharing(cls, attention, nn.MultiheadAttention)
        made.policy = policy
        return made

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As nn.MultiheadAttention: (result of query's shape, attention weights or None)."""
        masks = key_padding_mask, attn_mask, is_causal
        reason = self._reason(query, key, value, *masks, need_weights)
        if reason is not None:
            hand_back(type(self).__name__, ATTENTION.name, reason, query, self.policy)
            given: tuple[Tensor, Tensor | None] = super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
            return given
        batched = query.ndim == 3
        q, k, v = (batches_first(self, t) for t in (query, key, value))
        attention = attended(self, q, k, v, *masks, self.policy)
        out = linear(attention, self.out_proj.weight, self.out_proj.bias, policy=self.policy)
        if not batched:
            return out.squeeze(0), None
        return (out if self.batch_first else out.transpose(0, 1)), None

    def obstacle(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> str | None:
        """Why our kernels cannot compute this call, in words for a user; None if they can. Without
        key and value: for the query over itself."""
        key = query if key is None else key
        value = key if value is None else value
        masks = key_padding_mask, attn_mask, is_causal
        reason = self._reason(query, key, value, *masks, need_weights)
        if reason is not None:
            return reason
        q, k, v = (batches_first(self, t) for t in (query, key, value))
        return refused(self, q, k, v, masks, self.policy)

    def extra_repr(self) -> str:
        found = f"{self.embed_dim}, {self.num_heads}"
        return found if self.policy == STANDARD else f"{found}, policy={self.policy!r}"

    def _reason(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        need_weights: bool,
    ) -> str | None:
        """Why torch computes; None if we do."""
        reason = own_obstacle(ATTENTION, self, self.policy)
        if reason is None and need_weights:
            reason = "the attention weights are asked for, which our kernels never hold: pass need_weights=False"
        return reason or unserved(self, query, key, value, key_padding_mask, attn_mask, is_causal)


class FusedAttention(FusedMultiheadAttention):
    """Attention of x [batch, tokens, embed_dim] over itself, without the weights:
    `FusedAttention(embed_dim, num_heads)(x)`. Parameters and options are those of
    nn.MultiheadAttention."""

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, batch_first=True, **options)

    def forward(  # type: ignore[override]
        self, x: Tensor, key_padding_mask: Tensor | None = None, attn_mask: Tensor | None = None
    ) -> Tensor:
        """x -> x's shape and dtype; masks as for nn.MultiheadAttention."""
        return super().forward(x, x, x, key_padding_mask, need_weights=False, attn_mask=attn_mask)[0]
