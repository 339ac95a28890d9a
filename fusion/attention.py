"""Attention of a stock model through our op, by the hook that stock offers for it.

Stock asks `transformer_options["optimized_attention_override"]` before each attention. The override belongs to one loaded
model, with that model's policy; two models in one graph do not meet. It answers as stock's `attention_pytorch` does.
What it does not serve goes back to stock's function, with the reason in the ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels_cuda import KernelPolicy, attention
from .fused import POLICY, HandBack, wrong_type

HOOK = "optimized_attention_override"
STOCK = "attention_pytorch"
# Keyword arguments whose meaning is known. `attn_precision` and `low_precision_attention` are ignored, as
# attention_pytorch ignores them: softmax is fp32 here in any case.
KNOWN = {"scale", "enable_gqa", "transformer_options", "low_precision_attention", "_inside_attn_wrapper"}


HAND_BACK = HandBack("attention", "the hook", "this model's attention", "serve it", "stock's function")


class AttentionOverride:
    """Stock's attention call, served by our op. One for each loaded model."""

    def __init__(self, policy: KernelPolicy) -> None:
        self.policy = policy
        self._mode = policy.mode("attention")

    def __call__(
        self,
        stock: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **others: Any,
    ) -> Tensor:
        """q, k, v: [batch, tokens, heads * d], or with `skip_reshape` [batch, heads, tokens, d].

        Returns [batch, tokens, heads * d], or with `skip_output_reshape` [batch, heads, tokens, d].
        """
        reason = self._obstacle(stock, q, others)
        if reason is not None:
            HAND_BACK(reason, q, forced=self._mode == "on", quietly=not q.is_cuda)
            return stock(
                q,
                k,
                v,
                heads,
                mask=mask,
                attn_precision=attn_precision,
                skip_reshape=skip_reshape,
                skip_output_reshape=skip_output_reshape,
                **others,
            )
        if skip_reshape:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        else:
            d = q.shape[-1] // heads
            key_heads = -1 if others.get("enable_gqa", False) else heads
            q, k, v = (t.reshape(*t.shape[:2], count, d) for t, count in ((q, heads), (k, key_heads), (v, key_heads)))
        if mask is not None:
            mask = mask[None, None] if mask.ndim == 2 else mask[:, None] if mask.ndim == 3 else mask
        out = attention(q, k, v, mask, scale=others.get("scale"), policy=self.policy)
        return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)

    def _obstacle(self, stock: Callable[..., Tensor], q: Tensor, others: dict[str, Any]) -> str | None:
        """Why stock's function must serve, in words a user understands; None if ours may."""
        if self._mode == "off":
            return "attention is switched off for this model"
        if not q.is_cuda:
            return f"tensor is on the {q.device.type.upper()}"
        if (reason := wrong_type(q)) is not None:
            return reason
        name = getattr(stock, "__name__", str(stock))
        if name != STOCK and self._mode != "on":
            return f"ComfyUI was started with another attention ({name}), and that is kept"
        if not others.keys() <= KNOWN:
            return f"the model passes {', '.join(sorted(others.keys() - KNOWN))}, which this version does not know"
        return None


def install(model: Any, policy: KernelPolicy) -> None:
    """Put the override into a stock MODEL (a `ModelPatcher`), and the policy where the blocks find it. Clones of the model
    carry both; other models do not see them."""
    options = model.model_options.setdefault("transformer_options", {})
    options[HOOK] = AttentionOverride(policy)
    options[POLICY] = policy
