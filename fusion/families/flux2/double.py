"""A double block over our kernels: text and picture, each with its own weights, meet only in the
attention.

    text    ─ norm, modulate ─┐                               ┌─ proj, gate, + ─ ffn ─ text
                              ├─ q k v of all ─ RMSNorm, ─────┤
                              │  RoPE ─ attention of all      │
    picture ─ norm, modulate ─┘  (in place)                   └─ proj, gate, + ─ ffn ─ picture

    ffn: norm, modulate ─ in, GELU or silu x up ─ out, gate, +

The products of both streams write into one [batch, text and picture, 3 * dim], so no parts are
concatenated. Both streams are added to in place, as stock does. The added sums are fp32 and
saturate where an fp16 stream would overflow. Stock instead looks at the whole stream in a pass of
its own, and by then an overflow within the block has made NaNs. The steps before need no such care,
because their inputs are normalised.

Activations, in units of both streams: the streams, q, k and v, and the attention's output: five.
The ffn takes a few tokens at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import comfy.ldm.flux.layers as stock
from torch import Tensor, nn

from ....kernels_cuda import KernelPolicy
from ...fused.named_attention import told
from ...stream.block_hooks import within
from ...weights.normed import Normed
from ...weights.products import feed_forward, product
from .joint import attend
from .modulation import Run, Segments, runs


class Stream(NamedTuple):
    """A stream x [batch, tokens, dim] fp16, with stock's ModulationOut for its attention and its
    feed-forward."""

    x: Tensor
    before_attention: Any
    before_ffn: Any
    segments: Segments | None


class _Half(NamedTuple):
    """A stream and its own modules."""

    x: Tensor
    attention_runs: list[Run]
    ffn_runs: list[Run]
    attn: Any
    norm1: Any
    norm2: Any
    mlp: Any
    first: int  # its first token, among all


def obstacle(block: Any) -> str | None:
    """Why a block cannot be ours, in words a user understands."""
    for mlp in (block.img_mlp, block.txt_mlp):
        if not isinstance(mlp, nn.Sequential) or len(mlp) != 3:
            return "its feed-forward is of a kind without fused kernels"
        if _is_gated(mlp) and mlp[0].bias is not None:
            return "its gated feed-forward has a bias"
        if not _is_gated(mlp) and not isinstance(mlp[1], nn.GELU):
            return "its feed-forward is of a kind without fused kernels"
    return None


def modulation(module: Any, vec: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """For the picture and for the text: stock's ModulationOut before the attention and before the
    feed-forward."""
    if module.modulation:
        return module.img_mod(vec), module.txt_mod(vec)
    given: tuple[tuple[Any, Any], tuple[Any, Any]] = vec
    return given


def parts(module: Any) -> list[list[nn.Module]]:
    """The parts of a block that are paged separately: 260 MiB for klein 9B in fp16, and 290 for
    either stream's feed-forward."""
    attention = [part for attn in (module.txt_attn, module.img_attn) for part in (attn.qkv, attn.norm, attn.proj)]
    modulated = [module.img_mod, module.txt_mod] if module.modulation else []
    return [[*attention, *modulated], [module.txt_mlp], [module.img_mlp]]


def block(
    module: Any,
    policy: KernelPolicy,
    picture: Stream,
    text: Stream,
    pe: Tensor | None,
    mask: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Stock's DoubleStreamBlock. Returns the picture's and the text's stream, both written in
    place."""
    halves = (
        _half(text, 0, module.txt_attn, module.txt_norm1, module.txt_norm2, module.txt_mlp),
        _half(picture, text.x.shape[1], module.img_attn, module.img_norm1, module.img_norm2, module.img_mlp),
    )
    within(module.img_attn.qkv, _see_each_other, module, policy, halves, pe, mask, options)
    for half in halves:
        within(half.mlp, _fed_forward, half, policy)
    return halves[1].x, halves[0].x


def _see_each_other(
    module: Any,
    policy: KernelPolicy,
    halves: Sequence[_Half],
    pe: Tensor | None,
    mask: Tensor | None,
    options: dict[str, Any],
) -> None:
    """Add the joint attention of both streams' tokens to the streams."""
    text, picture = halves
    (batch, text_tokens, dim), tokens = text.x.shape, text.x.shape[1] + picture.x.shape[1]
    qkv = picture.x.new_empty(batch, tokens, 3 * dim)
    for half in halves:
        for run in half.attention_runs:
            normed = Normed(half.x[:, run.tokens], run.scale, run.shift, eps=half.norm1.eps)
            product(normed, half.attn.qkv, policy, out=qkv[:, _among_all(half, run)])
    norms = [(half.attn.norm, slice(half.first, half.first + half.x.shape[1])) for half in halves]
    extra = {**options, "img_slice": [text_tokens, tokens]}
    attended = attend(qkv, module.num_heads, norms, policy, pe, mask, options, extra, told(module))
    del qkv
    for half in halves:
        for run in half.attention_runs:
            x, seen = half.x[:, run.tokens], attended[:, _among_all(half, run)]
            product(seen, half.attn.proj, policy, residual=x, gate=run.gate, out=x, saturate=True)


def _fed_forward(half: _Half, policy: KernelPolicy) -> None:
    """Add the feed-forward of a stream to it."""
    for run in half.ffn_runs:
        x = half.x[:, run.tokens]
        normed = Normed(x, run.scale, run.shift, eps=half.norm2.eps)
        feed_forward(
            normed,
            half.mlp[0],
            half.mlp[2],
            policy,
            gated=_is_gated(half.mlp),
            residual=x,
            gate=run.gate,
            out=x,
            saturate=True,
        )


def _half(stream: Stream, first: int, attn: Any, norm1: Any, norm2: Any, mlp: Any) -> _Half:
    x = stream.x.contiguous()
    before, behind = (runs(mod, stream.segments, x.shape[1]) for mod in (stream.before_attention, stream.before_ffn))
    return _Half(x, before, behind, attn, norm1, norm2, mlp, first)


def _among_all(half: _Half, run: Run) -> slice:
    return slice(half.first + run.tokens.start, half.first + run.tokens.stop)


def _is_gated(mlp: Any) -> bool:
    return isinstance(mlp[1], stock.SiLUActivation)
