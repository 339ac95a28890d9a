"""Small specimens of stock's Qwen-Image blocks: as they are for a prompt and a picture, with a mask
over the prompt, and with pictures of reference at timestep zero. Each in all types in which a
stream may be ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import comfy.ldm.flux.math
import comfy.ldm.qwen_image.model as stock
import torch
from torch import Tensor

from ....kernels_cuda.ops.views.checks import word
from ...base.specimen import Draw, Options, Specimen
from ...fused.block import AROUND_FP32
from .block import _Fused, fuse

HEADS, SIZE = 2, 64
DIM = HEADS * SIZE
TEXT, PICTURE = 7, 12
REFERENCES = 4  # tokens of the picture at timestep zero
SOURCE = (stock, comfy.ldm.flux.math)


def specimens() -> Sequence[Specimen]:
    return (
        _specimen("Qwen-Image block", _called),
        _specimen("Qwen-Image block with a mask", _masked),
        _specimen("Qwen-Image block with references", _with_references),
    )


def _specimen(name: str, call: Any) -> Specimen:
    types = tuple(map(word, AROUND_FP32))
    replaces: dict[type, type] = {_Fused: stock.QwenImageTransformerBlock}
    patches: dict[str, Any] = {"attn1_patch": _patched}
    return Specimen(name, _built, call, fuse, replaces, SOURCE, types, patches=patches)


def _patched(
    q: Tensor, k: Tensor, v: Tensor, pe: Tensor, attn_mask: Tensor | None, extra_options: dict[str, Any]
) -> dict[str, Any]:
    """A node's patch before RoPE."""
    assert pe.shape[-3] == q.shape[-1] // 2
    first, _ = extra_options["img_slice"]
    return {"q": q + 0.1 * first, "k": 1.1 * k, "v": v + 0.1 * q, "attn_mask": attn_mask}


def _built(draw: Draw) -> Any:
    """The weights are fp16 even if the model's stream is fp32, and stock casts them."""
    settings: dict[str, Any] = {"operations": draw.operations, "device": draw.device, "dtype": torch.float16}
    return stock.QwenImageTransformerBlock(DIM, HEADS, SIZE, **settings)


def _called(
    block: Any, draw: Draw, options: Options, mask: Tensor | None = None, zero: int | None = None
) -> list[Tensor]:
    picture, text = draw.large_and_small(2, PICTURE, DIM), draw.large_and_small(2, TEXT, DIM)
    temb = draw(2 if zero is None else 4, DIM)
    turns = _turns(draw)
    return [
        *block(
            hidden_states=picture,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=mask,
            temb=temb,
            image_rotary_emb=turns,
            timestep_zero_index=zero,
            transformer_options=options,
        )
    ]


def _masked(block: Any, draw: Draw, options: Options) -> list[Tensor]:
    """The last tokens of the prompt are not seen."""
    mask = draw(1, TEXT, scale=0.1)
    mask[:, -2:] = -torch.finfo(mask.dtype).max
    return _called(block, draw, options, mask)


def _with_references(block: Any, draw: Draw, options: Options) -> list[Tensor]:
    return _called(block, draw, options, zero=PICTURE - REFERENCES)


def _turns(draw: Draw) -> Tensor:
    """Rotations [1, 1, tokens, size / 2, 2, 2], in the stream's type."""
    places = draw(1, TEXT + PICTURE, scale=3.0, dtype=torch.float32).abs()
    turns: Tensor = comfy.ldm.flux.math.rope(places, SIZE, 10000).unsqueeze(1)
    return turns.to(draw.dtype)
