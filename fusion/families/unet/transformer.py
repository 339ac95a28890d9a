"""A U-Net's transformers over our kernels: stock's modules, whose forwards compute through our ops.

    x ─ norm ─ in ─ blocks ─ out, + x            channels-last: pixels are tokens in place

    block:  x ─ norm ─ q k v as one product ─ attention ─ out, + x ─┐
            ┌───────────────────────────────────────────────────────┘
            ├─ norm ─ q │ prompt ─ k v as one product ─ attention ─ out, + x ─┐
            ┌─────────────────────────────────────────────────────────────────┘
            └─ norm ─ both halves of GEGLU as one product ─ value x gelu(gate) ─ out, + x,
                      a few tokens at a time

x is never written to, because patches between the parts may have kept it.

Patches are called where stock calls them, with the same arguments: those on an attention's inputs
and outputs, those that replace it (these get q, k and v as separate tensors), and the one in the
middle. Calls of stock's attention function go through any override.

Keys and values of the prompt are made in each step. They are less than 1 % of a step's arithmetic,
and a block's prompt is a new tensor in each step: only its numbers would tell whether it is the
same one, and the host would have to wait for them.

Our attention serves heads of 64. Those of SD 1.5 have 40, 80 and 160 elements, which torch's
kernels serve, as candidates of the same op, also if kernels are "on". Padding the first two to 64
and 96 would take 1.6 and 1.2 times the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import comfy.ldm.modules.attention as stock
from torch import Tensor, nn

from ....kernels_cuda import KernelPolicy, gelu_mul, linear, norm_modulate
from ....kernels_cuda.ops.matmul.mlp import CHUNK_BYTES, most_rows, parts_of
from ...fused.attention import HOOK, AttentionOverride, for_heads
from ...fused.block import FusedBlock, HandBack
from ...fused.named_attention import told
from ...vae.memory_limits import channels_last
from ...weights.operands import operands
from ...weights.products import product, products
from ...weights.storage import input_width
from .pictures import normed

HAND_BACK = HandBack("u-net block")
Options = dict[str, Any]
Patches = Sequence[Any]


def obstacle(module: Any) -> str | None:
    """Why a transformer, or a block of one, cannot be ours, in words a user understands."""
    if isinstance(module, stock.SpatialTransformer):
        return None
    if type(module.attn1) is not stock.CrossAttention or type(module.attn2) is not stock.CrossAttention:
        return "its attention is of a kind without fused kernels"
    if module.ff_in or module.switch_temporal_ca_to_sa:
        return "it is a block over time"
    if type(module.ff.net[0]) is not stock.GEGLU:
        return "its feed-forward is of a kind without fused kernels"
    return None


def prompt_width(net: nn.Module) -> int | None:
    """The width of a prompt's tokens in a network; None: it takes no prompts."""
    blocks = (module for module in net.modules() if isinstance(module, stock.BasicTransformerBlock))
    first: Any = next(blocks, None)
    return None if first is None or first.attn2 is None else input_width(first.attn2.to_k)


# --------------------------------------------------------------------------------------------------------- transformers


class FusedTransformer(FusedBlock):
    """Mixed into stock's SpatialTransformer."""

    fusestream_hand_back = HAND_BACK

    def forward(self, x: Tensor, context: Any = None, transformer_options: Options | None = None) -> Tensor:
        options = {} if transformer_options is None else transformer_options
        policy = self.policy_for(x, options)
        if policy is None:
            out: Tensor = super().forward(x, context, options)  # type: ignore[misc]
            return out
        return transformer(self, policy, x, context, options)


def transformer(module: Any, policy: KernelPolicy, x: Tensor, context: Any, options: Options) -> Tensor:
    """Stock's SpatialTransformer: x [batch, c, h, w] fp16. Returns a new tensor like it,
    channels-last.

    context  [batch, tokens, width], or one for each block
    """
    contexts = context if isinstance(context, list) else [context] * len(module.transformer_blocks)
    options["activations_shape"] = list(x.shape)
    x = channels_last(x)
    height, width = x.shape[2:]
    seen = pixelwise(tokens(normed(module.norm, x, policy, silu=False)), module.proj_in, policy)
    for i, each in enumerate(module.transformer_blocks):
        options["block_index"] = i
        seen = each(seen, context=contexts[i], transformer_options=options)
    out = pixelwise(seen, module.proj_out, policy, tokens(x))
    return out.view(-1, height, width, out.shape[-1]).movedim(-1, 1)


def tokens(x: Tensor) -> Tensor:
    """[batch, c, h, w], channels-last, as [batch, h * w, c]."""
    return x.movedim(1, -1).flatten(1, 2)


def pixelwise(x: Tensor, operation: Any, policy: KernelPolicy, residual: Tensor | None = None) -> Tensor:
    """One of stock's Linears, or a convolution of single pixels, for x [batch, tokens, k] fp16."""
    if isinstance(operation, nn.Linear):
        return product(x, operation, policy, residual=residual)
    with operands(x, policy, operation) as [own]:
        return linear(x, own.matrix.flatten(1), own.bias, residual=residual, policy=policy)


# --------------------------------------------------------------------------------------------------------------- blocks


class FusedTransformerBlock(FusedBlock):
    """Mixed into stock's BasicTransformerBlock."""

    fusestream_hand_back = HAND_BACK

    def forward(self, x: Tensor, context: Tensor | None = None, transformer_options: Options | None = None) -> Tensor:
        options = {} if transformer_options is None else transformer_options
        policy = self.policy_for(x, options)
        if policy is None:
            out: Tensor = super().forward(x, context, options)  # type: ignore[misc]
            return out
        return block(self, policy, x, context, options)


class Others(NamedTuple):
    """The changes of other nodes to a block.

    patches   by name
    replaced  by attention: functions by place
    places    of this block; the first one that is found counts
    extra     arguments for patches
    """

    patches: Mapping[str, Patches]
    replaced: Mapping[str, Mapping[Any, Any]]
    places: tuple[Any, Any]
    extra: Options

    def instead(self, name: str) -> Any:
        """The function that replaces an attention, or None."""
        here = self.replaced.get(name, {})
        return next((here[place] for place in self.places if place in here), None)


def others_in(module: Any, options: Options) -> Others:
    """The changes as stock finds them. A block outside of a U-Net has no place."""
    extra = {name: value for name, value in options.items() if name not in ("patches", "patches_replace")}
    extra |= {"n_heads": module.n_heads, "dim_head": module.d_head, "attn_precision": module.attn_precision}
    whole = options.get("block")
    own = None if whole is None else (whole[0], whole[1], options.get("block_index", 0))
    return Others(options.get("patches", {}), options.get("patches_replace", {}), (own, whole), extra)


def block(module: Any, policy: KernelPolicy, x: Tensor, context: Tensor | None, options: Options) -> Tensor:
    """Stock's BasicTransformerBlock: x [batch, tokens, dim] fp16, context [batch, text tokens,
    width]. Returns a new tensor like x."""
    x, others = x.contiguous(), others_in(module, options)
    told = context if module.disable_self_attn else None
    x = attended(module, "1", policy, x, told, others, options)
    for patch in others.patches.get("middle_patch", ()):
        x = patch(x, others.extra)
    x = attended(module, "2", policy, x, context, others, options)
    return fed_forward(module, policy, x)


def attended(
    module: Any, number: str, policy: KernelPolicy, x: Tensor, context: Tensor | None, others: Others, options: Options
) -> Tensor:
    """x plus the output of an attention, with its norm before it. context: what it attends to;
    None: x."""
    name, attn = f"attn{number}", getattr(module, f"attn{number}")
    n, value = layer_norm(x, getattr(module, f"norm{number}"), policy), context
    if f"{name}_patch" in others.patches:
        # A patch on the first attention gets x as context if there is none, a patch on the second
        # gets None.
        if context is None and number == "1":
            context = n
        value = context
        for patch in others.patches[f"{name}_patch"]:
            n, context, value = patch(n, context, value, others.extra)
    behind = others.patches.get(f"{name}_output_patch", ())
    instead = others.instead(name)
    if instead is None:
        q, k, v = q_k_v(attn, n, context, value, policy)
        named, given = told(attn), for_torchs_heads(options, attn.dim_head)
        seen = stock.optimized_attention(
            q, k, v, attn.heads, attn_precision=attn.attn_precision, transformer_options=given, **named
        )
    else:
        context = n if context is None else context
        value = context if value is None else value
        parts = ((n, attn.to_q), (context, attn.to_k), (value, attn.to_v))
        seen = instead(*(product(of, operation, policy) for of, operation in parts), others.extra)
    if not behind:
        return product(seen, attn.to_out[0], policy, residual=x)
    added = product(seen, attn.to_out[0], policy)
    for patch in behind:
        added = patch(added, others.extra)
    return added + x


def for_torchs_heads(options: Options, size: int) -> Options:
    """The options for an attention with heads of so many elements: our own override takes the
    policy for them."""
    ours = options.get(HOOK)
    if not isinstance(ours, AttentionOverride) or (policy := for_heads(ours.policy, size)) is ours.policy:
        return options
    return options | {HOOK: AttentionOverride(policy)}


def q_k_v(attn: Any, x: Tensor, context: Tensor | None, value: Tensor | None, policy: KernelPolicy) -> Sequence[Tensor]:
    """q, k and v of stock's CrossAttention, in as few products as their inputs allow: one, if all
    are x."""
    context = x if context is None else context
    value = context if value is None else value
    if value is not context:
        parts = ((x, attn.to_q), (context, attn.to_k), (value, attn.to_v))
        return [product(of, operation, policy) for of, operation in parts]
    if context is x:
        return products(x, (attn.to_q, attn.to_k, attn.to_v), policy, however_long=True)
    return product(x, attn.to_q, policy), *products(context, (attn.to_k, attn.to_v), policy)


def layer_norm(x: Tensor, norm: Any, policy: KernelPolicy) -> Tensor:
    """Stock's LayerNorm of x [batch, tokens, dim] fp16."""
    with operands(x, policy, norm) as [own]:
        return norm_modulate(x, weight=own.weight, bias=own.bias, eps=norm.eps, policy=policy)


def fed_forward(module: Any, policy: KernelPolicy, x: Tensor) -> Tensor:
    """x plus the output of GEGLU, with its norm before it. The hidden values are eight times as
    wide."""
    both, last = module.ff.net[0].proj, module.ff.net[2]
    normed_x = layer_norm(x, module.norm3, policy)
    parts = parts_of(x.shape[0], x.shape[1], most_rows(both.out_features, CHUNK_BYTES))
    if len(parts) == 1:
        # Without `out` the product chooses its output's memory itself; into given memory it may
        # have to copy.
        return product(gated(normed_x, both, policy), last, policy, residual=x)
    out = x.new_empty(x.shape)
    for part in parts:
        product(gated(normed_x[part], both, policy), last, policy, residual=x[part], out=out[part])
    return out


def gated(x: Tensor, both: Any, policy: KernelPolicy) -> Tensor:
    """The values of GEGLU, times GELU of its gates."""
    values, gates = product(x, both, policy).chunk(2, -1)
    return gelu_mul(gates, values, "erf", policy=policy)


KINDS: dict[type[nn.Module], type[FusedBlock]] = {
    stock.SpatialTransformer: FusedTransformer,
    stock.BasicTransformerBlock: FusedTransformerBlock,
}
