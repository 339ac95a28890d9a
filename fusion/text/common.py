"""What the text encoders that we compute have in common: which language models are ours, when a call of one is, which of its tokens
are computed, and how its table of tokens is looked up.
"""

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
# What a layer of stock's may have in the place of matrices that ours multiplies with.
MERGED = {
    "merged_qkv": "its queries, keys and values are one matrix",
    "merged_mlp": "the two matrices of its feed-forward are one",
}


# ------------------------------------------------------------------------------------------------------------ whose it is


def encoders(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Each language model of a text encoder model, and before it stock's encoder around it."""
    for owner in model.modules():
        net = getattr(owner, "transformer", None)
        stack = getattr(net, "model", None)
        if isinstance(stack, stock.Llama2_) and has_these_blocks(stack.config) and not _is_merged(stack):
            yield owner, net


def _is_merged(stack: Any) -> bool:
    """Whether stock computes it because matrices are one; that is said once."""
    reason = next((why for name, why in MERGED.items() if getattr(stack.config, name, False)), None)
    if reason is not None:
        HAND_BACK(reason, stack.layers[0].input_layernorm.weight, forced=False)
    return reason is not None


def has_these_blocks(config: Any) -> bool:
    """Of the language models that stock builds from this class, Qwen3's and Qwen3-VL's: norms of each head, SwiGLU, positions in
    one dimension or in three whose pairs lie among each other."""
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
    on_cpu  whether we compute there too
    runs    how many of the blocks do; None: all. What another node does to one that does not run has to be done all the same
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
                hooks = None  # it is called as ever
            if "forward" in module.__dict__ or hooks:
                return f"another node has changed how a {type(module).__name__} of the text encoder computes"
            if getattr(module, "pre_quant_scale", None) is not None:
                return "the weights are quantised in a way (AWQ) that only ComfyUI computes"
    return None


def is_at_hand(block: Any, device: torch.device) -> bool:
    """Whether a block's weights are on the device when it runs: because they stream, or because they stay there."""
    if STREAMED in block.__dict__:
        return True
    return all(
        weight.device == device
        for module in modules_of(block)
        for weight in module._parameters.values()
        if weight is not None and weight.ndim > 1
    )


def modules_of(block: Any) -> Iterator[Any]:
    """The block, and all within it. As `modules`, which also makes a name for each: every call asks this of every block."""
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
    lengths  [batch] int32: keys from there on are not seen. None: all are, or `mask` says it
    mask     [batch, 1, 1, tokens] bool, where the keys that are seen do not come first
    """

    tokens: int
    visible: Tensor | None = None
    lengths: Tensor | None = None
    mask: Tensor | None = None

    @property
    def on_the_device(self) -> Seen:
        """All that blocks look at."""
        return replace(self, visible=None)


def seen(x: Tensor, attention_mask: Tensor | None, *, trims: bool) -> Seen:
    """Of the embeddings x [batch, tokens, width] under a mask [batch, tokens].

    trims: what is not seen is zeroed by the caller, so that what comes behind the last token that is seen need not be computed
    """
    tokens = x.shape[1]
    if attention_mask is None:
        return Seen(tokens)
    # As stock reads it. The device has nothing to do yet that this would wait for.
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
    """What the class of a fused encoder's token embedding is mixed with: 2 GB do not cross the bus for some rows."""

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
