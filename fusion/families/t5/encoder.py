"""T5 and UMT5 encoders over our kernels: stock's modules, computing in FP16 around an FP32 residual
stream.

Stock computes them in FP32, because T5 is known to overflow in FP16, and upcasts every weight at
every use. Here products are FP16 with FP32 sums (`weights/fp32_residual.py`), and numbers too large
for FP16 are never stored in it:

    stream     FP32
    hidden     of the gated feed-forward: stored times 2^-6, and scaled back in the second product's
               sums
    q, k, v    come from normalised rows; they saturate
    scores     FP32 in the attention kernel, which also adds the relative bias, so that the bias is
               never made for every pair of tokens

Against FP32 weights, stock's own error with an FP16 file is that of the weights. With precision
`precise` our error is within a tenth of it (measured: 1.04 times), with `fast` it is about 1.25
times. A text encoder waits for the bus, not for its products.

Tokens that the caller will zero anyway (`zero_out_masked`: UMT5 pads every prompt to 512) are not
computed.

`fuse` gives the stack, its blocks and the token embedding a `forward` of ours, in place. Blocks are
still called as modules, so their weights may stream. The policy is an attribute of the stack and is
read at each call. Rows of the token embedding are gathered on the table's device, so that 2 GB do
not cross the bus for them.

Stock computes if all kernels are off, on the CPU, and if another node did something to a block that
only stock can honour; the reason goes to the ledger, or with `on` into an error. Unless the policy
is `on`, stock also computes if weights are neither streamed nor on the card: ComfyUI then brings
them through buffers of its own, and that way is not proven on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import comfy.model_management
import comfy.text_encoders.t5 as stock
import comfy.utils
import torch
from torch import Tensor, nn

from ....kernels_cuda import STANDARD, KernelPolicy, attention
from ....kernels_cuda.ops.matmul.linear import Activation
from ...base.hooks import STREAMED
from ...base.policy import all_off, standing
from ...base.subclassing import mix
from ...graphs.calls import replayed
from ...text import common
from ...text.common import HAND_BACK, FusedEmbedding
from ...text.padding import Seen, padded, seen
from ...weights.fp32_residual import Gate, Wide
from ...weights.operands import operands

OPS = ("norm_modulate", "rms_parts", "linear", "linear_", "linear_pair", "join_sums", "attention")
ACTIVATIONS: dict[int, Activation] = {
    id(stock.activations["gelu_pytorch_tanh"]): "gelu_tanh",
    id(stock.activations["relu"]): "relu",
}


@dataclass(frozen=True)
class Prompt:
    """Arguments shared by all blocks of one call.

    wide     how to compute
    seen     which tokens are computed and seen
    buckets  [2 tokens - 1]: of the relative bias, for each distance of a key from a query
    """

    wide: Wide
    seen: Seen
    buckets: Tensor


def fuse(model: nn.Module, policy: KernelPolicy = STANDARD, *, on_cpu: bool = False) -> int:
    """Let all T5 encoders in a stock text encoder model compute through our ops, in place. Returns
    how many blocks, 0 if all is left to stock.

    on_cpu: on the CPU too, where the ops run their references: slower than stock, for tests.
    """
    fused = 0
    for trims, net in () if all_off(policy, OPS) else encoders(model):
        mix(net.encoder, FusedStack, **standing(policy), fusestream_trims=trims, fusestream_on_cpu=on_cpu)
        for block in net.encoder.block:
            mix(block, FusedBlock)
            fused += 1
        if not net.shared.weight.is_meta:  # a streamed encoder's table stays in the file
            mix(net.shared, FusedEmbedding, **standing(policy))
    return fused


def encoders(model: nn.Module) -> Iterator[tuple[bool, Any]]:
    """Each T5 of a text encoder model, with whether its owner zeroes masked tokens."""
    for owner in model.modules():
        net = getattr(owner, "transformer", None)
        if isinstance(net, stock.T5):
            yield bool(getattr(owner, "zero_out_masked", False)), net


# ---------------------------------------------------------------------------------------------------------- the stack


class FusedStack:
    """Mixed into the class of a fused T5Stack.

    fusestream_trims    the caller zeroes masked tokens
    fusestream_on_cpu   also computes on the CPU, over the references
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
        dtype: torch.dtype | None = None,
        embeds_info: Sequence[Any] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Stock's T5Stack: x [batch, tokens, width] fp32, attention_mask [batch, tokens]. Returns
        the encoding and, if asked for, the output of one block."""
        policy = self.fusestream_policy
        if not all_off(policy, OPS):
            reason = obstacle(self, x, attention_mask)
            prompt = None if reason else prompt_of(self, Wide(policy), x, attention_mask)
            if prompt is not None:
                return encoded(self, prompt, x, intermediate_output, final_layer_norm_intermediate)
            reason = reason or "a prompt has no token that may be seen"
            HAND_BACK(reason, x, forced=policy.default == "on", quietly=not x.is_cuda)
        found: tuple[Tensor, Tensor | None] = super().forward(  # type: ignore[misc]
            x,
            attention_mask=attention_mask,
            intermediate_output=intermediate_output,
            final_layer_norm_intermediate=final_layer_norm_intermediate,
            dtype=dtype,
            embeds_info=embeds_info,
        )
        return found


def encoded(
    stack: Any, prompt: Prompt, x: Tensor, intermediate_output: int | None, final_layer_norm_intermediate: bool
) -> tuple[Tensor, Tensor | None]:
    """The result of `encode`, replayed as a graph where that pays."""

    def body(prompt: Prompt, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return encode(stack, prompt, x, intermediate_output, final_layer_norm_intermediate)

    key = str(intermediate_output), final_layer_norm_intermediate
    found: tuple[Tensor, Tensor | None] = replayed(
        stack.block[0], body, (replace(prompt, seen=prompt.seen.on_the_device), x), key
    )
    return found


def encode(
    stack: Any, prompt: Prompt, x: Tensor, intermediate_output: int | None, final_layer_norm_intermediate: bool
) -> tuple[Tensor, Tensor | None]:
    """Run the blocks one after the other over a copy of x."""
    if intermediate_output is not None and intermediate_output < 0:
        intermediate_output += len(stack.block)
    all_tokens = x.shape[1]
    x, intermediate, bias = x[:, : prompt.seen.tokens].clone(memory_format=torch.contiguous_format), None, None
    bar: Any = comfy.utils.ProgressBar
    # The blocks of a streamed model have a progress bar already.
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
        intermediate = padded(intermediate, prompt.seen, all_tokens)
    x = prompt.wide.rms(x, last.weight, last.variance_epsilon, torch.float32)
    return padded(x, prompt.seen, all_tokens), intermediate


def obstacle(stack: Any, x: Tensor, attention_mask: Tensor | None) -> str | None:
    """Why stock must compute this call, in words a user understands; None if we may."""
    reason = common.obstacle(stack.block, x, attention_mask, stack.fusestream_policy, on_cpu=stack.fusestream_on_cpu)
    if reason is None and any(
        id(getattr(block.layer[-1].DenseReluDense, "act", None)) not in ACTIVATIONS for block in stack.block
    ):
        return "the feed-forward has an activation that is not known here"
    return reason


def prompt_of(stack: Any, wide: Wide, x: Tensor, attention_mask: Tensor | None) -> Prompt | None:
    """The blocks' shared arguments. None: a prompt has no visible token, and its output counts, so
    stock averages over all."""
    found = seen(x, attention_mask, trims=stack.fusestream_trims)
    if found.visible is not None and not stack.fusestream_trims and not bool(found.visible.any(1).all()):
        return None
    first = stack.block[0].layer[0].SelfAttention
    buckets = first._relative_position_bucket(
        torch.arange(1 - found.tokens, found.tokens, device=x.device),
        num_buckets=first.relative_attention_num_buckets,
        max_distance=first.relative_attention_max_distance,
    )
    return Prompt(wide, found, buckets)


# ---------------------------------------------------------------------------------------------------------- the block


class FusedBlock:
    """Mixed into the class of a fused T5Block."""

    layer: Any

    def forward(
        self, x: Tensor, mask: Any = None, past_bias: Tensor | None = None, optimized_attention: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """Stock's T5Block. If the stack is ours, `mask` is its `Prompt`, x [batch, tokens, width]
        its own fp32 stream, which is added to in place, and the bias is by distance; otherwise it
        is a call of stock's."""
        if not isinstance(mask, Prompt):
            found: tuple[Tensor, Tensor | None] = super().forward(x, mask, past_bias, optimized_attention)  # type: ignore[misc]
            return found
        # Stock's operations ask this; ours do not.
        comfy.model_management.throw_exception_if_processing_interrupted()
        past_bias = attend(self.layer[0], x, mask, past_bias)
        feed_forward(self.layer[-1], x, mask.wide)
        return x, past_bias


def attend(layer: Any, x: Tensor, prompt: Prompt, bias: Tensor | None) -> Tensor | None:
    """x += attention(norm(x)). Returns the bias by distance, [heads, 2 tokens - 1], for blocks
    without their own."""
    module, wide = layer.SelfAttention, prompt.wide
    if module.relative_attention_bias is not None:
        with operands(x, wide.ops, module.relative_attention_bias) as [table]:
            bias = table.matrix[prompt.buckets].t().contiguous()
    h = wide.operand(x, layer.layer_norm.weight, layer.layer_norm.variance_epsilon)
    parts = wide.projections(h, (module.q, module.k, module.v))
    q, k, v = (part.view(*part.shape[:2], module.num_heads, -1) for part in parts)
    mask, lengths = prompt.seen.mask, prompt.seen.lengths
    out = attention(q, k, v, mask, scale=1.0, key_lengths=lengths, distance_bias=bias, policy=wide.ops)
    wide.add(x, [out.flatten(2)], module.o)
    return bias


def feed_forward(layer: Any, x: Tensor, wide: Wide) -> None:
    """x += wo(act(wi_0(norm(x))) * wi_1(norm(x))), or T5's first form wo(act(wi(norm(x))))."""
    dense, norm = layer.DenseReluDense, layer.layer_norm
    inner = (dense.wi_0, dense.wi_1) if hasattr(dense, "wi_0") else (dense.wi,)
    gate = Gate(ACTIVATIONS[id(dense.act)], dense.act)
    wide.feed_forward(x, norm.weight, norm.variance_epsilon, inner, dense.wo, gate)
