"""Small specimens of stock's Z-Image blocks.

Z-Image's own, with as many keys as queries; Lumina Image 2's, with fewer and a SiLU before its
modulation; those of the prompt, without modulation. Each in all types in which a stream may be
ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import comfy.ldm.flux.math
import comfy.ldm.lumina.model as stock
import torch
from torch import Tensor

from ....kernels_cuda.ops.views.checks import word
from ...base.specimen import Draw, Options, Specimen
from ...fused.block import AROUND_FP32
from .block import _Fused, fuse

HEADS, SIZE = 2, 64
DIM = HEADS * SIZE
TOKENS, REFERENCES = 12, 4
SOURCE = (stock, comfy.ldm.flux.math, stock.JointAttention, stock.FeedForward)
Segments = tuple[tuple[int, int], ...]


def specimens() -> Sequence[Specimen]:
    return (
        _specimen("Z-Image block", _called, z_image_modulation=True),
        _specimen("Z-Image block with references", _with_references, z_image_modulation=True),
        _specimen("Lumina block", _called, n_kv_heads=1),
        _specimen("Z-Image block of the prompt", _unmodulated, modulation=False),
    )


def _specimen(name: str, call: Any, **kind: Any) -> Specimen:
    types = tuple(map(word, AROUND_FP32))
    replaces: dict[type, type] = {_Fused: stock.JointTransformerBlock}
    return Specimen(name, partial(_built, **kind), call, fuse, replaces, SOURCE, types)


def _built(draw: Draw, **kind: Any) -> Any:
    """The weights are fp16 even if the model's stream is fp32, and stock casts them."""
    sizes = {"layer_id": 0, "dim": DIM, "n_heads": HEADS, "multiple_of": 64, "ffn_dim_multiplier": 1.5}
    settings = {"operations": draw.operations, "device": draw.device, "dtype": torch.float16}
    rest = {"n_kv_heads": HEADS, "norm_eps": 1e-5, "qk_norm": True, "operation_settings": settings}
    return stock.JointTransformerBlock(**{**sizes, **rest, **kind})


def _called(block: Any, draw: Draw, options: Options, zero: Segments | None = None) -> Tensor:
    x = draw.large_and_small(2, TOKENS, DIM)
    mask = None if zero else (draw(2, 1, 1, TOKENS) > -1).expand(2, 1, TOKENS, TOKENS)
    adaln = draw(4 if zero else 2, DIM)
    out: Tensor = block(x, mask, _turns(draw), adaln, timestep_zero_index=zero, transformer_options=options)
    return out


def _with_references(block: Any, draw: Draw, options: Options) -> Tensor:
    return _called(block, draw, options, ((TOKENS - REFERENCES, TOKENS),))


def _unmodulated(block: Any, draw: Draw, options: Options) -> Tensor:
    x = draw.large_and_small(2, TOKENS, DIM)
    out: Tensor = block(x, None, _turns(draw), transformer_options=options)
    return out


def _turns(draw: Draw) -> Tensor:
    """Rotations [1, tokens, 1, size / 2, 2, 2]."""
    places = draw(1, TOKENS, scale=3.0, dtype=torch.float32).abs()
    turns: Tensor = comfy.ldm.flux.math.rope(places, SIZE, 10000).unsqueeze(2)
    return turns
