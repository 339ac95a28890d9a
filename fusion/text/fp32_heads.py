"""Attention in FP32, for language models whose heads have no norm.

Nothing bounds the numbers of such heads. Published Qwen2.5 has biases of some hundreds in its keys,
and a score is the sum of products of these: rounded to FP16, the scores of a token are off by
tenths. So queries, keys and values stay FP32, as in stock, and torch computes. A prompt's attention
is a small part of its arithmetic: of 1024 tokens of Qwen2.5 7B 0.4 of 30 TFLOP.

torch's kernel for FP32 has no shared keys, so each head of queries gets a copy of its own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...kernels_cuda import attention, decode_attention
from ...kernels_cuda.ops.norm.rms import rotated
from ..weights.fp32_residual import TORCHS


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, tokens, heads, d] turned by angles [1 or batch, 1, tokens, d / 2], all fp32."""
    return rotated(x, cos.transpose(1, 2), sin.transpose(1, 2))


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """Attention of q [batch, queries, heads, d] over k and v [batch, keys, key heads, d], all fp32:
    [batch, queries, heads, d]. mask, options: as `attention` takes them."""
    share = q.shape[2] // k.shape[2]
    if share > 1:
        k, v = (t.repeat_interleave(share, 2) for t in (k, v))
    return attention(q, k, v, mask, **options, policy=TORCHS)


def looked_back(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    at: Tensor,
    *,
    window: int,
) -> Tensor:
    """Attention of one new token over the keys up to its own: [1, 1, heads, d] fp32.

    q, k, v       [1, 1, heads or key heads, d] fp32
    cos, sin      [places, d / 2] fp32
    keys, values  [1, places, key heads, d] fp32. Written where the token belongs
    at            [1] int32, its place. No host reads it, so a graph may hold the call
    window        as `decode_attention` takes it
    """
    place = at.long()
    table = (part.index_select(0, place)[:, None] for part in (cos, sin))
    cos, sin = table
    keys.index_copy_(1, place, rotated(k, cos, sin))
    values.index_copy_(1, place, v)
    return decode_attention(rotated(q, cos, sin), keys, values, at, window=window, policy=TORCHS)
