"""The joint attention of Flux's blocks, over q, k and v of all tokens, text first: RMS norm of each
head, RoPE over the axes, attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from comfy.ldm.flux.math import attention as stock_attention
from comfy.ldm.modules.attention import optimized_attention
from torch import Tensor

from ....kernels_cuda import KernelPolicy, rms_rope_
from ...weights.operands import operands

# Stock's norms give no eps, for which torch takes the epsilon of the type that it sums in.
EPS = torch.finfo(torch.float32).eps
OnTokens = tuple[Any, slice]  # stock's QKNorm, and the tokens whose heads it is for


def attend(
    qkv: Tensor,
    heads: int,
    norms: Sequence[OnTokens],
    policy: KernelPolicy,
    pe: Tensor | None,
    mask: Tensor | None,
    options: dict[str, Any],
    extra: dict[str, Any],
    named: Mapping[str, Any],
) -> Tensor:
    """The joint attention: [batch, tokens, dim].

    qkv    [batch, tokens, 3 * dim] fp16: q, k and v of each token. Overwritten
    norms  each with its tokens, because text and picture have their own
    pe     rotations [1 or batch, 1, tokens, head / 2, 2, 2]
    extra  options for patches on the attention
    named  arguments of stock's function about the block (`named_attention.py`)
    """
    q, k, v = qkv.view(*qkv.shape[:2], 3, heads, -1).unbind(2)
    patches = options.get("patches", {})
    changed = patches.get("attn1_patch", ())
    for norm, tokens in norms:
        # A patch gets q and k before RoPE.
        turn = None if pe is None or changed else pe[:, :, tokens]
        with operands(qkv, policy, norm.query_norm, norm.key_norm) as [of_q, of_k]:
            rms_rope_(
                q[:, tokens], k[:, tokens], of_q.weight, of_k.weight, turn, eps=_eps(norm), norm="head", policy=policy
            )
    attended = _seen(q, k, v, pe, mask, options, extra, changed, named)
    for patch in patches.get("attn1_output_patch", ()):
        attended = patch(attended, extra)
    return attended


def _eps(norm: Any) -> float:
    given: float | None = norm.query_norm.eps
    return EPS if given is None else given


def _seen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pe: Tensor | None,
    mask: Tensor | None,
    options: dict[str, Any],
    extra: dict[str, Any],
    changed: Sequence[Any],
    named: Mapping[str, Any],
) -> Tensor:
    """Attention by stock's function, which asks the overrides; ours is one of them."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if not changed:
        out: Tensor = optimized_attention(
            q, k, v, q.shape[1], skip_reshape=True, mask=mask, transformer_options=options, **named
        )
        return out
    q, k, v = (t.contiguous() for t in (q, k, v))
    for patch in changed:
        given = patch(q, k, v, pe=pe, attn_mask=mask, extra_options=extra)
        q, k, v = given.get("q", q), given.get("k", k), given.get("v", v)
        pe, mask = given.get("pe", pe), given.get("attn_mask", mask)
    turned: Tensor = stock_attention(q, k, v, pe=pe, mask=mask, transformer_options=options, **named)
    return turned
