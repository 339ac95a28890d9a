"""A layer of a language model, stock's TransformerBlock, over our kernels, in FP16 around an FP32
stream (`weights/fp32_residual.py`).

    x += o(attention(rope(rms(q(n))), rope(rms(k(n))), v(n)))      n = rms(x)
    x += down(silu(gate(n)) * up(n))                               n = rms(x)

The norms of q and k are per head, and several query heads share a key head. Attention is causal
within the kernel, and padded keys do not exist for it, so no mask of all pairs of tokens is made.
With precision `precise` q and k are normalised and turned in FP32 and rounded once, and attention
gets v in two parts, the value and its rounding error.

A token that is being written passes alone (`Next`). A product of a row or two takes as long as
reading its weight, so everything is `precise`, in two parts, and weights are read as they are
stored. Keys and values go into the prompt's buffers, and no argument is on the host, so that a
graph may hold the way through all layers.

Long prompts, such as those with pictures, pass in chunks. Each chunk sees the keys of those before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import torch
from torch import Tensor, nn

from ...kernels_cuda import attention, decode_attention, join_sums, rms_parts, rms_rope_, rms_rope_keep, rms_rope_sums
from ..weights.few_rows import few_products
from ..weights.fp32_residual import (
    HIDDEN_SCALE,
    Gate,
    Wide,
    norm_weight,
)
from .common import Seen

SILU = Gate("silu", nn.functional.silu)
CHUNK = 2048  # tokens: 100 MB of fp32 between the first products and the attention, for Qwen3 4B


@dataclass(frozen=True)
class Pictures:
    """Features of a prompt's pictures that are added to the stream after the first layers
    (deepstack).

    places  [n] int64: the tokens of a single prompt that stand for pictures
    seen    for each of the first layers [n, width] fp32
    """

    places: Tensor
    seen: Sequence[Tensor]

    def add(self, x: Tensor, layer: int) -> None:
        """Add to x [1, tokens, width], the output of this layer, in place."""
        if layer < len(self.seen):
            x[0].index_add_(0, self.places, self.seen[layer].to(x))


@dataclass(frozen=True)
class Prompt:
    """Arguments shared by all layers of one call.

    wide              how to compute
    seen              which tokens are computed and seen
    lengths_of_parts  [2] int32: `seen.lengths` of a single prompt, once for each part of its values
    cos, sin          [1 or batch, 1, tokens, head / 2] fp32
    pictures          what they add to the stream
    """

    wide: Wide
    seen: Seen
    lengths_of_parts: Tensor | None
    cos: Tensor
    sin: Tensor
    pictures: Pictures | None = None


@dataclass(frozen=True)
class Kept:
    """The keys and values of one layer.

    k       [batch, tokens, key heads, d] fp16
    values  [parts, batch, tokens, key heads, d] fp16; the parts add up
    """

    k: Tensor
    values: Tensor

    @staticmethod
    def empty(like: Tensor, parts: int, batch: int, tokens: int, heads: int, d: int) -> Kept:
        """Uninitialised buffers for so many tokens, on the device of `like`."""
        room = torch.empty(1 + parts, batch, heads, tokens, d, dtype=torch.float16, device=like.device)
        return Kept.of(room)

    @staticmethod
    def of(room: Tensor) -> Kept:
        """Views of room [1 + parts, batch, key heads, tokens, d], keys first. The rows of a head
        are adjacent."""
        return Kept(room[0].transpose(1, 2), room[1:].transpose(2, 3))


@dataclass(frozen=True)
class Next:
    """Arguments shared by all layers for one more token.

    wide      how to compute
    cos, sin  [places, head / 2] fp32, for each place that the cache has
    at        [1] int32: the token's place
    """

    wide: Wide
    cos: Tensor
    sin: Tensor
    at: Tensor


class FusedLayer:
    """Mixed into the class of a fused layer, stock's TransformerBlock."""

    def forward(
        self,
        x: Tensor,
        attention_mask: Any = None,
        freqs_cis: Any = None,
        optimized_attention: Any = None,
        past_key_value: Any = None,
    ) -> Any:
        """Stock's TransformerBlock, with our arguments where the stack is ours.

        `attention_mask` is then the stack's `Prompt`; x [batch, tokens, width] fp32 is its own
        stream, which is added to in place; and `past_key_value` is the `Kept` to fill, or None. For
        one more token `attention_mask` is its `Next`, and the output is a new tensor. Anything else
        is a call of stock's.
        """
        if isinstance(attention_mask, Next):
            return one_more(self, x, attention_mask, past_key_value), None
        if not isinstance(attention_mask, Prompt):
            return super().forward(  # type: ignore[misc]
                x, attention_mask, freqs_cis, optimized_attention, past_key_value
            )
        # Stock's operations ask this; ours do not.
        comfy.model_management.throw_exception_if_processing_interrupted()
        layer: Any = self
        attend(layer, x, attention_mask, past_key_value)
        norm, mlp = layer.post_attention_layernorm, layer.mlp
        inner = (mlp.gate_proj, mlp.up_proj)
        attention_mask.wide.feed_forward(x, norm.weight, norm.eps, inner, mlp.down_proj, SILU)
        return x, None


def attend(layer: Any, x: Tensor, prompt: Prompt, kept: Kept | None = None) -> None:
    """x += o(attention(...)) of the normalised x. kept: receives keys and values; None: they are
    not needed again."""
    module, wide, tokens = layer.self_attn, prompt.wide, x.shape[1]
    if kept is None and tokens <= CHUNK:
        q, k, values = turned(layer, x, prompt, slice(0, tokens))
        wide.add(x, seen_values(q, k, values, prompt), module.o_proj)
        return
    parts = 2 if wide.splits else 1
    kept = kept or Kept.empty(x, parts, x.shape[0], tokens, module.num_kv_heads, module.head_dim)
    for first in range(0, tokens, CHUNK):
        last = min(first + CHUNK, tokens)
        q, k, values = turned(layer, x[:, first:last], prompt, slice(first, last))
        kept.k[:, first:last] = k
        if len(kept.values) < len(values):
            values = values[:1]  # only the first part is kept
        kept.values[:, :, first:last] = values
        found = [attended(q, kept.k[:, :last], part[:, :last], prompt) for part in kept.values]
        wide.add(x[:, first:last], found, module.o_proj)


def turned(layer: Any, x: Tensor, prompt: Prompt, some: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of x [batch, tokens, width], [batch, tokens, heads, d] fp16 each, turned,
    and values [parts, batch, tokens, key heads, d]. some: which tokens of the prompt x has."""
    module, wide, norm = layer.self_attn, prompt.wide, layer.input_layernorm
    h = wide.operand(x, norm.weight, norm.eps)
    found = wide.projections(h, (module.q_proj, module.k_proj, module.v_proj), halves=False)
    q, k, v = (part.view(*part.shape[:-1], -1, module.head_dim) for part in found)
    weights = norm_weight(module.q_norm.weight, x), norm_weight(module.k_norm.weight, x)
    table, eps = (prompt.cos[:, :, some], prompt.sin[:, :, some]), module.q_norm.eps
    if wide.splits:
        q, k = rms_rope_sums(q, k, *weights, *table, eps=eps, policy=wide.ops)
        return q, k, join_sums(v, policy=wide.ops)
    rms_rope_(q, k, *weights, *table, eps=eps, norm="head", interleaved=False, policy=wide.ops)
    return q, k, v[None]


def seen_values(q: Tensor, k: Tensor, values: Tensor, prompt: Prompt) -> Sequence[Tensor]:
    """Attention over each part of the values [parts, batch, tokens, key heads, d]: [batch, tokens,
    heads * d] for each part. Both parts of a single prompt are one call, like a batch of two."""
    parts = values.shape[0]
    if parts > 1 and q.shape[0] == 1:
        q, k = (t.expand(parts, -1, -1, -1) for t in (q, k))
        found = attended(q, k, values[:, 0], prompt, prompt.lengths_of_parts)
        return found[:, None].unbind()
    return [attended(q, k, part, prompt) for part in values]


def attended(q: Tensor, k: Tensor, v: Tensor, prompt: Prompt, lengths: Tensor | None = None) -> Tensor:
    """Attention of the last tokens over all keys so far: [batch, queries, heads * d]. lengths:
    replaces the prompt's."""
    seen, keys = prompt.seen, k.shape[1]
    mask = None if seen.mask is None else seen.mask[..., :keys]
    options: Any = {"causal": q.shape[1] > 1, "key_lengths": seen.lengths if lengths is None else lengths}
    return attention(q, k, v, mask, **options, policy=prompt.wide.ops).flatten(2)


# ------------------------------------------------------------------------------------------------------ one more token


def one_more(layer: Any, x: Tensor, token: Next, kept: Kept) -> Tensor:
    """A new stream [1, 1, width] after this layer, from x [1, 1, width] fp32. Its keys and values
    are kept."""
    module, mlp, ops = layer.self_attn, layer.mlp, token.wide.ops
    h = parts_of(layer.input_layernorm, x, token)
    found = few_products(h, (module.q_proj, module.k_proj, module.v_proj), ops, joined=True)
    q, k, v = (part.view(1, *part.shape[:-1], -1, module.head_dim) for part in found)
    weights = norm_weight(module.q_norm.weight, x), norm_weight(module.k_norm.weight, x)
    room = kept.k, kept.values[0], token.at
    q = rms_rope_keep(q, k, v, *weights, token.cos, token.sin, *room, eps=module.q_norm.eps, policy=ops)
    seen = decode_attention(q, *room, policy=ops).flatten(2)
    [x] = few_products(seen, (module.o_proj,), ops, residual=x)
    h = parts_of(layer.post_attention_layernorm, x, token)
    gate, up = few_products(h, (mlp.gate_proj, mlp.up_proj), ops)
    hidden = join_sums(gate, up, activation=SILU.name, scale=HIDDEN_SCALE, policy=ops)
    [x] = few_products(hidden, (mlp.down_proj,), ops, residual=x, factor=1 / HIDDEN_SCALE, joined=True)
    return x


def parts_of(norm: Any, x: Tensor, token: Next) -> Tensor:
    """x normalised, in two parts, as products take it: [2, *x.shape] fp16."""
    return rms_parts(x, norm_weight(norm.weight, x), eps=norm.eps, policy=token.wide.ops)
