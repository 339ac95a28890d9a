"""Which of a text encoder's networks are language models that ours compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from comfy.text_encoders import llama as stock
from torch import nn

from .common import HAND_BACK

# What a layer of stock's may have in the place of matrices that ours multiplies with.
MERGED = {
    "merged_qkv": "its queries, keys and values are one matrix",
    "merged_mlp": "the two matrices of its feed-forward are one",
}


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
