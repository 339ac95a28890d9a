"""Code shared by our text encoders: which calls are ours, and how the token embedding is looked
up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels_cuda import KernelPolicy
from ...kernels_cuda.ops.views.checks import word
from ...kernels_cuda.registry import GRADIENT
from ..base.hooks import STREAMED
from ..fused.block import HandBack
from ..weights.storage import is_quantised

HAND_BACK = HandBack("text encoder", "fused", "this text encoder", "serve it", "stock's computation")


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


# ---------------------------------------------------------------------------------------------------------- the embedding


class FusedEmbedding:
    """Mixed into the class of a fused encoder's token embedding, so that 2 GB do not cross the bus
    for a few rows."""

    fusestream_policy: KernelPolicy
    fusestream_scale: float = 1.0

    def forward(self, ids: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Stock's Embedding, but rows are picked on the table's device: ids [...] -> [..., width],
        times a scale."""
        module: Any = self
        patched = module.weight_function or getattr(module, "weight_lowvram_function", None) is not None
        forced = self.fusestream_policy.default == "on"
        if module.weight.device == ids.device or is_quantised(module.weight) or patched or not forced:
            found: Tensor = super().forward(ids, out_dtype=out_dtype)  # type: ignore[misc]
            return found
        rows = gather(module.weight, ids, out_dtype)
        return rows if self.fusestream_scale == 1 else rows * self.fusestream_scale


def gather(table: Tensor, ids: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """Rows of a table that is on another device than ids [...]: [..., width], on the ids'
    device."""
    rows = table[ids.to(table.device)].to(ids.device)
    return rows if out_dtype is None else rows.to(out_dtype)
