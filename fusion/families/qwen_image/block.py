"""A Qwen-Image block over our kernels: stock's module, whose forward computes the whole block
through our ops. Picture and text, each with its own weights, meet only in the attention.

    text    ─ norm, modulate ─ q k v ─┐                        ┌─ out, gate, + ─ ffn ─ text
                                      ├─ RMSNorm of heads, ────┤
                                      │  RoPE ─ attention      │
    picture ─ norm, modulate ─ q k v ─┘  of all, text first    └─ out, gate, + ─ ffn ─ picture

    ffn: norm, modulate ─ in, GELU ─ out, gate, +

The products of both streams write into one [batch, text and picture, 3 * dim], so no parts are
concatenated.

The stream overflows fp16, and stock computes it in bf16 or fp32. Here it is fp32, and the products
around it are fp16, because their inputs are normalised: gates multiply and streams add fp32 sums.
Numbers between the products saturate, as do those of an fp16 stream.

Pictures of reference may be at timestep zero (Edit 2511). Then the second half of the picture's
modulations is theirs, from the token `zero` on.

Streams are never written to, because patches between the blocks need a block's inputs. Changes by
other nodes count as in Wan's blocks.

Activations, in units of both streams in fp16: q, k and v, and the normed stream or the attention's
output, four; and the streams. The ffn takes a few tokens at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import comfy.ldm.qwen_image.model as stock
import torch
from comfy.ldm.flux.math import apply_rope1
from comfy.ldm.modules.attention import optimized_attention_masked
from torch import Tensor, nn
from torch.nn import functional

from ....kernels_cuda import STANDARD, KernelPolicy, rms_rope_
from ....kernels_cuda.ops.views.half_range import saturated
from ...fused.block import AROUND_FP32, FusedBlock, HandBack, fuse_blocks
from ...fused.named_attention import told
from ...stream.block_hooks import within
from ...weights import saturation
from ...weights.normed import Normed
from ...weights.operands import operands
from ...weights.products import feed_forward, product, products_

HALF = torch.float16
Options = dict[str, Any]


def fuse(net: nn.Module, _policy: KernelPolicy = STANDARD) -> int:
    """Let the blocks of stock's Qwen-Image compute through our ops, under the policy that comes
    with each call. In place, and before they are streamed. Returns the number of blocks."""
    return fuse_blocks(net, stock.QwenImageTransformerBlock, _Fused, obstacle)


def obstacle(block: Any) -> str | None:
    """Why a block cannot be ours, in words a user understands."""
    if type(block.attn) is not stock.Attention:
        return "its attention is of a kind without fused kernels"
    if not all(map(_is_known, (block.img_mlp, block.txt_mlp))):
        return "its feed-forward is of a kind without fused kernels"
    return None


def _is_known(mlp: Any) -> bool:
    """Whether a feed-forward is stock's with the GELU that our products have."""
    if type(mlp) is not stock.FeedForward:
        return False
    first: Any = mlp.net[0]
    return type(first) is stock.GELU and first.approximate == "tanh"


class _Fused(FusedBlock):
    """Mixed into a block's class, with stock's signature."""

    fusestream_hand_back = HandBack("qwen-image block")
    fusestream_types = AROUND_FP32

    def fusestream_in_parts(self) -> Sequence[Sequence[nn.Module]]:
        return parts(self)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None,
        temb: Tensor,
        image_rotary_emb: Tensor | None = None,
        timestep_zero_index: int | None = None,
        transformer_options: Options | None = None,
    ) -> tuple[Tensor, Tensor]:
        options = {} if transformer_options is None else transformer_options
        policy = self.policy_for(hidden_states, options)
        if policy is not None:
            streams, mask = (encoder_hidden_states, hidden_states), encoder_hidden_states_mask
            reason = unserved(streams, temb, image_rotary_emb, timestep_zero_index)
            if reason is None:
                found = block(self, policy, streams, mask, temb, image_rotary_emb, timestep_zero_index, options)
                saturation.look(self, found[1])
                return found
            self.fusestream_hand_back(reason, hidden_states, forced=policy.default == "on")
        out: tuple[Tensor, Tensor] = super().forward(  # type: ignore[misc]
            hidden_states,
            encoder_hidden_states,
            encoder_hidden_states_mask,
            temb,
            image_rotary_emb,
            timestep_zero_index,
            transformer_options=options,
        )
        return out


def parts(module: Any) -> list[list[nn.Module]]:
    """The parts of a block that are paged separately: 110 MiB for either modulation in fp16, and
    145 for each of the others."""
    return [[module.img_mod], [module.txt_mod], [module.attn], [module.img_mlp], [module.txt_mlp]]


def unserved(streams: Sequence[Tensor], temb: Tensor, freqs: Tensor | None, zero: int | None) -> str | None:
    """Why stock must compute the block for these, in words a user understands; None: we can."""
    text, picture = streams
    if text.dtype is not picture.dtype:
        return "the prompt's tokens are of another type than the picture's"
    if temb.ndim != 2 or temb.shape[0] not in ((1, picture.shape[0]) if zero is None else (2 * picture.shape[0],)):
        return "modulation is given for another batch"
    if freqs is None:
        return "no rotations are given"
    return None


class Run(NamedTuple):
    """Tokens of a stream that share shift, scale and gate, [1 or batch, 1, dim] fp16 each: views,
    which the ops read in place."""

    tokens: slice
    shift: Tensor
    scale: Tensor
    gate: Tensor


class Half(NamedTuple):
    """A stream x [batch, tokens, dim] fp16 or fp32, and its own modules.

    first   its first token, among all
    qkv     stock's Linears; norms: of q and k
    before  the runs of its attention; behind: of its feed-forward
    """

    x: Tensor
    first: int
    qkv: Sequence[Any]
    norms: Sequence[Any]
    out: Any
    norm1: Any
    norm2: Any
    mlp: Any
    before: Sequence[Run]
    behind: Sequence[Run]

    def among_all(self, tokens: slice | None = None) -> slice:
        """The places of some of its tokens, or of all of them, among those of both streams."""
        here = slice(0, self.x.shape[1]) if tokens is None else tokens
        return slice(self.first + here.start, self.first + here.stop)


def block(
    module: Any,
    policy: KernelPolicy,
    streams: tuple[Tensor, Tensor],
    mask: Tensor | None,
    temb: Tensor,
    freqs: Tensor | None,
    zero: int | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Stock's QwenImageTransformerBlock.

    streams  of text and picture, [batch, tokens, dim] fp16 or fp32
    mask     added to the scores of the text's tokens, broadcasts to [batch, text tokens]; None: all
             are seen
    temb     input of the modulations, [1 or batch, dim]; with `zero` [2 * batch, dim], the second
             half for the picture's tokens from there on
    freqs    rotations [1 or batch, 1, text and picture tokens, head_dim / 2, 2, 2]
    Returns new streams of text and picture.
    """
    text, picture = (x.contiguous() for x in streams)
    of_picture = within(module.img_mod, modulation, module.img_mod, policy, temb)
    of_text = within(module.txt_mod, modulation, module.txt_mod, policy, temb if zero is None else temb.chunk(2)[0])
    halves = (
        _half(module, "txt", text, 0, of_text, None),
        _half(module, "img", picture, text.shape[1], of_picture, zero),
    )
    new: tuple[Tensor, Tensor] = within(module.attn, see_each_other, module.attn, policy, halves, mask, freqs, options)
    for half, x in reversed(tuple(zip(halves, new, strict=True))):
        within(half.mlp, feed_forward_, half, policy, x)
    return new


def modulation(mod: Any, policy: KernelPolicy, temb: Tensor) -> Tensor:
    """Shift, scale and gate, before the attention and before the feed-forward: [rows, 6 * dim]
    fp16."""
    return product(saturated(functional.silu(temb)).to(HALF), mod[1], policy, saturate=True)


def runs(made: Tensor, tokens: int, zero: int | None) -> Iterator[Run]:
    """The runs of all tokens, for shift, scale and gate side by side, [rows, 3 * dim]."""
    chunks = [part[:, None] for part in made.chunk(3, -1)]
    if zero is None:
        yield Run(slice(0, tokens), *chunks)
        return
    for some, place in zip((slice(0, min(zero, tokens)), slice(min(zero, tokens), tokens)), (0, 1), strict=True):
        if some.stop > some.start:
            yield Run(some, *(part.chunk(2)[place] for part in chunks))


def _half(module: Any, name: str, x: Tensor, first: int, made: Tensor, zero: int | None) -> Half:
    attn, is_text = module.attn, name == "txt"
    qkv = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj) if is_text else (attn.to_q, attn.to_k, attn.to_v)
    norms = (attn.norm_added_q, attn.norm_added_k) if is_text else (attn.norm_q, attn.norm_k)
    out = attn.to_add_out if is_text else attn.to_out[0]
    norm1, norm2, mlp = (getattr(module, f"{name}_{part}") for part in ("norm1", "norm2", "mlp"))
    before, behind = (list(runs(part, x.shape[1], zero)) for part in made.chunk(2, -1))
    return Half(x, first, qkv, norms, out, norm1, norm2, mlp, before, behind)


def see_each_other(
    attn: Any,
    policy: KernelPolicy,
    halves: tuple[Half, Half],
    mask: Tensor | None,
    freqs: Tensor | None,
    options: Options,
) -> tuple[Tensor, ...]:
    """The streams plus the joint attention of their tokens, in new tensors."""
    attended = joint_attention(attn, policy, halves, mask, freqs, options)
    new = tuple(torch.empty_like(half.x) for half in halves)
    for half, out in zip(halves, new, strict=True):
        for run in half.before:
            x, seen = half.x[:, run.tokens], attended[:, half.among_all(run.tokens)]
            product(seen, half.out, policy, residual=x, gate=run.gate, out=out[:, run.tokens], saturate=True)
    return new


def feed_forward_(half: Half, policy: KernelPolicy, new: Tensor) -> None:
    """Add the feed-forward of a stream, as it is behind the attention, to it."""
    for run in half.behind:
        x = new[:, run.tokens]
        normed = Normed(x, run.scale, run.shift, eps=half.norm2.eps)
        first, second = half.mlp.net[0].proj, half.mlp.net[2]
        feed_forward(normed, first, second, policy, residual=x, gate=run.gate, out=x, saturate=True)


def joint_attention(
    attn: Any,
    policy: KernelPolicy,
    halves: tuple[Half, Half],
    mask: Tensor | None,
    freqs: Tensor | None,
    options: Options,
) -> Tensor:
    """The attention of both streams' tokens, text first, before the last products: [batch, tokens,
    dim] fp16."""
    (batch, text_tokens, _), tokens = halves[0].x.shape, halves[1].among_all().stop
    qkv = halves[0].x.new_empty(batch, tokens, 3 * attn.inner_dim, dtype=HALF)
    patches = options.get("patches", {}).get("attn1_patch", ())
    for half in halves:
        for run in half.before:
            normed = Normed(half.x[:, run.tokens], run.scale, run.shift, eps=half.norm1.eps)
            outs = qkv[:, half.among_all(run.tokens)].chunk(3, -1)
            products_(outs, normed, half.qkv, policy, saturate=True)
    q, k, v = qkv.view(batch, tokens, 3, attn.heads, -1).unbind(2)
    for half in halves:
        own = half.among_all()
        # A patch gets q and k before RoPE.
        turn = None if freqs is None or patches else freqs[:, :, own]
        with operands(qkv, policy, *half.norms) as [of_q, of_k]:
            weights = of_q.weight, of_k.weight
            rms_rope_(q[:, own], k[:, own], *weights, turn, eps=half.norms[0].eps, norm="head", policy=policy)
    added = None if mask is None else joint_mask(mask, batch, text_tokens, tokens, qkv)
    q, k, v = (t.movedim(1, 2) for t in (q, k, v))
    if patches:
        q, k, v = _patched(patches, (q, k, v), freqs, mask, {**options, "img_slice": [text_tokens, tokens]})
    out: Tensor = optimized_attention_masked(
        q, k, v, attn.heads, added, transformer_options=options, skip_reshape=True, **told(attn)
    )
    return out


def joint_mask(mask: Tensor, batch: int, text_tokens: int, tokens: int, like: Tensor) -> Tensor:
    """What is added to the scores of each token, [batch, 1, tokens] fp16: the text's own mask, which
    stock makes of the stream's smallest number, and nothing for the picture's."""
    found = like.new_zeros(batch, 1, tokens)
    found[:, 0, :text_tokens] = saturated(mask)
    return found


def _patched(
    patches: Sequence[Any], qkv: Sequence[Tensor], freqs: Tensor | None, mask: Tensor | None, extra: Options
) -> tuple[Tensor, ...]:
    """q, k and v [batch, heads, tokens, head_dim] after other nodes' patches and RoPE. Of the mask
    that a patch returns only the next patch knows, as in stock."""
    q, k, v = (t.contiguous() for t in qkv)
    for patch in patches:
        given = patch(q, k, v, pe=freqs, attn_mask=mask, extra_options=extra)
        q, k, v = (given.get(name, own) for name, own in (("q", q), ("k", k), ("v", v)))
        freqs, mask = given.get("pe", freqs), given.get("attn_mask", mask)
    return apply_rope1(q, freqs).to(HALF), apply_rope1(k, freqs).to(HALF), v.to(HALF)
