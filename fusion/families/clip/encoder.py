"""CLIP's text encoders over our kernels: stock's modules, computing in FP16 around an FP32 residual
stream.

    x ─ norm ─ q, k, v ─ causal attention ─ out_proj, + x ─ norm ─ fc1, GELU, fc2, + x

Stock computes them in FP32 and widens every weight at every use. Here products are FP16 with FP32
sums (`weights/fp32_residual.py`). CLIP-L has the quick GELU, x * sigmoid(1.702 x). CLIP-G has the
exact one, which is computed in the product's epilogue, or where its sums are added up.

`fuse` gives the encoder and its layers a `forward` of ours, in place. Layers are still called as
modules, so their weights may stream. Embeddings, the last norm, pooling and its projection stay
stock's, and so do clip skip, chunks of long prompts, their weights, and textual inversion.
`text/common.py` says which calls are left to stock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.clip_model as stock
import comfy.model_management
import torch
from torch import Tensor, nn

from ....kernels_cuda import STANDARD, KernelPolicy, attention, gelu
from ....kernels_cuda.ops.matmul.linear import Activation
from ....kernels_cuda.ops.views.parts import join, split
from ...base.policy import all_off, standing
from ...base.subclassing import mix
from ...text import common
from ...text.common import HAND_BACK
from ...weights.fp32_residual import Wide
from ...weights.operands import operands

OPS = ("norm_modulate", "linear", "linear_", "join_sums", "attention", "gelu")
QUICK = id(stock.ACTIVATIONS["quick_gelu"])
IN_PRODUCTS: dict[int, Activation] = {
    id(stock.ACTIVATIONS["gelu"]): "gelu",
    id(stock.ACTIVATIONS["gelu_pytorch_tanh"]): "gelu_tanh",
}


@dataclass(frozen=True)
class Prompt:
    """Arguments shared by all layers of one call.

    wide     how to compute
    visible  [batch, 1, tokens, tokens] bool: which keys a query sees; None: all up to its own
    """

    wide: Wide
    visible: Tensor | None


def fuse(model: nn.Module, policy: KernelPolicy = STANDARD, *, on_cpu: bool = False) -> int:
    """Let all CLIPs in a stock text encoder model compute through our ops, in place. Returns how
    many layers, 0 if all is left to stock.

    on_cpu: on the CPU too, where the ops run their references: for tests.
    """
    fused = 0
    for encoder in () if all_off(policy, OPS) else encoders(model):
        mix(encoder, FusedEncoder, **standing(policy), fusestream_on_cpu=on_cpu)
        for layer in encoder.layers:
            mix(layer, FusedLayer)
            fused += 1
    return fused


def encoders(model: nn.Module) -> Iterator[Any]:
    """The encoder (its layers) of each CLIP for text in a text encoder model."""
    for owner in model.modules():
        net = getattr(owner, "transformer", None)
        if isinstance(net, stock.CLIPTextModel):
            yield net.text_model.encoder


# -------------------------------------------------------------------------------------------------------- the encoder


class FusedEncoder:
    """Mixed into the class of a fused CLIPEncoder. fusestream_on_cpu: also computes on the CPU,
    over the references."""

    fusestream_policy: KernelPolicy
    fusestream_on_cpu: bool

    def forward(
        self, x: Tensor, mask: Tensor | None = None, intermediate_output: int | str | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Stock's CLIPEncoder: x [batch, tokens, width] fp32; mask is added to scores, the causal
        one [tokens, tokens], or with padding [batch, 1, tokens, tokens]. Returns the output of the
        last layer and, if asked for, of another layer or of all."""
        policy = self.fusestream_policy
        if not all_off(policy, OPS):
            reason = obstacle(self, x, mask)
            if reason is None:
                visible = None if mask is None or mask.ndim == 2 else mask >= 0
                return encode(self, Prompt(Wide(policy), visible), x, intermediate_output)
            HAND_BACK(reason, x, forced=policy.default == "on", quietly=not x.is_cuda)
        found: tuple[Tensor, Tensor | None] = super().forward(  # type: ignore[misc]
            x, mask=mask, intermediate_output=intermediate_output
        )
        return found


def encode(
    encoder: Any, prompt: Prompt, x: Tensor, intermediate_output: int | str | None
) -> tuple[Tensor, Tensor | None]:
    """Run the layers one after the other over a copy of x."""
    wanted = range(len(encoder.layers))[intermediate_output] if isinstance(intermediate_output, int) else None
    x, kept = x.clone(memory_format=torch.contiguous_format), []
    for i, layer in enumerate(encoder.layers):
        x = layer(x, prompt)
        if intermediate_output == "all" or i == wanted:
            kept.append(x.clone())
    if intermediate_output == "all":
        return x, torch.stack(kept, 1)
    return x, kept[0] if kept else None


def obstacle(encoder: Any, x: Tensor, mask: Tensor | None) -> str | None:
    """Why stock must compute this call, in words a user understands; None if we may."""
    reason = common.obstacle(encoder.layers, x, None, encoder.fusestream_policy, on_cpu=encoder.fusestream_on_cpu)
    if reason is not None:
        return reason
    if any(id(getattr(layer.mlp, "activation", None)) not in (QUICK, *IN_PRODUCTS) for layer in encoder.layers):
        return "the feed-forward has an activation that is not known here"
    if mask is None or mask.shape[-2:] != (x.shape[1], x.shape[1]):
        return "the attention has not the mask of a text"
    return None


# ---------------------------------------------------------------------------------------------------------- the layer


class FusedLayer:
    """Mixed into the class of a fused CLIPLayer."""

    def forward(self, x: Tensor, mask: Any = None, optimized_attention: Any = None) -> Tensor:
        """Stock's CLIPLayer. If the encoder is ours, `mask` is its `Prompt`, and x [batch, tokens,
        width] its own fp32 stream, which is added to in place; otherwise it is a call of
        stock's."""
        if not isinstance(mask, Prompt):
            found: Tensor = super().forward(x, mask, optimized_attention)  # type: ignore[misc]
            return found
        # Stock's operations ask this; ours do not.
        comfy.model_management.throw_exception_if_processing_interrupted()
        attend(self, x, mask)
        feed_forward(self, x, mask.wide)
        return x


def attend(layer: Any, x: Tensor, prompt: Prompt) -> None:
    """x += attention(norm(x))."""
    module, wide = layer.self_attn, prompt.wide
    parts = wide.projections(wide.normed(layer.layer_norm1, x), (module.q_proj, module.k_proj, module.v_proj))
    q, k, v = (part.view(*part.shape[:2], module.heads, -1) for part in parts)
    out = attention(q, k, v, prompt.visible, causal=prompt.visible is None, policy=wide.ops)
    wide.add(x, [out.flatten(2)], module.out_proj)


def feed_forward(layer: Any, x: Tensor, wide: Wide) -> None:
    """x += fc2(GELU(fc1(norm(x))))."""
    mlp = layer.mlp
    h = wide.normed(layer.layer_norm2, x)
    kind = IN_PRODUCTS.get(id(mlp.activation))
    hidden = quick(h, mlp.fc1, wide) if kind is None else wide.activated(h, mlp.fc1, kind)
    wide.add(x, hidden, mlp.fc2)


def quick(h: Tensor, module: Any, wide: Wide) -> Sequence[Tensor]:
    """Like `Wide.activated`, for the GELU that no product has in its epilogue."""
    with operands(h, wide.ops, module) as [own]:
        sums = wide.product(h, own.matrix, own.bias)
    if wide.splits:
        return split(gelu(join(sums), "quick", policy=wide.ops)).unbind()
    return (gelu(sums, "quick", policy=wide.ops),)
