"""A MiniMax H3 block over our kernels: stock's module, whose forward computes the whole block
through our ops.

    x ─ RMS, modulate ─ q k v as one product ─ RMSNorm of heads, RoPE in place ─ attention ─┐
    ┌───────────────────────────────────────────────────────────────────────────────────────┘
    └─ out, gate, + x ─ RMS, modulate ─ silu(gate) x up in the product ─ out, gate, + x ─ x

All tokens are one row of segments (prompt, references, sound, video), and a segment has its own row
of shifts, scales and gates. Norms and products run once per segment, on slices, and the attention
once for all.

The stream overflows fp16, and stock computes it in bf16 or fp32. Here it is fp32, and the products
around it are fp16 or the file's integers, because their inputs are normalised: gates multiply and
the stream adds fp32 sums. Hidden values are stored times 2^-6, as in text encoders
(`weights/fp32_residual.py`), and saturate at 4 million. Whether published weights come near to that
is not known. An fp16 stream saturates, too.

x is written to, as by stock. Changes by other nodes count as in Wan's blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import comfy.ldm.minimax.model as stock
import torch
from comfy.ldm.modules.attention import optimized_attention
from torch import Tensor, nn
from torch.nn import functional

from ....kernels_cuda import STANDARD, KernelPolicy, rms_rope_
from ....kernels_cuda.ops.views.half_range import saturated
from ...fused.block import AROUND_FP32, FusedBlock, HandBack, fuse_blocks
from ...stream.block_hooks import within
from ...weights import saturation
from ...weights.fp32_residual import HIDDEN_SCALE
from ...weights.normed import Normed, kept_weights
from ...weights.operands import operands
from ...weights.products import feed_forward, product

HALF = torch.float16
Segments = Sequence[Sequence[int]]
Options = dict[str, Any]


def fuse(net: nn.Module, _policy: KernelPolicy = STANDARD) -> int:
    """Let the blocks of stock's MiniMax H3 compute through our ops, under the policy that comes
    with each call. In place, and before they are streamed. Returns the number of blocks."""
    return fuse_blocks(net, stock.DiTBlock, _Fused, obstacle)


def obstacle(block: Any) -> str | None:
    """Why a block cannot be ours, in words a user understands."""
    if type(block.attn) is not stock.Attention:
        return "its attention is of a kind without fused kernels"
    if type(block.mlp) is not stock.MLP:
        return "its feed-forward is of a kind without fused kernels"
    if type(block.adaln_proj) is not stock.AdalnProj:
        return "its modulation is of a kind without fused kernels"
    return None


class _Fused(FusedBlock):
    """Mixed into a block's class, with stock's signature."""

    fusestream_hand_back = HandBack("minimax-h3 block")
    fusestream_types = AROUND_FP32

    def fusestream_in_parts(self) -> Sequence[Sequence[nn.Module]]:
        return parts(self)

    def forward(
        self,
        x: Tensor,
        t_emb: Tensor,
        mod_segments: Segments,
        rope_freqs: Tensor | None,
        transformer_options: Options | None = None,
    ) -> Tensor:
        options = {} if transformer_options is None else transformer_options
        policy = self.policy_for(x, options)
        if policy is not None:
            module: Any = self
            reason = unserved(x.shape[0], mod_segments, t_emb.shape[0] * module.adaln_proj.modalities)
            if reason is None:
                found = block(self, policy, x, t_emb, mod_segments, rope_freqs, options)
                return saturation.look(self, found)
            self.fusestream_hand_back(reason, x, forced=policy.default == "on")
        out: Tensor = super().forward(  # type: ignore[misc]
            x, t_emb, mod_segments, rope_freqs, transformer_options=options
        )
        return out


def parts(module: Any) -> list[list[nn.Module]]:
    """The parts of a block that are paged separately, in fp16: 500 MiB of modulation, which a
    pruned file does not have, 290 and 440."""
    return [[module.adaln_proj], [module.norm1, module.attn], [module.norm2, module.mlp]]


def unserved(tokens: int, segments: Segments, rows: int) -> str | None:
    """Why stock must compute a block of so many tokens, in words a user understands; None: we can.
    rows: of shifts, scales and gates."""
    at = 0
    for first, last, row in segments:
        if first != at or last < first:
            return "modulation is given for some of the tokens only"
        if not 0 <= row < rows:
            return "modulation is given for another number of segments"
        at = last
    return None if at == tokens else "modulation is given for some of the tokens only"


class Modulation(NamedTuple):
    """Before the attention or before the feed-forward, [rows, dim] each."""

    shift: Tensor
    scale: Tensor
    gate: Tensor


class Run(NamedTuple):
    """Tokens that share shift, scale and gate, [1, 1, dim] each. The gain of the norm is part of
    the scale."""

    tokens: slice
    shift: Tensor
    scale: Tensor
    gate: Tensor


def block(
    module: Any,
    policy: KernelPolicy,
    x: Tensor,
    t_emb: Tensor,
    segments: Segments,
    freqs: Tensor | None,
    options: Options,
) -> Tensor:
    """Stock's DiTBlock.

    x         [tokens, dim] fp16 or fp32, written to
    t_emb     input of the modulation, [timesteps, width]
    segments  (first, last, row) that cover all tokens
    freqs     rotations [1, tokens, 1, part / 2, 2, 2] of the first part of each head; None: none
    """
    x = x.contiguous()
    stream = x[None]
    own = within(module.adaln_proj, modulation, module.adaln_proj, policy, t_emb)
    within(module.attn, add_attention, module, policy, stream, own[0], segments, freqs, options)
    within(module.mlp, add_feed_forward, module, policy, stream, own[1], segments)
    return x


def modulation(proj: Any, policy: KernelPolicy, t_emb: Tensor) -> tuple[Modulation, Modulation]:
    """Of the attention and of the feed-forward. A pruned file has a few columns in fp32, which
    stock multiplies."""
    if proj.apply_silu:
        made = product(saturated(functional.silu(t_emb)).to(HALF), proj.linear, policy, saturate=True)
        chunks = made.view(-1, proj.expand * proj.hidden).chunk(proj.expand, dim=-1)
    else:
        chunks = proj(t_emb)
    return Modulation(*chunks[:3]), Modulation(*chunks[3:])


def runs(norm: Any, x: Tensor, own: Modulation, segments: Segments, policy: KernelPolicy) -> list[Run]:
    """The runs of all tokens of x [1, tokens, dim]; neighbours that share a row are one."""
    gain = kept_weights(norm, x, policy).matrix.float()
    # The kernels read fp32 beside fp16 rows, and fp16 beside fp32 rows; they add one to a scale.
    kind = torch.float32 if x.dtype is HALF else HALF
    scales = saturated((1 + own.scale.float()) * gain - 1).to(kind)
    shifts, gates = saturated(own.shift.float()).to(kind), saturated(own.gate.float()).to(HALF)
    joined: list[tuple[int, int, int]] = []
    for first, last, row in segments:
        if last > first:
            begun = joined.pop()[0] if joined and joined[-1][2] == row else first
            joined.append((begun, last, row))
    return [
        Run(slice(first, last), *(part[None, row : row + 1] for part in (shifts, scales, gates)))
        for first, last, row in joined
    ]


def add_attention(
    module: Any,
    policy: KernelPolicy,
    x: Tensor,
    own: Modulation,
    segments: Segments,
    freqs: Tensor | None,
    options: Options,
) -> None:
    """Add the attention of x [1, tokens, dim] to x."""
    among = runs(module.norm1, x, own, segments, policy)
    attended = self_attention(module, policy, x, among, freqs, options)
    for run in among:
        here, seen = x[:, run.tokens], attended[:, run.tokens]
        product(seen, module.attn.out_proj, policy, residual=here, gate=run.gate, out=here, saturate=True)


def add_feed_forward(module: Any, policy: KernelPolicy, x: Tensor, own: Modulation, segments: Segments) -> None:
    """Add the feed-forward of x [1, tokens, dim] to x."""
    for run in runs(module.norm2, x, own, segments, policy):
        here = x[:, run.tokens]
        feed_forward(
            Normed(here, run.scale, run.shift, kind="rms", eps=module.norm2.eps),
            module.mlp.fc1,
            module.mlp.fc2,
            policy,
            gated=True,
            hidden_scale=HIDDEN_SCALE,
            residual=here,
            gate=run.gate,
            out=here,
            saturate=True,
        )


def self_attention(
    module: Any, policy: KernelPolicy, x: Tensor, among: Sequence[Run], freqs: Tensor | None, options: Options
) -> Tensor:
    """Self-attention of x before the last product: [1, tokens, heads * head_dim] fp16."""
    attn, tokens = module.attn, x.shape[1]
    qkv = x.new_empty(1, tokens, 3 * attn.heads * attn.head_dim, dtype=HALF)
    for run in among:
        normed = Normed(x[:, run.tokens], run.scale, run.shift, kind="rms", eps=module.norm1.eps)
        product(normed, attn.qkv_proj, policy, out=qkv[:, run.tokens], saturate=True)
    q, k, v = qkv.view(1, tokens, 3, attn.heads, attn.head_dim).unbind(2)
    eps = attn.q_norm.eps
    with operands(qkv, policy, attn.q_norm, attn.k_norm) as [of_q, of_k]:
        rms_rope_(q, k, of_q.weight, of_k.weight, eps=eps, norm="head", policy=policy)
    if freqs is not None:
        some = slice(0, 2 * freqs.shape[-3])
        rms_rope_(q[..., some], k[..., some], None, None, freqs, eps=eps, norm="none", interleaved=False, policy=policy)
    out: Tensor = optimized_attention(
        *(t.transpose(1, 2) for t in (q, k, v)),
        attn.heads,
        mask=None,
        skip_reshape=True,
        transformer_options=options,
    )
    return out
