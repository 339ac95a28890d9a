"""An LTX-2 block over our kernels: stock's module of two streams, a video's and its sound's, whose
forward computes the whole block through our ops.

    video  ─ itself ─ text ─┬─────── sound ─┬─ feed-forward ─ video
    sound  ─ itself ─ text ─┴─ video ───────┴─ feed-forward ─ sound

    itself, text, sound, video:
        x ─ RMS, modulate ─ q k v, gates ─ RMSNorm and RoPE in place ─ attention ─ gates of heads ─┐
        ┌──────────────────────────────────────────────────────────────────────────────────────────┘
        └─ out, gate, + x, in place ─ x
    feed-forward:
        x ─ RMS, modulate ─ a few tokens at a time, GELU in the product, gate, + x, in place ─ x

Stock knows no fp16 for it: on a card without bf16 both streams are fp32, with numbers that fp16
does not hold. The products around them are fp16, because their inputs are normalised; gates and sums
are the products' own, in fp32. A stream in fp16 saturates.

Streams are written where they lie, as stock does. Either looks at the other as both are before: so
what the sound sees is computed before the video is written.

Modulation is of the whole clip, of a frame or of a token. Where stock has it for frames, in its
`CompressedTimestep`, the ops spread it over the tokens; stock makes rows of all tokens of it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import comfy.ldm.lightricks.av_model as stock
import comfy.ldm.lightricks.model as layers
import comfy.ldm.modules.attention
import torch
from torch import Tensor, nn
from torch.nn import functional

from ....kernels_cuda import STANDARD, KernelPolicy, rms_rope_
from ....kernels_cuda.ops.matmul.mlp import CHUNK_BYTES
from ....kernels_cuda.ops.views.half_range import saturated
from ...base.hooks import PIECES
from ...fused.attention import is_anothers
from ...fused.block import AROUND_FP32, FusedBlock, HandBack, fuse_blocks
from ...fused.named_attention import told
from ...stream.block_hooks import within
from ...weights import saturation
from ...weights.fp32_products import MULTIPLE, mask_of_halves
from ...weights.normed import Normed
from ...weights.operands import operands
from ...weights.products import Input, feed_forward, product, products

HALF = torch.float16
EPS = 1e-6  # of stock's rms_norm, where none is given
ATTENTIONS = ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
Options = dict[str, Any]
Turns = tuple[Tensor, bool]  # stock's rotations, and whether a head's halves turn together


def fuse(net: nn.Module, _policy: KernelPolicy = STANDARD) -> int:
    """Let the blocks of stock's LTXAVModel compute through our ops, under the policy that comes with
    each call. In place, and before they are streamed. Returns the number of blocks."""
    return fuse_blocks(net, stock.BasicAVTransformerBlock, _Fused, obstacle)


def obstacle(block: Any) -> str | None:
    """Why a block cannot be ours, in words a user understands."""
    if any(type(getattr(block, name)) is not layers.CrossAttention for name in ATTENTIONS):
        return "its attention is of a kind without fused kernels"
    if any(type(one) is not layers.FeedForward or len(one.net) != 3 for one in (block.ff, block.audio_ff)):
        return "its feed-forward is of a kind without fused kernels"
    return None


class Given(NamedTuple):
    """The arguments of stock's forward, but the streams and the options, under its names."""

    v_context: Any = None
    a_context: Any = None
    attention_mask: Any = None
    v_timestep: Any = None
    a_timestep: Any = None
    v_pe: Any = None
    a_pe: Any = None
    v_cross_pe: Any = None
    a_cross_pe: Any = None
    v_cross_scale_shift_timestep: Any = None
    a_cross_scale_shift_timestep: Any = None
    v_cross_gate_timestep: Any = None
    a_cross_gate_timestep: Any = None
    self_attention_mask: Any = None
    v_prompt_timestep: Any = None
    a_prompt_timestep: Any = None


class _Fused(FusedBlock):
    """Mixed into a block's class, with stock's signature."""

    fusestream_hand_back = HandBack("ltx-2 block")
    fusestream_types = AROUND_FP32

    def fusestream_in_parts(self) -> Sequence[Sequence[nn.Module]]:
        return parts(self)

    def forward(
        self,
        x: tuple[Tensor, Tensor],
        v_context: Any = None,
        a_context: Any = None,
        attention_mask: Any = None,
        v_timestep: Any = None,
        a_timestep: Any = None,
        v_pe: Any = None,
        a_pe: Any = None,
        v_cross_pe: Any = None,
        a_cross_pe: Any = None,
        v_cross_scale_shift_timestep: Any = None,
        a_cross_scale_shift_timestep: Any = None,
        v_cross_gate_timestep: Any = None,
        a_cross_gate_timestep: Any = None,
        transformer_options: Options | None = None,
        self_attention_mask: Any = None,
        v_prompt_timestep: Any = None,
        a_prompt_timestep: Any = None,
    ) -> tuple[Tensor, Tensor]:
        options = {} if transformer_options is None else transformer_options
        given = Given(
            v_context,
            a_context,
            attention_mask,
            v_timestep,
            a_timestep,
            v_pe,
            a_pe,
            v_cross_pe,
            a_cross_pe,
            v_cross_scale_shift_timestep,
            a_cross_scale_shift_timestep,
            v_cross_gate_timestep,
            a_cross_gate_timestep,
            self_attention_mask,
            v_prompt_timestep,
            a_prompt_timestep,
        )
        policy = self.policy_for(x[0], options)
        if policy is not None and x[1].dtype is not x[0].dtype:
            self.fusestream_hand_back("its streams are of two types", x[1], forced=policy.default == "on")
            policy = None
        if policy is None:
            out: tuple[Tensor, Tensor] = super().forward(x, transformer_options=options, **given._asdict())  # type: ignore[misc]
            return out
        video, sound = block(self, policy, *x, given, options)
        return saturation.look(self, video), sound


def parts(module: Any) -> list[list[nn.Module]]:
    """The parts of a block that are paged separately: for LTX-2.3 in fp16 128 MiB twice, 160, and 320
    of both feed-forwards."""
    of_sound = [module.audio_attn1, module.audio_attn2, module.audio_to_video_attn, module.video_to_audio_attn]
    return [[module.attn1], [module.attn2], of_sound, [module.ff, module.audio_ff]]


def block(
    module: Any, policy: KernelPolicy, video: Tensor, sound: Tensor, given: Given, options: Options
) -> tuple[Tensor, Tensor]:
    """Stock's BasicAVTransformerBlock.

    video  [batch, tokens, dim] fp16 or fp32, written where it lies
    sound  [batch, its tokens, its dim], of the same type; none: a video without sound
    Returns both.
    """
    has_sound = sound.numel() > 0
    run_video = options.get("run_vx", True)
    run_sound = options.get("run_ax", True) and has_sound
    to_video = run_video and options.get("a2v_cross_attn", True) and has_sound
    to_sound = run_sound and options.get("v2a_cross_attn", True)
    video, sound = video.contiguous(), sound.contiguous()
    of_video = Stream(module, policy, options, "", video, given.v_timestep)
    of_sound = Stream(module, policy, options, "audio_", sound, given.a_timestep)
    if run_video:
        of_video.sees_itself_(given.v_pe, given.self_attention_mask)
        of_video.sees_text_(given.v_context, given.v_prompt_timestep, given.attention_mask)
    if run_sound:
        of_sound.sees_itself_(given.a_pe, None)
        of_sound.sees_text_(given.a_context, given.a_prompt_timestep, given.attention_mask)
    if to_video or to_sound:
        _see_each_other_(of_video, of_sound, given, to_video=to_video, to_sound=to_sound)
    if run_video:
        of_video.fed_forward_()
    if run_sound:
        of_sound.fed_forward_()
    return video, sound


class Stream(NamedTuple):
    """One of a block's two streams, and what its parts are called by: `name` begins them."""

    module: Any
    policy: KernelPolicy
    options: Options
    name: str
    x: Tensor
    timestep: Any

    def part(self, name: str) -> Any:
        """A part of the block, or None."""
        return getattr(self.module, f"{self.name}{name}", None)

    def modulation(self, rows: slice) -> Sequence[Tensor]:
        """Rows of the stream's table, for its timestep: [batch, 1, frames or tokens, dim] each."""
        return modulation(self.module, self.part("scale_shift_table"), self.x, self.timestep, rows)

    def sees_itself_(self, pe: Turns | None, mask: Any) -> None:
        """Add the stream's attention to itself, in place."""
        shift, scale, gate = self.modulation(slice(0, 3))
        normed = Normed(self.x, *beside(scale, shift), eps=EPS, kind="rms")
        within(self.part("attn1"), self._attends_, self.part("attn1"), normed, None, gate, pe, None, mask)

    def sees_text_(self, context: Tensor, timestep: Any, mask: Any) -> None:
        """Add the stream's attention to the text, in place. Where both are modulated, the text is for
        its own timestep."""
        attn, scale, shift, gate = self.part("attn2"), None, None, None
        if self.module.cross_attention_adaln:
            shift, scale, gate = self.modulation(slice(6, 9))
            rows = self.part("prompt_scale_shift_table").shape[0]
            text_shift, text_scale = modulation(
                self.module, self.part("prompt_scale_shift_table"), context, timestep, slice(rows)
            )
            context = torch.addcmul(text_shift, context, 1 + text_scale)
        normed = Normed(self.x, *beside(scale, shift), eps=EPS, kind="rms")
        within(attn, self._attends_, attn, normed, halves(context), gate, None, None, mask)

    def fed_forward_(self) -> None:
        """Add the stream's feed-forward, in place."""
        shift, scale, gate = self.modulation(slice(3, 6))
        normed = Normed(self.x, *beside(scale, shift), eps=EPS, kind="rms")
        ffn, pieces = self.part("ff"), self.options.get(PIECES, CHUNK_BYTES)
        within(ffn, _fed_forward_, ffn, normed, self.policy, self.x, gate, pieces)

    def _attends_(
        self,
        attn: Any,
        x: Input,
        context: Input | None,
        gate: Tensor | None,
        pe: Turns | None,
        k_pe: Turns | None,
        mask: Any,
    ) -> None:
        attended = attention(attn, self.policy, x, context, pe, k_pe, mask, self.options)
        self.added_(attn, attended, gate)

    def added_(self, attn: Any, attended: Tensor, gate: Tensor | None) -> None:
        """Add what an attention has seen, [batch, tokens, heads * size] fp16, times a gate, in place."""
        product(attended, attn.to_out[0], self.policy, residual=self.x, gate=gate, out=self.x, saturate=True)


def _fed_forward_(ffn: Any, normed: Normed, policy: KernelPolicy, x: Tensor, gate: Tensor, pieces: int) -> None:
    first, _, second = ffn.net
    feed_forward(
        normed,
        first.proj,
        second,
        policy,
        residual=x,
        gate=gate,
        out=x,
        saturate=True,
        pieces=pieces,
    )


def _see_each_other_(video: Stream, sound: Stream, given: Given, *, to_video: bool, to_sound: bool) -> None:
    """Add the video's attention to the sound, and the sound's to the video, in place: of both as they
    are before."""
    module = video.module
    tables = module.scale_shift_table_a2v_ca_video, module.scale_shift_table_a2v_ca_audio
    times = given.v_cross_scale_shift_timestep, given.a_cross_scale_shift_timestep
    pes = given.v_cross_pe, given.a_cross_pe

    def normed(rows: slice) -> list[Normed]:
        """Both streams, modulated by two of the four rows of their tables, scale first."""
        made = []
        for stream, table, time in zip((video, sound), tables, times, strict=True):
            scale, shift = modulation(module, table[:4], stream.x, time, rows)
            made.append(Normed(stream.x, *beside(scale, shift), eps=EPS, kind="rms"))
        return made

    def gate(table: Tensor, stream: Stream, time: Any) -> Tensor:
        return modulation(module, table[4:], stream.x, time, slice(0, 1))[0]

    a2v, v2a = module.audio_to_video_attn, module.video_to_audio_attn
    seen = heard = None
    if to_video:
        x, context = normed(slice(0, 2))
        heard = within(a2v, attention, a2v, video.policy, x, context, *pes, None, video.options)
    if to_sound:
        context, x = normed(slice(2, 4))
        seen = within(v2a, attention, v2a, video.policy, x, context, *pes[::-1], None, video.options)
    if heard is not None:
        within(a2v, video.added_, a2v, heard, gate(tables[0], video, given.v_cross_gate_timestep))
    if seen is not None:
        within(v2a, sound.added_, v2a, seen, gate(tables[1], sound, given.a_cross_gate_timestep))


# ------------------------------------------------------------------------------------------------------- modulation


def modulation(module: Any, table: Tensor, x: Tensor, timestep: Any, rows: slice) -> Sequence[Tensor]:
    """Rows of a table [rows, dim] plus a timestep's embedding, as [batch, 1, frames or tokens, dim]
    views, which the ops read in place.

    timestep  [batch, 1 or tokens, rows * dim], or stock's `CompressedTimestep`, of frames
    """
    if isinstance(timestep, stock.CompressedTimestep) and timestep.patches_per_frame != 1:
        timestep = stock.CompressedTimestep(timestep.data, 1, per_frame=True)  # of rows that stock does not repeat
    found: Sequence[Tensor] = module.get_ada_values(table, x.shape[0], timestep, rows)
    return found


def beside(scale: Tensor | None, shift: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Scale and shift as the norms' kernels read them: fp16 beside fp32 rows."""
    return (None if scale is None else halves(scale)), (None if shift is None else halves(shift))


def halves(x: Tensor) -> Tensor:
    """x as fp16; what is too large for it saturates."""
    return x if x.dtype is HALF else saturated(x).to(HALF)


# -------------------------------------------------------------------------------------------------------- attention


def attention(
    attn: Any,
    policy: KernelPolicy,
    x: Input,
    context: Input | None,
    pe: Turns | None,
    k_pe: Turns | None,
    mask: Any,
    options: Options,
) -> Tensor:
    """Stock's CrossAttention before its last product: [batch, tokens, heads * size] fp16.

    x, context  [batch, tokens, dim] fp16; None: x sees itself
    pe          rotations of q, and of k where it has none of its own
    mask        as stock makes it
    """
    of_heads, logits = attn.to_gate_logits, None
    if of_heads is not None and attn.heads % MULTIPLE:  # no published model has so few
        x = x if isinstance(x, Tensor) else x.halves(policy)
        with operands(x, policy, of_heads) as [own]:
            logits = functional.linear(x, own.matrix, own.bias)
    gates = () if of_heads is None or logits is not None else (of_heads,)
    if context is None:
        q, k, v, *more = products(x, (attn.to_q, attn.to_k, attn.to_v, *gates), policy)
    else:
        q, *more = products(x, (attn.to_q, *gates), policy)
        k, v = products(context, (attn.to_k, attn.to_v), policy)
    logits = more[0] if more else logits
    q4, k4 = (one.view(*one.shape[:2], attn.heads, attn.dim_head) for one in (q, k))
    with operands(q, policy, attn.q_norm, attn.k_norm) as [of_q, of_k]:
        rms_rope_(q4, k4, of_q.weight, of_k.weight, eps=attn.q_norm.eps, policy=policy)
    q, k = turned(q, k, pe, k_pe, policy)
    attended = _attend(attn, q, k, v, mask, options)
    del q, k, v, q4, k4
    if logits is not None:
        by = logits.sigmoid().mul_(2)[..., None]
        apart = attended.view(*attended.shape[:2], attn.heads, attn.dim_head)
        attended = (apart * by if is_anothers(options) else apart.mul_(by)).flatten(2)
    return attended


def turned(q: Tensor, k: Tensor, pe: Turns | None, k_pe: Turns | None, policy: KernelPolicy) -> tuple[Tensor, Tensor]:
    """q and k [batch, tokens, heads * size] after RoPE, in place where their tokens are adjacent. Heads
    turn differently, so a head is a token to the op."""
    if pe is None:
        return q, k
    q, k = q.contiguous(), k.contiguous()
    if k_pe is None and q.shape == k.shape:
        _turn_(pe, policy, q, k)
    else:
        _turn_(pe, policy, q)
        _turn_(pe if k_pe is None else k_pe, policy, k)
    return q, k


def _turn_(pe: Turns, policy: KernelPolicy, *xs: Tensor) -> None:
    table, of_halves = pe  # [1 or batch, tokens, heads, size / 2, 2, 2]
    heads, size = table.shape[2], 2 * table.shape[3]
    views = [x.view(x.shape[0], x.shape[1] * heads, 1, size) for x in xs]
    q, k = views if len(views) == 2 else (views[0], None)
    rms_rope_(q, k, rotation=table.flatten(1, 2), eps=0.0, norm="none", interleaved=not of_halves, policy=policy)


def _attend(attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: Options) -> Tensor:
    """Attention by stock's function, which asks the overrides; ours is one of them."""
    others = {"attn_precision": attn.attn_precision, "transformer_options": options, **told(attn)}
    if isinstance(mask, layers.GuideAttentionMask):
        return layers._attention_with_guide_mask(  # type: ignore[no-any-return]
            q, k, v, attn.heads, of_guides(mask), attn.attn_precision, options
        )
    if mask is not None:
        others["mask"] = mask_of_halves(mask)
    out: Tensor = comfy.ldm.modules.attention.optimized_attention(q, k, v, attn.heads, **others)
    return out


def of_guides(mask: Any) -> Any:
    """The same of stock's two masks for a video with guides."""
    found = copy.copy(mask)
    found.noisy_mask, found.tracked_mask = mask_of_halves(mask.noisy_mask), mask_of_halves(mask.tracked_mask)
    return found
