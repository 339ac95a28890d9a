"""T5, UMT5 and ByT5 encoders over our kernels: stock's modules, computing in FP16 around an FP32
residual stream (`text/encoder/block.py`).

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
from dataclasses import dataclass
from typing import Any

import comfy.text_encoders.t5 as stock
import comfy.utils
import torch
from torch import Tensor, nn

from ....kernels_cuda import STANDARD, KernelPolicy
from ...base.hooks import STREAMED
from ...base.policy import all_off, standing
from ...base.subclassing import mix
from ...graphs.calls import replayed
from ...text.common import HAND_BACK, FusedEmbedding
from ...text.encoder.block import Call, compute
from ...text.encoder.described import described, obstacle
from ...text.padding import Seen, padded, seen
from ...weights.fp32_residual import Wide
from ...weights.operands import operands

OPS = ("norm_modulate", "rms_parts", "linear", "linear_", "linear_pair", "join_sums", "attention")


@dataclass(frozen=True)
class Prompt:
    """Arguments shared by all blocks of one call.

    call     those of any encoder
    seen     which tokens are computed
    buckets  [2 tokens - 1]: of the relative bias, for each distance of a key from a query
    """

    call: Call
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

    block: Any
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
            blocks, on_cpu = self.block, self.fusestream_on_cpu
            reason = obstacle(blocks, x, policy, on_cpu=on_cpu, attention_mask=attention_mask)
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
    found: tuple[Tensor, Tensor | None] = replayed(stack.block[0], body, (prompt, x), key)
    return found


def encode(
    stack: Any, prompt: Prompt, x: Tensor, intermediate_output: int | None, final_layer_norm_intermediate: bool
) -> tuple[Tensor, Tensor | None]:
    """Run the blocks one after the other over a copy of x."""
    if intermediate_output is not None and intermediate_output < 0:
        intermediate_output += len(stack.block)
    all_tokens, wide = x.shape[1], prompt.call.wide
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
            intermediate = wide.rms(intermediate, last.weight, last.variance_epsilon, torch.float32)
        intermediate = padded(intermediate, prompt.seen, all_tokens)
    x = wide.rms(x, last.weight, last.variance_epsilon, torch.float32)
    return padded(x, prompt.seen, all_tokens), intermediate


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
    return Prompt(Call(wide, found.mask, lengths=found.lengths), found.on_the_device, buckets)


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
        bias = bias_of(self.layer[0].SelfAttention, x, mask, past_bias)
        return compute(described(self), x, mask.call, bias), bias


def bias_of(module: Any, x: Tensor, prompt: Prompt, bias: Tensor | None) -> Tensor | None:
    """The relative bias by distance, [heads, 2 tokens - 1]: the module's own, or that of the block
    before it."""
    if module.relative_attention_bias is None:
        return bias
    with operands(x, prompt.call.wide.ops, module.relative_attention_bias) as [table]:
        return table.matrix[prompt.buckets].t().contiguous()
