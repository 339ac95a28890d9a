"""Small specimens of stock's Flux blocks.

Flux.1 makes shift, scale and gate in each block, and has biases and a GELU. Flux.2 is given them,
has no biases, and gates by SiLU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import comfy.ldm.flux.layers as stock
import comfy.ldm.flux.math
import torch
from torch import Tensor

from ...base.specimen import Draw, Options, Specimen
from .fused import _FusedDouble, _FusedSingle, fuse

HEADS, SIZE = 2, 64
DIM = HEADS * SIZE
TEXT, PICTURE = 7, 12
REFERENCES = 4  # tokens of the picture at timestep zero
SOURCE = (stock, comfy.ldm.flux.math, stock.QKNorm, stock.SelfAttention, stock.Modulation, stock.SiLUActivation)


def specimens() -> Sequence[Specimen]:
    double: dict[type, type] = {_FusedDouble: stock.DoubleStreamBlock}
    single: dict[type, type] = {_FusedSingle: stock.SingleStreamBlock}
    return (
        _specimen("Flux.1 double block", partial(_double, of_flux2=False), _both, double),
        _specimen("Flux.2 double block", partial(_double, of_flux2=True), _both, double),
        _specimen("Flux.1 single block", partial(_single, of_flux2=False), _one, single),
        _specimen("Flux.2 single block", partial(_single, of_flux2=True), _one, single),
    )


def _specimen(name: str, build: Any, call: Any, replaces: dict[type, type]) -> Specimen:
    patches: dict[str, Any] = {"attn1_patch": _patched, "attn1_output_patch": _patched_behind}
    return Specimen(name, build, call, fuse, replaces, SOURCE, patches=patches)


def _patched(
    q: Tensor, k: Tensor, v: Tensor, pe: Tensor, attn_mask: Tensor | None, extra_options: dict[str, Any]
) -> dict[str, Any]:
    """A node's patch before RoPE. Only double blocks tell the place of the picture."""
    assert pe.shape[-3] == q.shape[-1] // 2
    first, _ = extra_options.get("img_slice", (0, 0))
    return {"q": q + 0.1 * first, "k": 1.1 * k, "v": v + 0.1 * q, "attn_mask": attn_mask}


def _patched_behind(seen: Tensor, extra_options: dict[str, Any]) -> Tensor:
    first: int = extra_options.get("img_slice", (0, 0))[0]
    return seen * (1.1 + 0.01 * first)


def _double(draw: Draw, *, of_flux2: bool) -> Any:
    kind = {"modulation": False, "mlp_silu_act": True, "proj_bias": False} if of_flux2 else {"qkv_bias": True}
    return stock.DoubleStreamBlock(DIM, HEADS, 3.0, **kind, **_settings(draw))


def _single(draw: Draw, *, of_flux2: bool) -> Any:
    kind = {"modulation": False, "mlp_silu_act": True, "bias": False} if of_flux2 else {}
    return stock.SingleStreamBlock(DIM, HEADS, 3.0, **kind, **_settings(draw))


def _settings(draw: Draw) -> dict[str, Any]:
    return {"operations": draw.operations, "device": draw.device, "dtype": draw.dtype}


def _both(block: Any, draw: Draw, options: Options) -> list[Tensor]:
    """With one modulation for all tokens, and with another one for the tokens of references."""
    found = []
    for segments in (None, ((0, PICTURE - REFERENCES, 0), (PICTURE - REFERENCES, PICTURE, 1))):
        img, txt = draw.large_and_small(2, PICTURE, DIM), draw.large_and_small(2, TEXT, DIM)
        rows = 1 if segments is None else 2
        vec = (_mod(draw, rows, 2), _mod(draw, 1, 2)) if not block.modulation else draw(2, rows, DIM)
        of_text = None if segments is None or not block.modulation else ((0, TEXT, 0),)
        pe = _turns(draw, TEXT + PICTURE)
        found += block(
            img=img,
            txt=txt,
            vec=vec,
            pe=pe,
            attn_mask=_mask(draw, TEXT + PICTURE) if segments is None else None,
            modulation_dims_img=segments,
            modulation_dims_txt=of_text,
            transformer_options=options,
        )
    return found


def _one(block: Any, draw: Draw, options: Options) -> list[Tensor]:
    """The same for the joint stream."""
    found, tokens = [], TEXT + PICTURE
    for segments in (None, ((0, tokens - REFERENCES, 0), (tokens - REFERENCES, tokens, 1))):
        x = draw.large_and_small(2, tokens, DIM)
        rows = 1 if segments is None else 2
        vec = draw(2, rows, DIM) if block.modulation else _mod(draw, rows, 1)[0]
        pe = _turns(draw, tokens)
        mask = _mask(draw, tokens) if segments is None else None
        found.append(block(x, vec=vec, pe=pe, attn_mask=mask, modulation_dims=segments, transformer_options=options))
    return found


def _mod(draw: Draw, rows: int, count: int) -> list[Any]:
    return [stock.ModulationOut(*(draw(2, rows, DIM) for _ in range(3))) for _ in range(count)]


def _mask(draw: Draw, tokens: int) -> Tensor:
    """Added to scores, so that some tokens of each prompt are hardly seen."""
    return draw(2, 1, tokens, tokens)


def _turns(draw: Draw, tokens: int) -> Tensor:
    """Rotations [1, 1, tokens, size / 2, 2, 2]."""
    places = draw(1, tokens, scale=3.0, dtype=torch.float32).abs()
    turns: Tensor = comfy.ldm.flux.math.rope(places, SIZE, 10000).unsqueeze(1)
    return turns
