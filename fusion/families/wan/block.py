"""A Wan block over our kernels: stock's module, whose forward computes the whole block through our
ops.

    x ─ norm, modulate ─ q k v ─ RMSNorm and RoPE in place ─ attention ─ o, gate, + x ─┐
    ┌──────────────────────────────────────────────────────────────────────────────────┘
    ├─ norm ─ q │ text ─ k v as one product ─ RMSNorm in place ─ attention ─ o, + x, in place ─┐
    ┌──────────────────────────────────────────────────────────────────────────────────────────┘
    └─ norm, modulate ─ ffn, a few tokens at a time, GELU in the product, gate, + x, in place ─ x

Activations, in units of x [batch, tokens, dim] in fp16: x itself (the caller has it), q, k, v and
the attention's output, five at the peak. The ffn's hidden values never take more than 256 MiB, or
64 if VRAM is short. Stock's block needs about nine. All these tensors have the size of x, so that
torch's allocator can reuse the memory of one for another. Packed, q k v would need three units in
one piece, which at 720p is 2.2 GiB and not free any more. For few tokens q k v are packed, because
memory is no problem and one product is faster than three. Under `turbo` the 8-bit input of q, k and
v is made in pieces of 64 MiB. x is never written to, because VACE's side branch needs the input of
the first block.

If two blocks do not fit on the card, the three rows above are paged one by one
(`stream/segments.py`). The second row's k and v are the same at every step: if part of the model
streams they are kept, and their weights are only copied for a new text.

Attention that was trained sparse (`trained_sparse.py`) has a projection of each head, or one product
more of what q, k and v are products of.

Changes by other nodes count: attention goes through stock's function and so through any override,
patches on the attentions are called with the tensors that they expect, and a block is stock's if
another node has replaced a part of it. So is a block of another kind (HuMo, causal Wan), or one
that does not compute in fp16. The ledger has the reason.

The block's class is replaced by a subclass of the same name, so a node that replaces `forward`, or
calls a block through stock's block hook, finds everything in its place.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import comfy.ldm.wan.model
import comfy.model_management
import torch
from comfy.ldm.modules.attention import optimized_attention
from torch import Tensor, nn

from ....kernels_cuda import STANDARD, KernelPolicy, rms_rope_
from ....kernels_cuda.ops.matmul.mlp import CHUNK_BYTES
from ...base.hooks import BLOCK_PARTS, PIECES
from ...fused.attention import is_anothers
from ...fused.block import FusedBlock, HandBack, fuse_block
from ...fused.named_attention import told
from ...stream.block_hooks import of_text, within
from ...stream.text_kv import OfText
from ...weights.normed import Normed, kept_weights
from ...weights.operands import operands
from ...weights.products import feed_forward, product, products
from .cost import TEXT_TOKENS
from .trained_sparse import as_learned, gate_of, learn

Block = comfy.ldm.wan.model.WanAttentionBlock
VaceBlock = comfy.ldm.wan.model.VaceWanAttentionBlock
SelfAttention = comfy.ldm.wan.model.WanSelfAttention
TextAttention = comfy.ldm.wan.model.WanT2VCrossAttention
ImageAttention = comfy.ldm.wan.model.WanI2VCrossAttention
Options = dict[str, Any]
PICTURE_TOKENS = 257  # of a picture from CLIP
# Switches of torch's products, which other nodes set, and which change keys and values.
SWITCHES = ("allow_fp16_accumulation", "allow_fp16_reduced_precision_reduction")

HAND_BACK = HandBack("wan block", "fused ops", "this model", "compute its blocks", "stock's block")


def fuse(net: nn.Module, _policy: KernelPolicy = STANDARD) -> int:
    """Let the standard blocks of stock's WanModel compute through our ops, under the policy that
    comes with each call (`attention.install`). In place, and before the blocks are streamed.
    Returns the number of blocks."""
    fused = 0
    for module in list(net.modules()):
        kind: Any = type(module)
        if kind in (Block, VaceBlock):
            fuse_block(module, _FusedVace if kind is VaceBlock else _Fused, obstacle(module))
            learn(module)
            fused += 1
    return fused


def obstacle(block: Any) -> str | None:
    """Why a standard block cannot be ours, in words a user understands."""
    if type(block.self_attn) is not SelfAttention or type(block.cross_attn) not in (TextAttention, ImageAttention):
        return "its attention is of a kind without fused kernels"
    return None


class _Fused(FusedBlock):
    """Mixed into a block's class, with stock's signature."""

    fusestream_hand_back = HAND_BACK

    def fusestream_in_parts(self) -> Sequence[Sequence[nn.Module]]:
        return parts(self)

    def fusestream_of_text(self) -> OfText | None:
        return seeing_text(self)

    def forward(
        self,
        x: Tensor,
        e: Tensor,
        freqs: Tensor,
        context: Tensor,
        context_img_len: int | None = 257,
        transformer_options: Options | None = None,
    ) -> Tensor:
        options = {} if transformer_options is None else transformer_options
        policy = self.policy_for(x, options)
        if policy is None:
            out: Tensor = super().forward(x, e, freqs, context, context_img_len, transformer_options=options)  # type: ignore[misc]
            return out
        return block(self, policy, x, e, freqs, context, context_img_len, options)


class _FusedVace(FusedBlock):
    """The same for a block of VACE's side branch, which has a product before it (only the first
    block) and one after it."""

    fusestream_hand_back = HAND_BACK

    def fusestream_in_parts(self) -> Sequence[Sequence[nn.Module]]:
        first, *others, last = parts(self)
        module: Any = self
        return [[module.before_proj, *first] if module.block_id == 0 else first, *others, [*last, module.after_proj]]

    def fusestream_of_text(self) -> OfText | None:
        return seeing_text(self)

    def forward(self, c: Tensor, x: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        options = arguments.get("transformer_options") or {}
        policy = self.policy_for(c, options)
        if policy is None:
            out: tuple[Tensor, Tensor] = super().forward(c, x, **arguments)  # type: ignore[misc]
            return out
        module: Any = self
        if module.block_id == 0:
            before = module.before_proj
            c = within(before, product, c.contiguous(), before, policy, residual=x.contiguous())
        c = block(
            self,
            policy,
            c,
            arguments["e"],
            arguments["freqs"],
            arguments["context"],
            arguments.get("context_img_len", 257),
            options,
        )
        return within(module.after_proj, product, c, module.after_proj, policy), c


# ----------------------------------------------------------------------------------------------------------- the block


def parts(module: Any) -> list[list[nn.Module]]:
    """The parts of a block that are paged separately: 200 MiB, 200 and 270 for 14B in fp16."""
    return [[*gate_of(module.self_attn), module.self_attn], [module.norm3, module.cross_attn], [module.ffn]]


def seeing_text(module: Any) -> OfText | None:
    """The part of a block that only texts and pictures pass through, 100 MiB for 14B in fp16; None:
    the block is stock's permanently."""
    if module.__dict__[BLOCK_PARTS].is_stocks:
        return None
    attn = module.cross_attn
    names, tokens = ["k", "v", "norm_k"], TEXT_TOKENS
    if isinstance(attn, ImageAttention):
        names, tokens = [*names, "k_img", "v_img", "norm_k_img"], TEXT_TOKENS + PICTURE_TOKENS
    return OfText(attn, [getattr(attn, name) for name in names], tokens * attn.dim * torch.float16.itemsize)


def block(
    module: Any,
    policy: KernelPolicy,
    x: Tensor,
    e: Tensor,
    freqs: Tensor,
    context: Tensor,
    context_img_len: int | None,
    options: Options,
) -> Tensor:
    """Stock's WanAttentionBlock.

    x        [batch, tokens, dim] fp16
    e        [batch, 6, dim], or [batch, frames, 6, dim]: shift, scale and gate of the
             self-attention, then of the ffn
    freqs    rotations [1 or batch, tokens, 1, head_dim / 2, 2, 2]
    context  [batch, picture and text tokens, dim]; the first `context_img_len` are the picture's
    Returns a new [batch, tokens, dim].
    """
    x = x.contiguous()
    shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = modulation(module, e, x)
    x = within(module.self_attn, seen_by_itself, module, policy, x, shift, scale, gate, freqs, options)
    x = within(module.cross_attn, seen_by_text, module, policy, x, context, context_img_len, options)
    patches = options.get("patches", {}).get("attn2_patch", ())
    for patch in patches:
        x = patch({"x": x, "transformer_options": options})
    if patches:
        x = x.clone()  # a patch may keep what it was given, or what it gave
    out: Tensor = within(module.ffn, fed_forward, module, policy, x, ffn_shift, ffn_scale, ffn_gate, options)
    return out


def modulation(module: Any, e: Tensor, x: Tensor) -> Sequence[Tensor]:
    """Shift, scale and gate, twice: six views [batch, 1 or frames, dim], which the ops read in
    place."""
    own = comfy.model_management.cast_to(module.modulation, dtype=x.dtype, device=x.device)
    parts: Sequence[Tensor] = (own + e).chunk(6, dim=1) if e.ndim < 4 else (own.unsqueeze(0) + e).unbind(2)
    return parts


def seen_by_itself(
    module: Any,
    policy: KernelPolicy,
    x: Tensor,
    shift: Tensor,
    scale: Tensor,
    gate: Tensor,
    freqs: Tensor,
    options: Options,
) -> Tensor:
    """x [batch, tokens, dim] plus its self-attention, in a new tensor."""
    attended = self_attention(module, policy, x, scale, shift, freqs, options)
    return product(attended, module.self_attn.o, policy, residual=x, gate=gate)


def seen_by_text(
    module: Any, policy: KernelPolicy, x: Tensor, context: Tensor, context_img_len: int | None, options: Options
) -> Tensor:
    """x [batch, tokens, dim] plus its attention to text and picture, in place."""
    attended = cross_attention(module, policy, x, context, context_img_len, options)
    return product(attended, module.cross_attn.o, policy, residual=x, out=x)


def fed_forward(
    module: Any, policy: KernelPolicy, x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor, options: Options
) -> Tensor:
    """x [batch, tokens, dim] plus its feed-forward, in place."""
    normed = Normed(x, scale, shift, eps=module.norm2.eps)
    pieces = options.get(PIECES, CHUNK_BYTES)
    return feed_forward(normed, module.ffn[0], module.ffn[2], policy, residual=x, gate=gate, out=x, pieces=pieces)


def self_attention(
    module: Any, policy: KernelPolicy, x: Tensor, scale: Tensor, shift: Tensor, freqs: Tensor, options: Options
) -> Tensor:
    """Self-attention of x before the last product: [batch, tokens, dim]."""
    attn = module.self_attn
    normed = Normed(x, scale, shift, eps=module.norm1.eps)
    q, k, v, *gate = products(normed, (attn.q, attn.k, attn.v, *gate_of(attn)), policy)
    options = as_learned(attn, options, *gate)
    heads = (x.shape[0], x.shape[1], attn.num_heads, attn.head_dim)
    q4, k4 = q.view(heads), k.view(heads)
    _rms_rope(attn, attn.norm_q, attn.norm_k, q4, k4, freqs, policy)
    attended = _attend(q, k, v, attn.num_heads, options, **told(attn))
    for patch in options.get("patches", {}).get("attn1_patch", ()):
        attended = patch({"x": attended, "q": q4, "k": k4, "transformer_options": options})
    return attended


def cross_attention(
    module: Any, policy: KernelPolicy, x: Tensor, context: Tensor, context_img_len: int | None, options: Options
) -> Tensor:
    """Attention of x to text and picture before the last product: [batch, tokens, dim]."""
    attn = module.cross_attn
    if isinstance(module.norm3, nn.Identity):
        q = product(x, attn.q, policy)
    else:
        norm = kept_weights(module.norm3, x, policy)
        q = product(Normed(x, weight=norm.weight, bias=norm.bias, eps=module.norm3.eps), attn.q, policy)
    q4 = q.view(*q.shape[:2], attn.num_heads, attn.head_dim)
    _rms_rope(attn, attn.norm_q, None, q4, None, None, policy)

    def compute() -> Sequence[Tensor]:
        if isinstance(attn, TextAttention):
            return _keys_and_values(attn, (attn.k, attn.v), attn.norm_k, context, policy)
        picture, text = context[:, :context_img_len], context[:, context_img_len:]
        return (
            *_keys_and_values(attn, (attn.k, attn.v), attn.norm_k, text, policy),
            *_keys_and_values(attn, (attn.k_img, attn.v_img), attn.norm_k_img, picture, policy),
        )

    # A node that replaces a block may change the context from block to block.
    is_steady = not options.get("patches_replace", {}).get("dit")
    k, v, *of_picture = of_text(attn, context, lambda: _depends(policy, context_img_len), compute, is_steady=is_steady)
    attended = _attend_kept(q, k, v, attn.num_heads, options, **told(attn))
    if of_picture:
        # As stock does from ComfyUI 0.33 on: in few bits the few tokens of a picture may become
        # NaN.
        exact = {**told(attn), "low_precision_attention": False}
        seen = _attend_kept(q, of_picture[0], of_picture[1], attn.num_heads, options, **exact)
        attended = attended + seen if is_anothers(options) else attended.add_(seen)
    return attended


def _attend_kept(q: Tensor, k: Tensor, v: Tensor, heads: int, options: Options, **others: Any) -> Tensor:
    """Attention with keys and values that will be read again. Another node's override gets copies,
    because it may write to its arguments."""
    if is_anothers(options):
        k, v = k.clone(), v.clone()
    return _attend(q, k, v, heads, options, **others)


def _depends(policy: KernelPolicy, context_img_len: int | None) -> Hashable:
    """All that keys and values depend on, except the context and the weights."""
    matmul = torch.backends.cuda.matmul
    return policy, context_img_len, *(getattr(matmul, name, None) for name in SWITCHES)


def _keys_and_values(
    attn: Any, operations: Sequence[Any], norm: Any, context: Tensor, policy: KernelPolicy
) -> Sequence[Tensor]:
    """Keys and values of a context [batch, its tokens, dim], by two of an attention's
    operations."""
    k, v = products(context, operations, policy)
    k4 = k.view(*k.shape[:2], attn.num_heads, attn.head_dim)
    _rms_rope(attn, norm, None, k4, None, None, policy)
    return k, v


def _attend(q: Tensor, k: Tensor, v: Tensor, heads: int, options: Options, **others: Any) -> Tensor:
    """Attention by stock's function, which asks the overrides; ours is one of them."""
    out: Tensor = optimized_attention(q, k, v, heads=heads, transformer_options=options, **others)
    return out


def _rms_rope(
    attn: Any, norm_q: Any, norm_k: Any, q: Tensor, k: Tensor | None, freqs: Tensor | None, policy: KernelPolicy
) -> None:
    """RMSNorm over all heads, if the model has it, and RoPE, of q and k [batch, tokens, heads,
    head_dim] in place."""
    if not attn.qk_norm:
        if freqs is not None:
            rms_rope_(q, k, None, None, freqs, eps=attn.eps, norm="none", policy=policy)
        return
    with operands(q, policy, norm_q, norm_q if norm_k is None else norm_k) as [of_q, of_k]:
        k_weight = None if k is None else of_k.weight
        rms_rope_(q, k, of_q.weight, k_weight, freqs, eps=norm_q.eps, policy=policy)
