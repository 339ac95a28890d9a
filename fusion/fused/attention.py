"""Attention of a stock model through our op, by the hook that stock offers for it.

Stock calls `transformer_options["optimized_attention_override"]` for each attention. The override
belongs to one loaded model, with that model's policy, so two models in one graph do not meet. It
answers as stock's `attention_pytorch` does. A call that it does not serve goes back to stock's
function, with the reason in the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...kernels_cuda import KernelPolicy, attention
from ...kernels_cuda.ops.attention.attention import HEADS
from ...kernels_cuda.ops.matmul.mlp import CHUNK_BYTES
from ..base.hooks import PIECES
from ..base.policy import put_on
from ..weights.fp32_products import attention_of_fp32, narrows
from . import named_attention
from .block import HandBack, wrong_type

HOOK = "optimized_attention_override"
STOCK = "attention_pytorch"
# Keyword arguments with a known meaning. `attn_precision` and `low_precision_attention` are
# ignored, as attention_pytorch does, because softmax is fp32 here in any case.
KNOWN = {"scale", "enable_gqa", "transformer_options", "low_precision_attention", "_inside_attn_wrapper"}
TYPES = (torch.float16, torch.bfloat16)  # that `turbo` takes, because it multiplies 8-bit numbers
OFF = "attention is switched off for this model"

HAND_BACK = HandBack("attention", "the hook", "this model's attention", "serve it", "stock's function")


class StockCall:
    """A call of stock's attention, with named arguments.

    q, k, v              [batch, tokens, heads * d], or with `skip_reshape` [batch, heads, tokens,
                         d]
    skip_output_reshape  the answer is [batch, heads, tokens, d] instead of [batch, tokens, heads *
                         d]
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: torch.dtype | None = None,  # noqa: ARG002 - see KNOWN
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **others: Any,
    ) -> None:
        self.q, self.k, self.v, self.heads, self.mask = q, k, v, heads, mask
        self.skip_reshape, self.skip_output_reshape, self.others = skip_reshape, skip_output_reshape, others

    @property
    def options(self) -> dict[str, Any]:
        """The model's transformer_options."""
        return self.others.get("transformer_options") or {}

    @property
    def tokens(self) -> int:
        """Number of tokens of q."""
        return self.q.shape[-2]

    @property
    def scale(self) -> float | None:
        return self.others.get("scale")

    def unknown(self) -> str | None:
        """Why the call is not understood, in words a user understands; None: it is."""
        if self.others.keys() <= KNOWN:
            return None
        return f"the model passes {', '.join(sorted(self.others.keys() - KNOWN))}, which this version does not know"

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Views of q, k, v as our op takes them, [batch, tokens, heads, d]."""
        parts = (self.q, self.k, self.v)
        if self.skip_reshape:
            q, k, v = (t.transpose(1, 2) for t in parts)
            return q, k, v
        d = self.q.shape[-1] // self.heads
        key_heads = -1 if self.others.get("enable_gqa", False) else self.heads
        counts = (self.heads, key_heads, key_heads)
        q, k, v = (t.reshape(*t.shape[:2], count, d) for t, count in zip(parts, counts, strict=True))
        return q, k, v

    def broadcast_mask(self) -> Tensor | None:
        """The mask in a shape that broadcasts to [batch, heads, tokens, tokens]."""
        mask = self.mask
        if mask is None:
            return None
        return mask[None, None] if mask.ndim == 2 else mask[:, None] if mask.ndim == 3 else mask

    def answer(self, out: Tensor) -> Tensor:
        """Our op's output [batch, tokens, heads, d] in the shape that stock asked for."""
        return out.transpose(1, 2) if self.skip_output_reshape else out.flatten(2)


class AttentionOverride:
    """Stock's attention call, served by our op. One for each loaded model."""

    def __init__(self, policy: KernelPolicy) -> None:
        self.policy = policy
        self._mode = policy.mode("attention")

    @property
    def yields(self) -> bool:
        """Whether it steps back for an attention that a layer names."""
        return self._mode != "on"

    def __call__(self, stock: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Stock's attention, by our op, or by stock's function with the same arguments."""
        call = StockCall(*args, **kwargs)
        reason = self._obstacle(stock, call)
        if reason is not None:
            HAND_BACK(reason, call.q, forced=self._mode == "on", quietly=not call.q.is_cuda)
            return stock(*args, **kwargs)
        attend = partial(attention, scale=call.scale, policy=self.policy)
        if narrows(call.q):
            most = call.options.get(PIECES, CHUNK_BYTES)
            return call.answer(attention_of_fp32(attend, *call.operands(), call.broadcast_mask(), most))
        return call.answer(attend(*call.operands(), call.broadcast_mask()))

    def _obstacle(self, stock: Callable[..., Tensor], call: StockCall) -> str | None:
        """Why stock's function must serve, in words a user understands; None if ours may."""
        if self._mode == "off":
            return OFF
        types = TYPES if self.policy.attends == "turbo" else (torch.float16,)
        types = (*types, torch.float32) if narrows(call.q) else types
        if (reason := wrong_tensor(call.q, types)) is not None:
            return reason
        name = getattr(stock, "__name__", str(stock))
        if name != STOCK and self._mode != "on":
            return f"ComfyUI was started with another attention ({name}), and that is kept"
        return call.unknown()


def is_anothers(options: Mapping[str, Any]) -> bool:
    """Whether another node's function attends in a call with these transformer_options. It may write
    to what it is given, and keep what it gives."""
    override = options.get(HOOK)
    override = getattr(override, "held", override)  # the override inside of sparse attention
    return override is not None and not isinstance(override, AttentionOverride)


def wrong_tensor(q: Tensor, types: Container[torch.dtype] = (torch.float16,)) -> str | None:
    """Why our op does not serve such queries, in words a user understands; None: it does. types:
    those that it takes."""
    return wrong_type(q, types) if q.is_cuda else f"tensor is on the {q.device.type.upper()}"


def for_heads(policy: KernelPolicy, size: int, op: str = "attention", heads: Container[int] = HEADS) -> KernelPolicy:
    """The policy for attention with heads of so many elements. If our kernels have no such heads
    and kernels are "on", only attention is left to torch, and the ledger says why.

    op, heads: the op that attends, and the heads that its kernels have
    """
    if size in heads or policy.mode(op) != "on":
        return policy
    return replace(policy, ops=(*policy.ops, (op, "auto")))


def install(model: Any, policy: KernelPolicy) -> None:
    """Put the override into a stock MODEL (a `ModelPatcher`), and the policy where its blocks find
    it. Clones of the model carry both; other models do not see them."""
    options = put_on(model, policy)
    options[HOOK] = AttentionOverride(policy)
    named_attention.attach(options, HOOK)
