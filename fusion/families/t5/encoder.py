"""T5 and UMT5 encoders over our kernels: stock's own modules, computing in FP16 around an FP32 residual stream.

Stock computes them in FP32, because T5 in FP16 is known to overflow: it upcasts every weight at every use. Here products
are FP16 with FP32 sums, and what is too large for FP16 is never stored in it:

    stream     FP32. What a block adds to it leaves the product's FP32 sums without being rounded to FP16
    hidden     of the gated feed-forward: stored times 2^-6, which the second product takes back from its sums. It overflows
               at 4 million then, not at 65504, and saturates there
    q, k, v    come from normalised rows; they saturate
    scores     FP32 in the attention kernel, which also adds the relative bias: it is never made for every pair of tokens

Rounding. Against FP32 weights, stock's own error with an FP16 file is that of the weights. With precision `precise`, what
goes into a product is kept as two FP16 numbers, the value and what rounding took from it, and multiplied twice: the error
stays within a tenth of stock's (measured: 1.04 of it). A text encoder waits for the bus, not for its products. With `fast`
there is one FP16 number: half the arithmetic, at about a quarter more error. Sums are FP32 all the same; half sums were
measured on the GPU at 1.5 of stock's error, and 1.7 with Turing's instructions.

Tokens that the caller will zero anyway (`zero_out_masked`: UMT5 pads every prompt to 512) are not computed.

`fuse` gives the stack, its blocks and the token embedding a `forward` of ours, in place; blocks are still called as modules, so
their weights may stream. How to compute stands on the stack (`HOW`) and is read at each call: a clone of the CLIP may put
another policy there for as long as it is loaded (override.py). The token embedding's rows are gathered where the table is:
2 GB do not cross the bus for them.

Stock's own computation serves where all kernels are off, on the CPU, and where something was done to a block that only stock
can honour; the reason stands in the ledger, or with `on` in an error. And, unless the policy is `on`, where weights are
neither streamed nor on the card: ComfyUI brings them through buffers of its own, and that way is not proven on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import comfy.text_encoders.t5 as stock
import comfy.utils
import torch
from torch import Tensor, nn

from ..kernels_cuda import (
    LEDGER,
    STANDARD,
    KernelPolicy,
    KernelRefused,
    attention,
    linear,
    linear_,
    linear_pair,
    norm_modulate,
)
from .blocks import is_quantised
from .halves import halves, weight_on
from .mixing import mix
from .policies import all_off
from .stream import STREAMED
from .weights import Weights, packed

OPS = ("norm_modulate", "linear", "linear_", "linear_pair", "attention")
ACTIVATIONS = {id(stock.activations["gelu_pytorch_tanh"]): "gelu_tanh", id(stock.activations["relu"]): "relu"}
HIDDEN_SCALE = 2.0**-6  # of the feed-forward's hidden values
LARGEST = 65504.0
CHUNK_ROWS = 1024  # of the feed-forward: 250 MB of fp32 between its products, for UMT5-XXL
TORCHS = KernelPolicy.of("off")
HOW = "fusestream_how"  # of a stack: where it has its `How`
TILE = 64  # tokens are computed in multiples of this: a tile's time either way, and few shapes


@dataclass(frozen=True)
class How:
    """policy: of this encoder. trims: masked tokens are zeroed by the caller. on_cpu: there too, over the references."""

    policy: KernelPolicy
    trims: bool = False
    on_cpu: bool = False

    @property
    def is_off(self) -> bool:
        """Whether all is left to stock."""
        return all_off(self.policy, OPS)

    @property
    def splits(self) -> bool:
        """Whether what goes into a product is two FP16 numbers."""
        return self.policy.precision == "precise"

    @property
    def ops(self) -> KernelPolicy:
        """Of every op: its sums are FP32, in attention too, where T5 does not scale its scores."""
        p = self.policy
        return KernelPolicy(p.default, p.ops, "precise", p.isa)


@dataclass(frozen=True)
class Seen:
    """What every block of one call shares.

    how      to compute
    tokens   how many are computed
    lengths  [batch] int32: keys from there on are not seen. None: all are, or `mask` says it
    mask     [batch, 1, 1, tokens] bool, where the keys that are seen do not come first
    buckets  [2 tokens - 1]: of the relative bias, for each distance of a key from a query
    """

    how: How
    tokens: int
    lengths: Tensor | None
    mask: Tensor | None
    buckets: Tensor


def fuse(model: nn.Module, policy: KernelPolicy = STANDARD, *, on_cpu: bool = False) -> None:
    """Let every T5 encoder in a stock text encoder model compute through our ops from now on. In place.

    on_cpu: on the CPU too, where the ops run their references: slower than stock's computation there, for tests.
    """
    for trims, net in encoders(model):
        how = How(policy, trims, on_cpu)
        if not how.is_off:
            _mix(net, how)


def _mix(net: Any, how: How) -> None:
    mix(net.encoder, FusedStack, **{HOW: how})
    for block in net.encoder.block:
        mix(block, FusedBlock)
    if not net.shared.weight.is_meta:  # a streamed encoder's table stays in the file
        mix(net.shared, FusedEmbedding, **{HOW: how})


def ways(model: nn.Module, policy: KernelPolicy) -> dict[str, How]:
    """Where in a text encoder model to put what for the time that it shall compute under this policy: name -> How. What was
    left to stock when it was loaded is made ours first, and computes as stock until then."""
    found = {}
    names = {id(module): name for name, module in model.named_modules()}
    for trims, net in encoders(model):
        now = getattr(net.encoder, HOW, None)
        if now is None:
            _mix(net, now := How(TORCHS, trims))
        found[f"{names[id(net.encoder)]}.{HOW}"] = How(policy, trims, now.on_cpu)
    return found


def encoders(model: nn.Module) -> Iterator[tuple[bool, Any]]:
    """Each T5 of a text encoder model, and whether its owner zeroes what is masked."""
    for owner in model.modules():
        net = getattr(owner, "transformer", None)
        if isinstance(net, stock.T5):
            yield bool(getattr(owner, "zero_out_masked", False)), net


# ---------------------------------------------------------------------------------------------------------- the stack


class FusedStack:
    """What the class of a fused T5Stack is mixed with."""

    fusestream_how: How

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        intermediate_output: int | None = None,
        final_layer_norm_intermediate: bool = True,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Stock's T5Stack: x [batch, tokens, width] fp32, attention_mask [batch, tokens]. Returns the encoding and, if asked
        for, what came out of one block."""
        how = self.fusestream_how
        if not how.is_off:
            reason = obstacle(self, how, x, attention_mask)
            seen = None if reason else look(self, how, x, attention_mask)
            if seen is not None:
                return encode(self, how, seen, x, intermediate_output, final_layer_norm_intermediate)
            _hand_back(how, reason or "a prompt has no token that may be seen", x)
        found: tuple[Tensor, Tensor | None] = super().forward(  # type: ignore[misc]
            x,
            attention_mask=attention_mask,
            intermediate_output=intermediate_output,
            final_layer_norm_intermediate=final_layer_norm_intermediate,
            **others,
        )
        return found


def encode(
    stack: Any, how: How, seen: Seen, x: Tensor, intermediate_output: int | None, final_layer_norm_intermediate: bool
) -> tuple[Tensor, Tensor | None]:
    """The blocks, one after the other, over a stream of their own."""
    if intermediate_output is not None and intermediate_output < 0:
        intermediate_output += len(stack.block)
    all_tokens = x.shape[1]
    x, intermediate, bias = x[:, : seen.tokens].clone(memory_format=torch.contiguous_format), None, None
    bar: Any = comfy.utils.ProgressBar
    progress = (
        None if STREAMED in stack.block[0].__dict__ else bar(len(stack.block))
    )  # a stream's blocks are counted already
    for i, block in enumerate(stack.block):
        x, bias = block(x, seen, bias)
        if progress is not None:
            progress.update(1)
        if i == intermediate_output:
            intermediate = x.clone()
    if intermediate is not None:
        if final_layer_norm_intermediate:
            intermediate = normalise(stack.final_layer_norm, how, intermediate, torch.float32)
        intermediate = _padded(intermediate, all_tokens)
    return _padded(normalise(stack.final_layer_norm, how, x, torch.float32), all_tokens), intermediate


def _padded(x: Tensor, tokens: int) -> Tensor:
    """With zeros for the tokens that were not computed."""
    return x if x.shape[1] == tokens else nn.functional.pad(x, (0, 0, 0, tokens - x.shape[1]))


def obstacle(stack: Any, how: How, x: Tensor, attention_mask: Tensor | None) -> str | None:
    """Why stock must compute this call, in words a user understands; None if we may."""
    if not (x.is_cuda or (how.on_cpu and x.device.type == "cpu")):
        return f"the text encoder runs on the {x.device.type.upper()}"
    if x.dtype is not torch.float32:
        return f"the embeddings are {str(x.dtype).removeprefix('torch.')}, not float32"
    if torch.is_grad_enabled() and x.requires_grad:
        return "a gradient is wanted, and the kernels are for inference"
    if attention_mask is not None and attention_mask.shape != x.shape[:2]:
        return (
            f"the attention mask {list(attention_mask.shape)} is not one value for each of {list(x.shape[:2])} tokens"
        )
    for block in stack.block:
        if how.policy.default != "on" and not is_at_hand(block, x.device):
            return (
                "its weights are in ComfyUI's own memory management; give its loader a vram_budget, -1 for what is free"
            )
        for module in block.modules():
            hooks = module._forward_hooks or module._forward_pre_hooks
            if "forward" in module.__dict__ or (hooks and module is not block):  # a block is called as ever
                return f"another node has changed how a {type(module).__name__} of the text encoder computes"
            if getattr(module, "pre_quant_scale", None) is not None:
                return "the weights are quantised in a way (AWQ) that only ComfyUI computes"
        act = getattr(block.layer[-1].DenseReluDense, "act", None)
        if id(act) not in ACTIVATIONS:
            return "the feed-forward has an activation that is not known here"
    return None


def is_at_hand(block: Any, device: torch.device) -> bool:
    """Whether a block's weights are on the device when it runs: because they stream, or because they stay there."""
    if STREAMED in block.__dict__:
        return True
    return all(weight.device == device for weight in block.parameters() if weight.ndim > 1)


def _hand_back(how: How, reason: str, x: Tensor) -> None:
    if how.policy.default == "on":
        raise KernelRefused(
            f"kernels is 'on' for this text encoder, and FuseStream cannot serve it: {reason}. Choose 'auto'."
        )
    if x.is_cuda:  # on the CPU there is nothing to choose, and nothing to report
        LEDGER.refused("text encoder", "fused", reason, f"{x.dtype}{list(x.shape)}", "stock's computation")


def look(stack: Any, how: How, x: Tensor, attention_mask: Tensor | None) -> Seen | None:
    """What the blocks share. None where a prompt has no token to see, and its row counts: stock then averages over all."""
    tokens, lengths, mask = x.shape[1], None, None
    if attention_mask is not None:
        visible = (
            attention_mask == 1
        ).cpu()  # as stock reads it; the device has nothing to do yet that this would wait for
        counts = visible.sum(1)
        if not how.trims and not bool(counts.all()):
            return None
        if how.trims:
            last = int((visible * torch.arange(1, tokens + 1)).amax()) if visible.numel() else 0
            tokens = min(tokens, -(-max(last, 1) // TILE) * TILE)
            visible = visible[:, :tokens]
        if not bool(visible.all()):
            if torch.equal(visible, torch.arange(tokens) < counts[:, None]):
                lengths = counts.to(x.device, torch.int32)
            else:
                mask = visible.to(x.device)[:, None, None]
    first = stack.block[0].layer[0].SelfAttention
    buckets = first._relative_position_bucket(
        torch.arange(1 - tokens, tokens, device=x.device),
        num_buckets=first.relative_attention_num_buckets,
        max_distance=first.relative_attention_max_distance,
    )
    return Seen(how, tokens, lengths, mask, buckets)


# ---------------------------------------------------------------------------------------------------------- the block


class FusedBlock:
    """What the class of a fused T5Block is mixed with."""

    layer: Any

    def forward(
        self, x: Tensor, mask: Any = None, past_bias: Tensor | None = None, optimized_attention: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """Stock's T5Block. Where the stack is ours, `mask` is what it has `Seen`, x [batch, tokens, width] is its own fp32
        stream and is added to in place, and the bias is one of distances; else it is stock's call."""
        if not isinstance(mask, Seen):
            found: tuple[Tensor, Tensor | None] = super().forward(x, mask, past_bias, optimized_attention)  # type: ignore[misc]
            return found
        comfy.model_management.throw_exception_if_processing_interrupted()  # stock's operations ask; ours do not
        past_bias = attend(self.layer[0], mask.how, x, mask, past_bias)
        feed_forward(self.layer[-1], mask.how, x)
        return x, past_bias


def normalise(norm: Any, how: How, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Stock's T5LayerNorm: RMS, no bias. Our kernel writes fp16; where fp32 is wanted torch's own serves."""
    weight = norm.weight
    if weight.device != x.device or weight.dtype not in (torch.float16, torch.float32):
        weight = weight.to(x.device, torch.float32)
    policy = how.ops if dtype is torch.float16 else TORCHS
    return norm_modulate(x, weight=weight, eps=norm.variance_epsilon, kind="rms", out_dtype=dtype, policy=policy)


def attend(layer: Any, how: How, x: Tensor, seen: Seen, bias: Tensor | None) -> Tensor | None:
    """x += attention(norm(x)). Returns the bias by distance, [heads, 2 tokens - 1], for blocks that have none of their own."""
    module, policy = layer.SelfAttention, how.ops
    if module.relative_attention_bias is not None:
        with weight_on(x.device, module.relative_attention_bias) as table:
            numbers = table.dequantize() if is_quantised(table) else table
            bias = numbers.float()[seen.buckets].t().contiguous()
    h = operand(layer.layer_norm, how, x)
    with halves(x.device, policy, module.q, module.k, module.v) as weights:
        whole = packed([Weights(weight, None) for weight in weights])
        if whole is not None and whole.weight is not None:
            parts = saturated(product(h, whole.weight, how)).chunk(3, -1)
        else:
            parts = tuple(saturated(product(h, weight, how)) for weight in weights)
    q, k, v = (part.view(*part.shape[:2], module.num_heads, -1) for part in parts)
    out = attention(q, k, v, seen.mask, scale=1.0, key_lengths=seen.lengths, distance_bias=bias, policy=policy).flatten(
        2
    )
    with halves(x.device, policy, module.o) as (weight,):
        linear_(x, out, weight, residual=x, saturate=True, policy=policy)
    return bias


def feed_forward(layer: Any, how: How, x: Tensor) -> None:
    """x += wo(act(wi_0(norm(x))) * wi_1(norm(x))), or T5's first form wo(act(wi(norm(x)))). A chunk of tokens at a time: the
    hidden values are wide."""
    dense, policy = layer.DenseReluDense, how.ops
    inner = (dense.wi_0, dense.wi_1) if hasattr(dense, "wi_0") else (dense.wi,)
    chunks = torch.split(x, max(TILE, CHUNK_ROWS // max(x.shape[0], 1)), 1)
    with halves(x.device, policy, *inner) as weights:
        hidden = [hidden_values(operand(layer.layer_norm, how, rows), weights, dense.act, how) for rows in chunks]
    with halves(x.device, policy, dense.wo) as (weight,):
        for rows, parts in zip(chunks, hidden, strict=True):
            for part in parts:
                linear_(rows, part, weight, residual=rows, scale=1 / HIDDEN_SCALE, saturate=True, policy=policy)


def hidden_values(h: Tensor, weights: Sequence[Tensor], act: Any, how: How) -> tuple[Tensor, ...]:
    """What `wo` is given, times HIDDEN_SCALE, as fp16: [batch, tokens, hidden], or two parts that add up to it."""
    if len(weights) == 2 and not how.splits:
        options: Any = {"activation": ACTIVATIONS[id(act)], "scale": HIDDEN_SCALE, "saturate": True}
        return (linear_pair(h, *weights, **options, policy=how.ops),)
    wide = act(product(h, weights[0], how).float())
    if len(weights) == 2:
        wide *= product(h, weights[1], how)
    return split(wide.mul_(HIDDEN_SCALE).clamp_(-LARGEST, LARGEST), how)


# --------------------------------------------------------------------------------------------------------- the product


def split(x: Tensor, how: How) -> tuple[Tensor, ...]:
    """fp32 numbers as fp16: the value, and what rounding took from it if that counts."""
    value = x.half()
    return (value, (x - value).half()) if how.splits else (value,)


def operand(norm: Any, how: How, x: Tensor) -> Tensor:
    """What goes into a product, normalised: [batch, tokens, width] fp16, or both parts, [2, batch, tokens, width]."""
    if not how.splits:
        return normalise(norm, how, x, torch.float16)
    return torch.stack(split(normalise(norm, how, x, torch.float32), how))


def product(h: Tensor, weight: Tensor, how: How) -> Tensor:
    """An `operand` times a weight: [batch, tokens, n], fp16, or fp32 where it had two parts. The weight is read once."""
    if not how.splits:
        return linear(h, weight, saturate=True, policy=how.ops)
    out = linear(h, weight, saturate=True, out_dtype=torch.float32, policy=how.ops)
    return out[0].add_(out[1])


def saturated(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float16 else x.clamp_(-LARGEST, LARGEST).half()


# ------------------------------------------------------------------------------------------------------ the embedding


class FusedEmbedding:
    """What the class of a fused encoder's token embedding is mixed with."""

    fusestream_how: How

    def forward(self, ids: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Stock's Embedding, of rows that are picked where the table is: ids [...] -> [..., width]."""
        module: Any = self
        patched = module.weight_function or getattr(module, "weight_lowvram_function", None) is not None
        forced = self.fusestream_how.policy.default == "on"
        if module.weight.device == ids.device or is_quantised(module.weight) or patched or not forced:
            found: Tensor = super().forward(ids, out_dtype=out_dtype)  # type: ignore[misc]
            return found
        return gather(module.weight, ids, out_dtype)


def gather(table: Tensor, ids: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """Rows of a table that is on another device than the ids."""
    rows = table[ids.to(table.device)].to(ids.device)
    return rows if out_dtype is None else rows.to(out_dtype)
