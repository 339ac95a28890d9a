"""Code shared by our text encoders: which language models and which calls are ours, which tokens
are computed, and how the token embedding is looked up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from comfy.text_encoders import llama as stock
from torch import Tensor, nn

from ...kernels_cuda import KernelPolicy
from ...kernels_cuda.ops.views.checks import word
from ...kernels_cuda.registry import GRADIENT
from ..base.hooks import STREAMED
from ..fused.block import HandBack
from ..weights.fp32_residual import TILE
from ..weights.storage import is_quantised

HAND_BACK = HandBack("text encoder", "fused", "this text encoder", "serve it", "stock's computation")
# Variants of stock's layers that ours cannot multiply with, because matrices are merged.
MERGED = {
    "merged_qkv": "its queries, keys and values are one matrix",
    "merged_mlp": "the two matrices of its feed-forward are one",
}


# ------------------------------------------------------------------------------------------------------------ whose it is


def encoders(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Each language model of a text encoder model, as a pair: stock's encoder around it, and the
    network."""
    for owner in model.modules():
        net = getattr(owner, "transformer", None)
        stack = getattr(net, "model", None)
        if isinstance(stack, stock.Llama2_) and has_these_blocks(stack.config) and not _is_merged(stack):
            yield owner, net


def _is_merged(stack: Any) -> bool:
    """Whether stock computes the stack because matrices are merged; the reason is reported once."""
    reason = next((why for name, why in MERGED.items() if getattr(stack.config, name, False)), None)
    if reason is not None:
        HAND_BACK(reason, stack.layers[0].input_layernorm.weight, forced=False)
    return reason is not None


def has_these_blocks(config: Any) -> bool:
    """Whether a language model of stock's class has the blocks of Qwen3 or Qwen3-VL: a norm for
    each head, SwiGLU, and rotary positions in one dimension, or in three that are interleaved."""
    wanted = {
        "transformer_type": "llama", "q_norm": "gemma3", "k_norm": "gemma3", "mlp_activation": "silu", "qkv_bias": False,
        "rms_norm_add": False, "rope_scale": None,
    }  # fmt: skip
    same = all(getattr(config, name) == value for name, value in wanted.items())
    turns_alike = config.rope_dims is None or getattr(config, "interleaved_mrope", False)
    return same and turns_alike and not isinstance(config.rope_theta, list)


def obstacle(
    blocks: Sequence[Any],
    x: Tensor,
    attention_mask: Tensor | None,
    policy: KernelPolicy,
    *,
    on_cpu: bool,
    runs: int | None = None,
) -> str | None:
    """Why stock must compute this call, in words a user understands; None if we may.

    x       [batch, tokens, width], the embeddings
    on_cpu  whether we also compute on the CPU
    runs    how many blocks are called; None: all. A change by another node counts in the others too
    """
    if not (x.is_cuda or (on_cpu and x.device.type == "cpu")):
        return f"the text encoder runs on the {x.device.type.upper()}"
    if x.dtype is not torch.float32:
        return f"the embeddings are {word(x)}, not float32"
    if torch.is_grad_enabled() and x.requires_grad:
        return GRADIENT
    if attention_mask is not None and attention_mask.shape != x.shape[:2]:
        return (
            f"the attention mask {list(attention_mask.shape)} is not one value for each of {list(x.shape[:2])} tokens"
        )
    for i, block in enumerate(blocks):
        is_called = runs is None or i < runs
        if is_called and policy.default != "on" and not is_at_hand(block, x.device):
            return (
                "its weights are in ComfyUI's own memory management; give its loader a vram_budget, -1 for what is free"
            )
        for module in modules_of(block):
            hooks = module._forward_hooks or module._forward_pre_hooks
            if is_called and module is block:
                hooks = None  # stock's `__call__` runs the hooks of the block itself
            if "forward" in module.__dict__ or hooks:
                return f"another node has changed how a {type(module).__name__} of the text encoder computes"
            if getattr(module, "pre_quant_scale", None) is not None:
                return "the weights are quantised in a way (AWQ) that only ComfyUI computes"
    return None


def is_at_hand(block: Any, device: torch.device) -> bool:
    """Whether a block's weights are on the device when it runs, because they stream or stay
    there."""
    if STREAMED in block.__dict__:
        return True
    return all(
        weight.device == device
        for module in modules_of(block)
        for weight in module._parameters.values()
        if weight is not None and weight.ndim > 1
    )


def modules_of(block: Any) -> Iterator[Any]:
    """The block and all modules within it. Quicker than `modules`, which also makes a name for
    each: every call asks this of every block."""
    waiting = [block]
    while waiting:
        module = waiting.pop()
        yield module
        waiting += [one for one in module._modules.values() if one is not None]


# ------------------------------------------------------------------------------------------------------------- its tokens


@dataclass(frozen=True)
class Seen:
    """Which tokens of a call are computed, and which of them are seen.

    tokens   how many are computed, from the first one on
    visible  [batch, tokens] bool, on the CPU; None: all are
    lengths  [batch] int32: the number of keys that are seen. None: all are, or `mask` says it
    mask     [batch, 1, 1, tokens] bool, where the visible keys do not come first
    """

    tokens: int
    visible: Tensor | None = None
    lengths: Tensor | None = None
    mask: Tensor | None = None

    @property
    def on_the_device(self) -> Seen:
        """The part that blocks read: without `visible`, which is on the CPU."""
        return replace(self, visible=None)


def seen(x: Tensor, attention_mask: Tensor | None, *, trims: bool) -> Seen:
    """Which tokens of x [batch, tokens, width] are computed and seen under a mask [batch, tokens].

    trims: the caller zeroes masked tokens, so those after the last visible one need not be computed
    """
    tokens = x.shape[1]
    if attention_mask is None:
        return Seen(tokens)
    # The comparison is stock's. `cpu()` waits for nothing, because the device has no work yet.
    visible = (attention_mask == 1).cpu()
    if trims:
        last = int((visible * torch.arange(1, tokens + 1)).amax()) if visible.numel() else 0
        tokens = min(tokens, -(-max(last, 1) // TILE) * TILE)
        visible = visible[:, :tokens]
    if bool(visible.all()):
        return Seen(tokens, visible)
    counts = visible.sum(1)
    if torch.equal(visible, torch.arange(tokens) < counts[:, None]):
        return Seen(tokens, visible, lengths=counts.to(x.device, torch.int32))
    return Seen(tokens, visible, mask=visible.to(x.device)[:, None, None])


def padded(x: Tensor, tokens: int) -> Tensor:
    """x [..., computed, width] with zeros for the tokens that were not computed."""
    return x if x.shape[-2] == tokens else nn.functional.pad(x, (0, 0, 0, tokens - x.shape[-2]))


# ---------------------------------------------------------------------------------------------------------- the embedding


class FusedEmbedding:
    """Mixed into the class of a fused encoder's token embedding, so that 2 GB do not cross the bus
    for a few rows."""

    fusestream_policy: KernelPolicy

    def forward(self, ids: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Stock's Embedding, but rows are picked on the table's device: ids [...] -> [...,
        width]."""
        module: Any = self
        patched = module.weight_function or getattr(module, "weight_lowvram_function", None) is not None
        forced = self.fusestream_policy.default == "on"
        if module.weight.device == ids.device or is_quantised(module.weight) or patched or not forced:
            found: Tensor = super().forward(ids, out_dtype=out_dtype)  # type: ignore[misc]
            return found
        return gather(module.weight, ids, out_dtype)


def gather(table: Tensor, ids: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """Rows of a table that is on another device than ids [...]: [..., width], on the ids'
    device."""
    rows = table[ids.to(table.device)].to(ids.device)
    return rows if out_dtype is None else rows.to(out_dtype)
