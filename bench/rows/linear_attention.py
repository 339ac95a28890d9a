"""linear_attention at the shapes of Sana's blocks, of Wan's tokens, of language models, and over random features.

A perfect kernel reads q, k and v and writes the result. Ours also writes the sums of its chunks; where heads are of 128, and over
random features, the tensor cores have as much to do as the memory. Stock is what diffusers does for Sana, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...kernels_cuda.ops.attention.linear_attention import stock
from ..row import Row, Tensors


def packed(b: int, s: int, h: int, d: int, features: int) -> Callable[[], Tensors]:
    """Self attention: views of one packed projection."""

    def make() -> Tensors:
        q, k, v = torch.randn(b, s, 3, h, d, device="cuda", dtype=torch.float16).unbind(2)
        return q, k, v, torch.randn(features, d, device="cuda").half() if features else None

    return make


SHAPES = [
    ("Sana 1.6B 1024x1024, cond and uncond", "relu", False, (2, 1024, 70, 32), 0),
    ("Sana 1.6B 4096x4096", "relu", False, (1, 16384, 70, 32), 0),
    ("head 64", "elu", False, (1, 16384, 24, 64), 0),
    ("tokens of Wan 1.3B 480x832x81", "elu", False, (1, 32760, 12, 128), 0),
    ("causal", "elu", True, (1, 8192, 16, 128), 0),
    ("causal, head 64", "elu", True, (1, 32768, 16, 64), 0),
    ("random features", "softmax", False, (1, 16384, 24, 64), 256),
]

ROWS = [
    Row(
        "linear_attention",
        f"{label}: {'x'.join(map(str, shape))} {feature_map}{f' {features}' if features else ''}",
        packed(*shape, features),
        (feature_map, causal, None, 1e-6),
        stock,
    )
    for label, feature_map, causal, shape, features in SHAPES
]
