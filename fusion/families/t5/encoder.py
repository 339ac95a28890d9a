"""T5 and UMT5 encoders over our kernels: stock's own modules, computing in FP16 around an FP32 residual stream.

Stock computes them in FP32, because T5 in FP16 is known to overflow: it upcasts every weight at every use. Here products
are FP16 with FP32 sums (`wide.py`), and what is too large for FP16 is never stored in it:

    stream     FP32
    hidden     of the gated feed-forward: stored times 2^-6, which the second product takes back from its sums. It overflows
               at 4 million then, not at 65504, and saturates there
    q, k, v    come from normalised rows; they saturate
    scores     FP32 in the attention kernel, which also adds the relative bias: it is never made for every pair of tokens

Against FP32 weights, stock's own error with an FP16 file is that of the weights. With precision `precise` ours stays within a tenth
of it (measured: 1.04), with `fast` it is about 1.25 of it. A text encoder waits for the bus, not for its products.

Tokens that the caller will zero anyway (`zero_out_masked`: UMT5 pads every prompt to 512) are not computed.

`fuse` gives the stack, its blocks and the token embedding a `forward` of ours, in place; blocks are still called as modules, so
their weights may stream. The policy stands on the stack and is read at each call. The token embedding's rows are gathered where
the table is: 2 GB do not cross the bus for them.

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

from ....kernels_cuda import STANDARD, KernelPolicy, attention, linear_, linear_pair
from ....kernels_cuda.registry import GRADIENT
from ...fused import POLICY, HandBack, all_off
from ...mixing import mix
from ...operands import operands, packed
from ...stream.blocks import is_quantised
from ...stream.stream import STREAMED
from ...wide import LARGEST, Wide, saturated

OPS = ("norm_modulate", "linear", "linear_", "linear_pair", "attention")
ACTIVATIONS = {id(stock.activations["gelu_pytorch_tanh"]): "gelu_tanh", id(stock.activations["relu"]): "relu"}
HIDDEN_SCALE = 2.0**-6  # of the feed-forward's hidden values
CHUNK_ROWS = 1024  # of the feed-forward: 250 MB of fp32 between its products, for UMT5-XXL
HAND_BACK = HandBack("text encoder", "fused", "this text encoder", "serve it", "stock's computation")
TILE = 64  # tokens are computed in multiples of this: a tile's time either way, and few shapes


@dataclass(frozen=True)
class Prompt:
    """What every block of one call shares.

    wide     how to compute
    tokens   how many are computed
    lengths  [batch] int32: keys from there on are not seen. None: all are, or `mask` says it
    mask     [batch, 1, 1, tokens] bool, where the keys that are seen do not come first
    buckets  [2 tokens - 1]: of the relative bias, for each distance of a key from a query
    """

    wide: Wide
    tokens: int
    lengths: Tensor | None
    mask: Tensor | None
    buckets: Tensor


def fuse(model: nn.Module, policy: KernelPolicy = STANDARD, *, on_cpu: bool = False) -> int:
    """Let every T5 encoder in a stock text encoder model compute through our ops from now on. In place. Returns how many blocks:
    none where all is left to stock.

    on_cpu: on the CPU too, where the ops run their references: slower than stock's computation there, for tests.
    """
    fused = 0
    for trims, net in () if all_off(policy, OPS) else encoders(model):
        mix(net.encoder, FusedStack, **{POLICY: policy}, fusestream_trims=trims, fusestream_on_cpu=on_cpu)
        for block in net.encoder.block:
            mix(block, FusedBlock)
            fused += 1
        if not net.shared.weight.is_meta:  # a streamed encoder's table stays in the file
            mix(net.shared, FusedEmbedding, **{POLICY: policy})
    return fused


def encoders(model: nn.Module) -> Iterator[tuple[bool, Any]]:
    """Each T5 of a text encoder model, and whether its owner zeroes what is masked."""
    for owner in model.modules():
        net = getattr(owner, "transformer", None)
        if isinstance(net, stock.T5):
            yield bool(getattr(owner, "zero_out_masked", False)), net


# ---------------------------------------------------------------------------------------------------------- the stack


class FusedStack:
    """What the class of a fused T5Stack is mixed with.

    fusestream_trims    masked tokens are zeroed by the caller
    fusestream_on_cpu   computes there too, over the references
    """

    fusestream_policy: KernelPolicy
    fusestream_trims: bool
    fusestream_on_cpu: bool

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
        policy = self.fusestream_policy
        if not all_off(policy, OPS):
            reason = obstacle(self, x, attention_mask)
            prompt = None if reason else prompt_of(self, Wide(policy), x, attention_mask)
            if prompt is not None:
                return encode(self, prompt, x, intermediate_output, final_layer_norm_intermediate)
            reason = reason or "a prompt has no token that may be seen"
            HAND_BACK(reason, x, forced=policy.default == "on", quietly=not x.is_cuda)
        found: tuple[Tensor, Tensor | None] = super().forward(  # type: ignore[misc]
            x,
            attention_mask=attention_mask,
            intermediate_output=intermediate_output,
            final_layer_norm_intermediate=final_layer_norm_intermediate,
            **others,
        )
        return found


def encode(
    stack: Any, prompt: Prompt, x: Tensor, intermediate_output: int | None, final_layer_norm_intermediate: bool
) -> tuple[Tensor, Tensor | None]:
    """The blocks, one after the other, over a stream of their own."""
    if intermediate_output is not None and intermediate_output < 0:
        intermediate_output += len(stack.block)
    all_tokens = x.shape[1]
    x, intermediate, bias = x[:, : prompt.tokens].clone(memory_format=torch.contiguous_format), None, None
    bar: Any = comfy.utils.ProgressBar
    # A stream's blocks are counted already.
    progress = None if STREAMED in stack.block[0].__dict__ else bar(len(stack.block))
    for i, block in enumerate(stack.block):
        x, bias = block(x, prompt, bias)
        if progress is not None:
            progress.update(1)
        if i == intermediate_output:
            intermediate = x.clone()
    last = stack.final_layer_norm
    if intermediate is not None:
        if final_layer_norm_intermediate:
            intermediate = prompt.wide.rms(intermediate, last.weight, last.variance_epsilon, torch.float32)
        intermediate = _padded(intermediate, all_tokens)
    x = prompt.wide.rms(x, last.weight, last.variance_epsilon, torch.float32)
    return _padded(x, all_tokens), intermediate


def _padded(x: Tensor, tokens: int) -> Tensor:
    """With zeros for the tokens that were not computed."""
    return x if x.shape[1] == tokens else nn.functional.pad(x, (0, 0, 0, tokens - x.shape[1]))


def obstacle(stack: Any, x: Tensor, attention_mask: Tensor | None) -> str | None:
    """Why stock must compute this call, in words a user understands; None if we may."""
    if not (x.is_cuda or (stack.fusestream_on_cpu and x.device.type == "cpu")):
        return f"the text encoder runs on the {x.device.type.upper()}"
    if x.dtype is not torch.float32:
        return f"the embeddings are {str(x.dtype).removeprefix('torch.')}, not float32"
    if torch.is_grad_enabled() and x.requires_grad:
        return GRADIENT
    if attention_mask is not None and attention_mask.shape != x.shape[:2]:
        return (
            f"the attention mask {list(attention_mask.shape)} is not one value for each of {list(x.shape[:2])} tokens"
        )
    for block in stack.block:
        if stack.fusestream_policy.default != "on" and not is_at_hand(block, x.device):
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


def prompt_of(stack: Any, wide: Wide, x: Tensor, attention_mask: Tensor | None) -> Prompt | None:
    """What the blocks share. None where a prompt has no token to see, and its row counts: stock then averages over all."""
    tokens, lengths, mask, trims = x.shape[1], None, None, stack.fusestream_trims
    if attention_mask is not None:
        # As stock reads it. The device has nothing to do yet that this would wait for.
        visible = (attention_mask == 1).cpu()
        counts = visible.sum(1)
        if not trims and not bool(counts.all()):
            return None
        if trims:
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
    return Prompt(wide, tokens, lengths, mask, buckets)


# ---------------------------------------------------------------------------------------------------------- the block


class FusedBlock:
    """What the class of a fused T5Block is mixed with."""

    layer: Any

    def forward(
        self, x: Tensor, mask: Any = None, past_bias: Tensor | None = None, optimized_attention: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """Stock's T5Block. Where the stack is ours, `mask` is its `Prompt`, x [batch, tokens, width] is its own fp32 stream and is
        added to in place, and the bias is one of distances; else it is stock's call."""
        if not isinstance(mask, Prompt):
            found: tuple[Tensor, Tensor | None] = super().forward(x, mask, past_bias, optimized_attention)  # type: ignore[misc]
            return found
        comfy.model_management.throw_exception_if_processing_interrupted()  # stock's operations ask; ours do not
        past_bias = attend(self.layer[0], x, mask, past_bias)
        feed_forward(self.layer[-1], x, mask.wide)
        return x, past_bias


def attend(layer: Any, x: Tensor, prompt: Prompt, bias: Tensor | None) -> Tensor | None:
    """x += attention(norm(x)). Returns the bias by distance, [heads, 2 tokens - 1], for blocks that have none of their own."""
    module, wide = layer.SelfAttention, prompt.wide
    if module.relative_attention_bias is not None:
        with operands(x, wide.ops, module.relative_attention_bias) as [table]:
            bias = table.matrix[prompt.buckets].t().contiguous()
    h = wide.operand(x, layer.layer_norm.weight, layer.layer_norm.variance_epsilon)
    with operands(h, wide.ops, module.q, module.k, module.v) as weights:
        whole = packed(weights)
        if whole is not None:
            parts = saturated(wide.product(h, whole.matrix)).chunk(3, -1)
        else:
            parts = tuple(saturated(wide.product(h, one.matrix)) for one in weights)
    q, k, v = (part.view(*part.shape[:2], module.num_heads, -1) for part in parts)
    out = attention(
        q, k, v, prompt.mask, scale=1.0, key_lengths=prompt.lengths, distance_bias=bias, policy=wide.ops
    ).flatten(2)
    with operands(h, wide.ops, module.o) as [o]:
        linear_(x, out, o.matrix, residual=x, saturate=True, policy=wide.ops)
    return bias


def feed_forward(layer: Any, x: Tensor, wide: Wide) -> None:
    """x += wo(act(wi_0(norm(x))) * wi_1(norm(x))), or T5's first form wo(act(wi(norm(x)))). A chunk of tokens at a time: the
    hidden values are wide."""
    dense, norm = layer.DenseReluDense, layer.layer_norm
    inner = (dense.wi_0, dense.wi_1) if hasattr(dense, "wi_0") else (dense.wi,)
    chunks = torch.split(x, max(TILE, CHUNK_ROWS // max(x.shape[0], 1)), 1)
    like = x.new_empty(0, dtype=torch.float16)
    with operands(like, wide.ops, *inner) as weights:
        matrices = [one.matrix for one in weights]
        hidden = [
            hidden_values(wide.operand(rows, norm.weight, norm.variance_epsilon), matrices, dense.act, wide)
            for rows in chunks
        ]
    with operands(like, wide.ops, dense.wo) as [wo]:
        for rows, parts in zip(chunks, hidden, strict=True):
            for part in parts:
                linear_(rows, part, wo.matrix, residual=rows, scale=1 / HIDDEN_SCALE, saturate=True, policy=wide.ops)


def hidden_values(h: Tensor, weights: Sequence[Tensor], act: Any, wide: Wide) -> tuple[Tensor, ...]:
    """What `wo` is given, times HIDDEN_SCALE, as fp16: [batch, tokens, hidden], or two parts that add up to it."""
    if len(weights) == 2 and not wide.splits:
        options: Any = {"activation": ACTIVATIONS[id(act)], "scale": HIDDEN_SCALE, "saturate": True}
        return (linear_pair(h, *weights, **options, policy=wide.ops),)
    hidden = act(wide.product(h, weights[0]).float())
    if len(weights) == 2:
        hidden *= wide.product(h, weights[1])
    return wide.split(hidden.mul_(HIDDEN_SCALE).clamp_(-LARGEST, LARGEST))


# ------------------------------------------------------------------------------------------------------ the embedding


class FusedEmbedding:
    """What the class of a fused encoder's token embedding is mixed with."""

    fusestream_policy: KernelPolicy

    def forward(self, ids: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Stock's Embedding, of rows that are picked where the table is: ids [...] -> [..., width]."""
        module: Any = self
        patched = module.weight_function or getattr(module, "weight_lowvram_function", None) is not None
        forced = self.fusestream_policy.default == "on"
        if module.weight.device == ids.device or is_quantised(module.weight) or patched or not forced:
            found: Tensor = super().forward(ids, out_dtype=out_dtype)  # type: ignore[misc]
            return found
        return gather(module.weight, ids, out_dtype)


def gather(table: Tensor, ids: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """Rows of a table that is on another device than the ids."""
    rows = table[ids.to(table.device)].to(ids.device)
    return rows if out_dtype is None else rows.to(out_dtype)
