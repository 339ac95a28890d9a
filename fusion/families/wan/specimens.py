"""Small specimens of stock's Wan blocks.

Both kinds of cross-attention, patches on attention, one modulation for the video and one for each
frame, and VACE's side branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import comfy.ldm.flux.math
import comfy.ldm.wan.model as stock
from torch import Tensor

from ...base.specimen import Draw, Options, Specimen
from .block import Block, ImageAttention, TextAttention, VaceBlock, _Fused, _FusedVace, fuse

HEADS, SIZE, HIDDEN = 2, 64, 192
DIM = HEADS * SIZE
FRAMES, ROWS, COLUMNS = 2, 2, 3
TOKENS = FRAMES * ROWS * COLUMNS
TEXT, PICTURE = 7, 5
SOURCE = (stock, comfy.ldm.flux.math)


def specimens() -> Sequence[Specimen]:
    texts = partial(_built, "t2v_cross_attn")
    return (
        _specimen("Wan block", texts, _called, (TextAttention,)),
        _specimen(
            "Wan block without norms of its own",
            partial(_built, "t2v_cross_attn", norms=False),
            _called,
            (TextAttention,),
        ),
        _specimen("Wan block with a modulation for each frame", texts, _called_by_frames, (TextAttention,)),
        _specimen("Wan block that sees a picture", partial(_built, "i2v_cross_attn"), _called, (ImageAttention,)),
        Specimen(
            "VACE block",
            _built_vace,
            _called_vace,
            fuse,
            {_Fused: Block, _FusedVace: VaceBlock},
            (*SOURCE, VaceBlock),
        ),
    )


def _specimen(name: str, build: Any, call: Any, kinds: tuple[Any, ...]) -> Specimen:
    source = (*SOURCE, stock.WanSelfAttention, *kinds)
    patches = dict.fromkeys(("attn1_patch", "attn2_patch"), _patched)
    return Specimen(name, build, call, fuse, {_Fused: Block}, source, patches=patches)


def _patched(given: dict[str, Any]) -> Tensor:
    """A node's patch, whose result also depends on q and k."""
    x: Tensor = given["x"] * 1.1
    for name, share in (("q", 0.1), ("k", 0.3)):
        if name in given:
            x = x + share * given[name].flatten(2)
    return x


def _built(attention: str, draw: Draw, *, norms: bool = True) -> Any:
    kind = {"qk_norm": norms, "cross_attn_norm": norms, "operation_settings": _settings(draw)}
    return Block(attention, DIM, HIDDEN, HEADS, **kind)


def _built_vace(draw: Draw) -> Any:
    return VaceBlock(
        "t2v_cross_attn", DIM, HIDDEN, HEADS, cross_attn_norm=True, block_id=0, operation_settings=_settings(draw)
    )


def _settings(draw: Draw) -> dict[str, Any]:
    return {"operations": draw.operations, "device": draw.device, "dtype": draw.dtype}


def _called(block: Any, draw: Draw, options: Options) -> Tensor:
    x = draw.large_and_small(2, TOKENS, DIM)
    e = draw(2, 6, DIM)
    out: Tensor = block(x, e=e, transformer_options=options, **_beside(draw))
    return out


def _called_by_frames(block: Any, draw: Draw, options: Options) -> Tensor:
    x = draw.large_and_small(2, TOKENS, DIM)
    e = draw(2, FRAMES, 6, DIM)
    out: Tensor = block(x, e=e, transformer_options=options, **_beside(draw))
    return out


def _called_vace(block: Any, draw: Draw, options: Options) -> tuple[Tensor, Tensor]:
    c, x = draw.large_and_small(2, TOKENS, DIM), draw.large_and_small(2, TOKENS, DIM)
    e = draw(2, 6, DIM)
    out: tuple[Tensor, Tensor] = block(c, x=x, e=e, transformer_options=options, **_beside(draw))
    return out


def _beside(draw: Draw) -> dict[str, Any]:
    """Rotations and context. The rotations are made as in stock's network, one for each pair of a
    head's numbers."""
    places = draw(1, TOKENS, scale=3.0).abs().float()
    freqs = comfy.ldm.flux.math.rope(places, SIZE, 10000).unsqueeze(2)
    return {"freqs": freqs, "context": draw(2, PICTURE + TEXT, DIM), "context_img_len": PICTURE}
