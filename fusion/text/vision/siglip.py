"""SigLIP over our kernels, the vision tower of Gemma 3: stock's CLIPVision, computing in FP16 around
an FP32 stream.

    patches ─ convolution, + places ─ CLIPEncoder ─ norm ─ mean of 4 x 4 neighbours, norm, product

Its layers are CLIP's (`text/encoder/clip.py`), without a mask: all patches see each other. Heads of
72 are padded.

The rest stays stock's. A convolution, two norms and a product of the 256 means that the language
model gets of 4096 patches are less than a hundredth of the arithmetic. A picture is shrunk to
896x896 and rounded to 8 bits on the CPU: on a card, which adds in another order, some numbers would
be rounded to the other side, and a large picture would lie there whole.

Only towers in text encoder models are fused. CLIP Vision loaders are ComfyUI's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from comfy import clip_model as stock
from torch import nn

from ....kernels_cuda import KernelPolicy
from ...base.policy import all_off
from ..encoder import clip

OPS = clip.OPS


def fuse(model: nn.Module, policy: KernelPolicy, *, on_cpu: bool) -> int:
    """Let all SigLIPs in a stock text encoder model compute through our ops, in place. Returns how
    many layers."""
    if all_off(policy, OPS):
        return 0
    return sum(clip.fuse_encoder(tower.encoder, policy, on_cpu=on_cpu) for tower in towers(model))


def towers(model: nn.Module) -> Iterator[Any]:
    """The SigLIPs in a model."""
    return (module for module in model.modules() if isinstance(module, stock.CLIPVision))
