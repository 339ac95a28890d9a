"""The differences between the layers of language models, read off the configuration that stock
builds them from.

Stock has one class of stacks (`llama.Llama2_`) and two of layers. A layer is

    x += branch(o(attention(rope(norm(q(n))), rope(norm(k(n))), v(n))))      n = rms(x)
    x += branch(down(gate(first(n)) * second(n)))                            n = rms(x)

                          norm of heads   branch   gate   angles, and the keys that a query sees
    Llama 3, Mistral 3    none            -        SiLU   one table, all
    Qwen2.5, Qwen2.5-VL   none; biases    -        SiLU   one table, in up to three dimensions, all
    Qwen3, Qwen3-VL       RMS             -        SiLU   one table, in up to three dimensions, all
    Gemma 2               none            RMS      GELU   one table, all
    Gemma 3               RMS             RMS      GELU   two tables; in five of six layers 1024

Gemma's norms multiply by one more than their weight. Sizes, biases, and which queries share a key
are read off the modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from comfy.text_encoders import llama as stock
from torch import Tensor, nn

from ..base.hooks import LAYER_KIND
from ..weights.fp32_residual import Gate, norm_weight
from .common import HAND_BACK
from .encoder.described import GELU_TANH, SILU

# By stock's names.
GATES = {"silu": SILU, "gelu_pytorch_tanh": GELU_TANH}
NORMS = (None, "gemma3")  # of heads
TYPES = ("llama", "gemma2", "gemma3")
LAYERS = (stock.TransformerBlock, stock.TransformerBlockGemma2)
# Variants of stock's layers that ours cannot multiply with, because matrices are merged.
MERGED = {
    "merged_qkv": "its queries, keys and values are one matrix",
    "merged_mlp": "the two matrices of its feed-forward are one",
}


@dataclass(frozen=True)
class LayerKind:
    """The ways of a layer.

    gate           of its feed-forward
    norms_heads    each head of queries and keys has a norm. Without one they may be too large for
                   FP16, and attention is in FP32
    norms_branches the output of attention, and that of the feed-forward, is normalised before it is
                   added
    table          which of the stack's tables of angles turns its heads
    window         number of keys that a query sees, up to its own; None: all
    """

    gate: Gate
    norms_heads: bool
    norms_branches: bool
    table: int = 0
    window: int | None = None

    @property
    def kept(self) -> torch.dtype:
        """The type of keys and values that are kept for further tokens."""
        return torch.float16 if self.norms_heads else torch.float32

    def limit(self, keys: int) -> int:
        """How far a query sees back where there are so many keys, as attention takes it; -1: as far
        as it likes."""
        return -1 if self.window is None or keys <= self.window else self.window - 1


def kinds_of(stack: Any) -> Sequence[LayerKind] | str | None:
    """The kinds of a stack's layers. Or why stock has to compute them, in words a user understands;
    None: that is told elsewhere, because it is no stack of these layers."""
    config = stack.config
    if not all(isinstance(layer, LAYERS) for layer in stack.layers) or config.transformer_type not in TYPES:
        return None
    merged = next((why for name, why in MERGED.items() if getattr(config, name, False)), None)
    if merged is not None:
        return merged
    if config.q_norm not in NORMS or config.k_norm != config.q_norm or config.mlp_activation not in GATES:
        return "its layers are of a kind that is not known here"
    return [_kind(config, layer) for layer in stack.layers]


def encoders(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Each language model of a text encoder model whose layers are ours, as a pair: stock's encoder
    around it, and the network. Why one is stock's the ledger says once."""
    for owner in model.modules():
        net = getattr(owner, "transformer", None)
        stack = getattr(net, "model", None)
        if not isinstance(stack, stock.Llama2_):
            continue
        found = kinds_of(stack)
        if isinstance(found, str):
            HAND_BACK(found, stack.layers[0].input_layernorm.weight, forced=False)
        elif found is not None:
            yield owner, net


def _kind(config: Any, layer: Any) -> LayerKind:
    has_two_tables = config.transformer_type == "gemma3"
    window = getattr(layer, "sliding_attention", None) or None
    return LayerKind(
        gate=GATES[config.mlp_activation],
        norms_heads=config.q_norm is not None,
        norms_branches=isinstance(layer, stock.TransformerBlockGemma2),
        table=1 if has_two_tables and window else 0,
        window=window if has_two_tables else None,
    )


def kind_of(layer: Any) -> LayerKind:
    """The kind of a fused layer."""
    found: LayerKind = layer.__dict__[LAYER_KIND]
    return found


def branch_norms(layer: Any, kind: LayerKind) -> tuple[Any, Any, Any]:
    """Stock's norms: of the attention's output or None, of the feed-forward's input, and of its
    output or None."""
    if kind.norms_branches:
        return layer.post_attention_layernorm, layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm
    return None, layer.post_attention_layernorm, None


def factor_of(norm: Any, x: Tensor) -> Tensor:
    """What one of stock's norms multiplies by, on x's device, in a type that the ops take. Where
    that is one more than its weight, the sum is FP32; stock's is of the weight's type."""
    weight = norm_weight(norm.weight, x)
    return weight.float() + 1 if norm.add else weight


def embedding_scale(config: Any) -> float:
    """What stock multiplies the rows of the token table by."""
    return 1.0 if config.transformer_type == "llama" else float(config.hidden_size) ** 0.5
