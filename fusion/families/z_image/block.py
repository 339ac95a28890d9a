"""A Z-Image block over our kernels: stock's module, whose forward computes the whole block through
our ops.

    x ─ RMS, x (1 + scale) ─ q k v as one product ─ RMSNorm and RoPE in place ─ attention ─ out ─┐
    ┌────────────────────────────────────────────────────────────────────────────────────────────┘
    └─ RMS, x tanh(gate), + x ─┐
    ┌──────────────────────────┘
    └─ RMS, x (1 + scale) ─ silu(w1) x w3 in the product, a few tokens at a time ─ w2 ─┐
    ┌──────────────────────────────────────────────────────────────────────────────────┘
    └─ RMS, x tanh(gate), + x, in place ─ x

The gain of a norm and the modulation of its result are one factor for each channel, made once per
block, so that the kernels read one row. Refiner blocks of the prompt only have gains.

The stream may be fp32: Lumina Image 2, and Z-Image files that stock does not trust in fp16, compute
so on cards without bf16. The products around it are fp16, because their inputs are normalised, and
their outputs are normalised before they are added. Stock clamps values in between, in passes of its
own; here the products saturate. In fp16 the stream itself saturates, too.

x is never written to, because patches between the blocks need a block's input. Changes by other
nodes count as in Wan's blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import comfy.ldm.lumina.model as stock
import torch
from comfy.ldm.modules.attention import optimized_attention_masked
from torch import Tensor, nn

from ....kernels_cuda import STANDARD, KernelPolicy, gated_residual, gated_residual_, rms_rope_
from ...fused.block import AROUND_FP32, FusedBlock, HandBack, fuse_blocks
from ...fused.named_attention import told
from ...stream.block_hooks import within
from ...weights import saturation
from ...weights.normed import Normed, kept_weights
from ...weights.operands import operands
from ...weights.products import gated_feed_forward, product

HALF = torch.float16
# Used if stock's norms of q and k give no eps, as torch does.
EPS = torch.finfo(torch.float32).eps
Segments = Sequence[Sequence[int]]
Options = dict[str, Any]


def fuse(net: nn.Module, _policy: KernelPolicy = STANDARD) -> int:
    """Let the blocks of stock's NextDiT compute through our ops, under the policy that comes with
    each call. In place, and before they are streamed. Returns the number of blocks."""
    return fuse_blocks(net, stock.JointTransformerBlock, _Fused, obstacle)


def obstacle(block: Any) -> str | None:
    """Why a block cannot be ours, in words a user understands."""
    attention = block.attention
    if type(attention) is not stock.JointAttention or not attention.qk_norm:
        return "its attention is of a kind without fused kernels"
    if type(block.feed_forward) is not stock.FeedForward:
        return "its feed-forward is of a kind without fused kernels"
    return None


class _Fused(FusedBlock):
    """Mixed into a block's class, with stock's signature."""

    fusestream_hand_back = HandBack("z-image block")
    fusestream_types = AROUND_FP32

    def fusestream_in_parts(self) -> Sequence[Sequence[nn.Module]]:
        return parts(self)

    def forward(
        self,
        x: Tensor,
        x_mask: Tensor | None,
        freqs_cis: Tensor,
        adaln_input: Tensor | None = None,
        timestep_zero_index: Segments | None = None,
        transformer_options: Options | None = None,
    ) -> Tensor:
        options = {} if transformer_options is None else transformer_options
        policy = self.policy_for(x, options)
        if policy is None:
            out: Tensor = super().forward(  # type: ignore[misc]
                x, x_mask, freqs_cis, adaln_input, timestep_zero_index, transformer_options=options
            )
            return out
        found = block(self, policy, x, x_mask, freqs_cis, adaln_input, timestep_zero_index, options)
        return saturation.look(self, found)


def parts(module: Any) -> list[list[nn.Module]]:
    """The parts of a block that are paged separately: 120 MiB and 225 for Z-Image in fp16."""
    modulated = [module.adaLN_modulation] if module.modulation else []
    attention = [module.attention_norm1, module.attention, module.attention_norm2, *modulated]
    return [attention, [module.ffn_norm1, module.feed_forward, module.ffn_norm2]]


class Run(NamedTuple):
    """Tokens that share scales and gates: [batch, dim] each, or None if a block has none."""

    tokens: slice
    scale: Tensor | None
    gate: Tensor | None
    ffn_scale: Tensor | None
    ffn_gate: Tensor | None


def block(
    module: Any,
    policy: KernelPolicy,
    x: Tensor,
    mask: Tensor | None,
    freqs: Tensor,
    adaln: Tensor | None,
    zero: Segments | None,
    options: Options,
) -> Tensor:
    """Stock's JointTransformerBlock.

    x      [batch, tokens, dim] fp16 or fp32
    freqs  rotations [1 or batch, tokens, 1, head_dim / 2, 2, 2]
    adaln  input of scales and gates: [batch, width], or twice the batch, with the second half for
           the segments `zero`
    Returns a new [batch, tokens, dim].
    """
    x = x.contiguous()
    among = list(runs(module, adaln, zero, x.shape))
    x = within(module.attention, seen_by_itself, module, policy, x, among, mask, freqs, options)
    within(module.feed_forward, feed_forward_, module, policy, x, among)
    return x


def seen_by_itself(
    module: Any,
    policy: KernelPolicy,
    x: Tensor,
    among: Sequence[Run],
    mask: Tensor | None,
    freqs: Tensor,
    options: Options,
) -> Tensor:
    """x plus its self-attention, in a new tensor."""
    attended = self_attention(module, policy, x, among, mask, freqs, options)
    branch = product(attended, module.attention.out, policy, saturate=True)
    del attended
    out = torch.empty_like(x) if len(among) > 1 else None
    for run in among:
        added = factored(branch[:, run.tokens], module.attention_norm2, run.gate, policy, is_gate=True).halves(policy)
        if out is None:
            x = gated_residual(x, added, saturate=True, policy=policy)
        else:
            out[:, run.tokens] = gated_residual(x[:, run.tokens], added, saturate=True, policy=policy)
    return x if out is None else out


def feed_forward_(module: Any, policy: KernelPolicy, x: Tensor, among: Sequence[Run]) -> None:
    """Add the feed-forward of x to x."""
    ffn = module.feed_forward
    for run in among:
        here = x[:, run.tokens]
        normed = factored(here, module.ffn_norm1, run.ffn_scale, policy)
        branch = gated_feed_forward(normed, ffn.w1, ffn.w3, ffn.w2, policy, saturate=True)
        added = factored(branch, module.ffn_norm2, run.ffn_gate, policy, is_gate=True).halves(policy)
        gated_residual_(here, added, saturate=True, policy=policy)


def runs(module: Any, adaln: Tensor | None, zero: Segments | None, shape: Sequence[int]) -> Iterator[Run]:
    """The runs of all tokens: those of the segments `zero`, and the others."""
    everything = slice(0, shape[1])
    if not module.modulation:
        yield Run(everything, None, None, None, None)
        return
    parts = module.adaLN_modulation(adaln).chunk(4, dim=1)
    if zero is None:
        yield Run(everything, *parts)
        return
    for half, segments in enumerate((stock.invert_slices(zero, shape[1]), zero)):
        own = [part.chunk(2)[half] for part in parts]
        for first, last in segments:
            yield Run(slice(first, last), *own)


def factored(x: Tensor, norm: Any, modulation: Tensor | None, policy: KernelPolicy, *, is_gate: bool = False) -> Normed:
    """RMS norm of x [batch, tokens, dim], as fp16: times its gain, and times 1 + a scale or the
    tanh of a gate, [batch, dim]."""
    own = kept_weights(norm, x, policy)
    if modulation is None:
        return Normed(x, weight=own.weight, eps=norm.eps, kind="rms")
    by = torch.tanh(modulation.float()) if is_gate else 1 + modulation.float()
    factors = by * own.matrix.float()
    # Beside fp32 rows the kernels read fp16, and they add one to a scale: of small factors that leaves
    # few digits. A weight has all of its own, and is one for all rows of a batch.
    if x.dtype is torch.float32 and len(factors) == 1:
        return Normed(x, weight=factors[0].to(HALF), eps=norm.eps, kind="rms")
    scale = (factors - 1)[:, None].to(torch.float32 if x.dtype is HALF else HALF)
    return Normed(x, scale, eps=norm.eps, kind="rms")


def self_attention(
    module: Any,
    policy: KernelPolicy,
    x: Tensor,
    among: Sequence[Run],
    mask: Tensor | None,
    freqs: Tensor,
    options: Options,
) -> Tensor:
    """Self-attention of x before the last product: [batch, tokens, dim] fp16."""
    attn, (batch, tokens, _) = module.attention, x.shape
    heads, key_heads, size = attn.n_local_heads, attn.n_local_kv_heads, attn.head_dim
    qkv = x.new_empty(batch, tokens, (heads + 2 * key_heads) * size, dtype=HALF)
    for run in among:
        normed = factored(x[:, run.tokens], module.attention_norm1, run.scale, policy)
        product(normed, attn.qkv, policy, out=qkv[:, run.tokens])
    q, k, v = qkv.view(batch, tokens, -1, size).split_with_sizes((heads, key_heads, key_heads), dim=2)
    eps = EPS if attn.q_norm.eps is None else attn.q_norm.eps
    with operands(qkv, policy, attn.q_norm, attn.k_norm) as [of_q, of_k]:
        rms_rope_(q, k, of_q.weight, of_k.weight, freqs, eps=eps, norm="head", policy=policy)
    # Another node's attention gets as many keys and values as queries.
    if heads > key_heads:
        k, v = (t.repeat_interleave(heads // key_heads, 2) for t in (k, v))
    out: Tensor = optimized_attention_masked(
        *(t.movedim(1, 2) for t in (q, k, v)), heads, mask, skip_reshape=True, transformer_options=options, **told(attn)
    )
    return out
