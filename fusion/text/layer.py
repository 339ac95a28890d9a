"""A layer of a language model, one of stock's two classes, over our kernels, in FP16 around an FP32
stream (`weights/fp32_residual.py`). `layer_kind.py` has the differences between layers.

    x += o(attention(rope(rms(q(n))), rope(rms(k(n))), v(n)))      n = rms(x)
    x += down(gate(first(n)) * second(n))                          n = rms(x)

The norms of q and k are per head, and several query heads share a key head. Attention is causal
within the kernel, and padded keys do not exist for it, so no mask of all pairs of tokens is made.
With precision `precise` q and k are normalised and turned in FP32 and rounded once, and attention
gets v in two parts, the value and its rounding error. Heads without a norm are attended in FP32
(`fp32_heads.py`).

A token that is being written passes alone (`Next`). A product of a row or two takes as long as
reading its weight, so everything is `precise`, in two parts, and weights are read as they are
stored. Keys and values go into the prompt's buffers, and no argument is on the host, so that a
graph may hold the way through all layers.

Long prompts, such as those with pictures, pass in chunks. Each chunk sees the keys of those before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import torch
from torch import Tensor

from ...kernels_cuda import attention, decode_attention, join_sums, rms_parts, rms_rope_, rms_rope_keep, rms_rope_sums
from ...kernels_cuda.ops.attention.decode_attention import HEADS as DECODED
from ...kernels_cuda.ops.views.parts import split
from ..fused.attention import for_heads
from ..weights.few_rows import few_products
from ..weights.fp32_residual import HIDDEN_SCALE, Wide
from ..weights.operands import bias_of
from . import fp32_heads
from .layer_kind import LayerKind, branch_norms, factor_of, kind_of
from .padding import Seen

Table = tuple[Tensor, Tensor]  # cosines and sines
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
    tables            of angles: [1 or batch, 1, tokens, head / 2] fp32 each
    pictures          what they add to the stream
    """

    wide: Wide
    seen: Seen
    lengths_of_parts: Tensor | None
    tables: tuple[Table, ...]
    pictures: Pictures | None = None


@dataclass(frozen=True)
class Kept:
    """The keys and values of one layer.

    k       [batch, tokens, key heads, d] of `LayerKind.kept`
    values  [parts, batch, tokens, key heads, d] of that type; the parts add up
    """

    k: Tensor
    values: Tensor

    @staticmethod
    def empty(like: Tensor, parts: int, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> Kept:
        """Uninitialised buffers of batch, key heads, tokens and d, on the device of `like`."""
        return Kept.of(torch.empty(1 + parts, *shape, dtype=dtype, device=like.device))

    @staticmethod
    def of(room: Tensor) -> Kept:
        """Views of room [1 + parts, batch, key heads, tokens, d], keys first. The rows of a head
        are adjacent."""
        return Kept(room[0].transpose(1, 2), room[1:].transpose(2, 3))


@dataclass(frozen=True)
class Next:
    """Arguments shared by all layers for one more token.

    wide    how to compute
    tables  of angles: [places, head / 2] fp32 each, for each place that the cache has
    at      [1] int32: the token's place
    """

    wide: Wide
    tables: tuple[Table, ...]
    at: Tensor

    @property
    def places(self) -> int:
        return self.tables[0][0].shape[0]


class FusedLayer:
    """Mixed into the class of a fused layer, one of stock's two."""

    def forward(
        self,
        x: Tensor,
        attention_mask: Any = None,
        freqs_cis: Any = None,
        optimized_attention: Any = None,
        past_key_value: Any = None,
    ) -> Any:
        """Stock's, with our arguments where the stack is ours.

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
        feed_forward(layer, x, attention_mask.wide)
        return x, None


def feed_forward(layer: Any, x: Tensor, wide: Wide) -> None:
    """x += down(gate(first(n)) * second(n)), or its norm."""
    kind, mlp = kind_of(layer), layer.mlp
    _, before, behind = branch_norms(layer, kind)
    inner, norm = (mlp.gate_proj, mlp.up_proj), factor_of(before, x)
    with branch(x, behind, wide) as into:
        wide.feed_forward(x, norm, before.eps, inner, mlp.down_proj, kind.gate, into=into)


@contextlib.contextmanager
def branch(x: Tensor, norm: Any, wide: Wide) -> Iterator[Tensor]:
    """What a branch is added to meanwhile: x itself, or zeros, whose norm is then added to x. norm:
    stock's behind the branch, or None."""
    if norm is None:
        yield x
        return
    found = torch.zeros_like(x)
    yield found
    x += wide.rms(found, factor_of(norm, x), norm.eps, torch.float32)


def attend(layer: Any, x: Tensor, prompt: Prompt, kept: Kept | None = None) -> None:
    """x += o(attention(...)) of the normalised x, or its norm. kept: receives keys and values;
    None: they are not needed again."""
    module, wide, tokens, kind = layer.self_attn, prompt.wide, x.shape[1], kind_of(layer)
    if kept is None and tokens <= CHUNK:
        q, k, values = turned(layer, x, prompt, slice(0, tokens))
        _add(layer, x, seen_values(q, k, values, prompt, kind), wide)
        return
    parts = 2 if wide.splits and kind.norms_heads else 1
    shape = (x.shape[0], module.num_kv_heads, tokens, module.head_dim)
    kept = kept or Kept.empty(x, parts, kind.kept, shape)
    for first in range(0, tokens, CHUNK):
        last = min(first + CHUNK, tokens)
        q, k, values = turned(layer, x[:, first:last], prompt, slice(first, last))
        kept.k[:, first:last] = k
        if len(kept.values) < len(values):
            values = values[:1]  # only the first part is kept
        kept.values[:, :, first:last] = values
        found = [attended(q, kept.k[:, :last], part[:, :last], prompt, kind) for part in kept.values]
        _add(layer, x[:, first:last], found, wide)


def _add(layer: Any, x: Tensor, seen: Sequence[Tensor], wide: Wide) -> None:
    """x += o(...) of what the heads saw, or its norm. seen: [batch, tokens, heads * d] each, which
    add up: fp16, or one in fp32."""
    if seen[0].dtype is torch.float32:
        seen = split(seen[0]).unbind() if wide.splits else (split(seen[0])[0],)
    behind, *_ = branch_norms(layer, kind_of(layer))
    with branch(x, behind, wide) as into:
        wide.add(into, seen, layer.self_attn.o_proj)


def turned(layer: Any, x: Tensor, prompt: Prompt, some: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of x [batch, tokens, width], [batch, tokens, heads, d] each, turned, and
    values [parts, batch, tokens, key heads, d]: fp16, or fp32 if heads have no norm. some: which
    tokens of the prompt x has."""
    module, wide, norm, kind = layer.self_attn, prompt.wide, layer.input_layernorm, kind_of(layer)
    h = wide.operand(x, factor_of(norm, x), norm.eps)
    found = wide.projections(h, (module.q_proj, module.k_proj, module.v_proj), halves=False)
    q, k, v = (part.view(*part.shape[:-1], -1, module.head_dim) for part in found)
    table = tuple(part[:, :, some] for part in prompt.tables[kind.table])
    blind = None if prompt.seen.blind is None else prompt.seen.blind[:, some]
    if not kind.norms_heads:
        q, k, v = (part.sum(0) if wide.splits else part.float() for part in (q, k, v))
        q, k = fp32_heads.turned(q, *table), fp32_heads.turned(k, *table)
        values = v[None]
    elif wide.splits:
        weights = factor_of(module.q_norm, x), factor_of(module.k_norm, x)
        q, k = rms_rope_sums(q, k, *weights, *table, eps=module.q_norm.eps, policy=wide.ops)
        values = join_sums(v, policy=wide.ops)
    else:
        weights = factor_of(module.q_norm, x), factor_of(module.k_norm, x)
        eps = module.q_norm.eps
        rms_rope_(q, k, *weights, *table, eps=eps, norm="head", interleaved=False, policy=wide.ops)
        values = v[None]
    return q if blind is None else q.masked_fill(blind, 0), k, values


def seen_values(q: Tensor, k: Tensor, values: Tensor, prompt: Prompt, kind: LayerKind) -> Sequence[Tensor]:
    """Attention over each part of the values [parts, batch, tokens, key heads, d]: [batch, tokens,
    heads * d] for each part. Both parts of a single prompt are one call, like a batch of two."""
    parts = values.shape[0]
    if parts > 1 and q.shape[0] == 1:
        q, k = (t.expand(parts, -1, -1, -1) for t in (q, k))
        found = attended(q, k, values[:, 0], prompt, kind, prompt.lengths_of_parts)
        return found[:, None].unbind()
    return [attended(q, k, part, prompt, kind) for part in values]


def attended(q: Tensor, k: Tensor, v: Tensor, prompt: Prompt, kind: LayerKind, lengths: Tensor | None = None) -> Tensor:
    """Attention of the last tokens over all keys so far: [batch, queries, heads * d]. lengths:
    replaces the prompt's."""
    seen, tokens, keys = prompt.seen, q.shape[1], k.shape[1]
    has_pairs = seen.mask is not None and seen.mask.shape[2] > 1
    mask = None if seen.mask is None else seen.mask[..., keys - tokens if has_pairs else 0 :, :keys]
    options: Any = {
        "causal": tokens > 1 and not has_pairs,
        "window": (kind.limit(keys), -1),
        "key_lengths": seen.lengths if lengths is None else lengths,
    }
    if q.dtype is torch.float32:
        return fp32_heads.attended(q, k, v, mask, **options).flatten(2)
    return attention(q, k, v, mask, **options, policy=for_heads(prompt.wide.ops, q.shape[-1])).flatten(2)


# ------------------------------------------------------------------------------------------------------ one more token


def one_more(layer: Any, x: Tensor, token: Next, kept: Kept) -> Tensor:
    """A new stream [1, 1, width] after this layer, from x [1, 1, width] fp32. Its keys and values
    are kept."""
    mlp, ops, kind = layer.mlp, token.wide.ops, kind_of(layer)
    behind_attention, before, behind = branch_norms(layer, kind)
    x = _grown(x, looked_back(layer, x, token, kept), layer.self_attn.o_proj, behind_attention, token)
    gate, up = few_products(parts_of(before, x, token), (mlp.gate_proj, mlp.up_proj), ops)
    hidden = join_sums(gate, up, activation=kind.gate.name, scale=HIDDEN_SCALE, policy=ops)
    return _grown(x, hidden, mlp.down_proj, behind, token, factor=1 / HIDDEN_SCALE)


def looked_back(layer: Any, x: Tensor, token: Next, kept: Kept) -> Tensor:
    """What a token's heads see in all keys up to its own: [1, 1, heads * d] fp16, or in two parts,
    [2, 1, 1, heads * d], if heads have no norm."""
    module, ops, kind = layer.self_attn, token.wide.ops, kind_of(layer)
    projections = module.q_proj, module.k_proj, module.v_proj
    sums = few_products(parts_of(layer.input_layernorm, x, token), projections, ops, joined=True)
    biased = (_with_bias(part, one) for part, one in zip(sums, projections, strict=True))
    q, k, v = (part.view(*part.shape[:-1], -1, module.head_dim) for part in biased)
    table, room, window = token.tables[kind.table], (kept.k, kept.values[0], token.at), kind.limit(token.places)
    if not kind.norms_heads:
        return split(fp32_heads.looked_back(q, k, v, *table, *room, window=window).flatten(2))
    weights = factor_of(module.q_norm, x), factor_of(module.k_norm, x)
    q = rms_rope_keep(q[None], k[None], v[None], *weights, *table, *room, eps=module.q_norm.eps, policy=ops)
    heads = () if window >= 0 else DECODED
    policy = for_heads(ops, module.head_dim, "decode_attention", heads)
    return decode_attention(q, *room, window=window, policy=policy).flatten(2)


def _with_bias(sums: Tensor, module: Any) -> Tensor:
    bias = bias_of(module, sums)
    return sums if bias is None else sums + bias


def _grown(x: Tensor, h: Tensor, module: Any, norm: Any, token: Next, factor: float = 1.0) -> Tensor:
    """x + factor * module(h), or its norm, of h [1, 1, k] or in two parts."""
    options: Any = {"factor": factor, "joined": h.ndim > x.ndim}
    if norm is None:
        [out] = few_products(h, (module,), token.wide.ops, residual=x, **options)
        return out
    [out] = few_products(h, (module,), token.wide.ops, **options)
    return x + token.wide.rms(out, factor_of(norm, x), norm.eps, torch.float32)


def parts_of(norm: Any, x: Tensor, token: Next) -> Tensor:
    """x normalised, in two parts, as products take it: [2, *x.shape] fp16."""
    return rms_parts(x, factor_of(norm, x), eps=norm.eps, policy=token.wide.ops)
