"""CLIP's text encoders over our kernels: stock's modules, computing in FP16 around an FP32 residual
stream.

The encoder and its layers get a `forward` of ours, in place (`text/encoder/clip.py`). Embeddings,
the last norm, pooling and its projection stay stock's, and so do clip skip, chunks of long prompts,
their weights, and textual inversion. `text/common.py` says which calls are left to stock.

CLIP's other half, the tower for pictures, is loaded by ComfyUI's own loaders, and is theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import comfy.clip_model as stock
from torch import nn

from ....kernels_cuda import STANDARD, KernelPolicy
from ...base.policy import all_off
from ...text.encoder.clip import OPS, fuse_encoder

__all__ = ["OPS", "encoders", "fuse"]


def fuse(model: nn.Module, policy: KernelPolicy = STANDARD, *, on_cpu: bool = False) -> int:
    """Let all CLIPs in a stock text encoder model compute through our ops, in place. Returns how
    many layers, 0 if all is left to stock.

    on_cpu: on the CPU too, where the ops run their references: for tests.
    """
    if all_off(policy, OPS):
        return 0
    return sum(fuse_encoder(encoder, policy, on_cpu=on_cpu) for encoder in encoders(model))


def encoders(model: nn.Module) -> Iterator[Any]:
    """The encoder (its layers) of each CLIP for text in a text encoder model."""
    for owner in model.modules():
        net = getattr(owner, "transformer", None)
        if isinstance(net, stock.CLIPTextModel):
            yield net.text_model.encoder
