"""Small specimens of stock's LTX-2 blocks.

LTX-2's, and LTX-2.3's with gates of heads and a modulated prompt. Both kinds of rotations, masks of
the text and of a video with guides, timesteps of the clip, of frames and of tokens, and a video
without sound. Each in all types in which a stream may be ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import comfy.ldm.common_dit
import comfy.ldm.lightricks.av_model as stock
import comfy.ldm.lightricks.model as layers
import torch
from torch import Tensor

from ....kernels_cuda.ops.views.checks import word
from ...base.specimen import Draw, Options, Specimen
from ...fused.block import AROUND_FP32
from .block import _Fused, fuse

HEADS, SIZE, SOUND_SIZE = 2, 64, 32
DIM, SOUND = HEADS * SIZE, HEADS * SOUND_SIZE
FRAMES, PIXELS, STEPS, TEXT = 3, 4, 5, 7
TOKENS = FRAMES * PIXELS
SOURCE = (
    stock,
    layers,
    comfy.ldm.common_dit,
    layers.CrossAttention,
    layers.FeedForward,
    layers.GELU_approx,
    layers.GuideAttentionMask,
    stock.CompressedTimestep,
)


def specimens() -> Sequence[Specimen]:
    newer = {"apply_gated_attention": True, "cross_attention_adaln": True}
    return (
        _specimen("LTX-2 block", _called),
        _specimen("LTX-2 block that turns pairs, with guides", partial(_called, halves=False, guides=True)),
        _specimen("LTX-2.3 block", partial(_called, steps=FRAMES), **newer),
        _specimen("LTX-2.3 block with timesteps of tokens", partial(_called, steps=TOKENS), **newer),
        _specimen("LTX-2.3 block without sound", partial(_called, sound=0), **newer),
    )


def _specimen(name: str, call: Any, **kind: Any) -> Specimen:
    types = tuple(map(word, AROUND_FP32))
    replaces: dict[type, type] = {_Fused: stock.BasicAVTransformerBlock}
    return Specimen(name, partial(_built, **kind), call, fuse, replaces, SOURCE, types)


def _built(draw: Draw, **kind: Any) -> Any:
    """The weights are fp16 even if the model's streams are fp32, and stock casts them."""
    settings = {"operations": draw.operations, "device": draw.device, "dtype": torch.float16}
    return stock.BasicAVTransformerBlock(
        DIM, SOUND, HEADS, HEADS, SIZE, SOUND_SIZE, v_context_dim=DIM, a_context_dim=SOUND, **kind, **settings
    )


def _called(
    block: Any,
    draw: Draw,
    options: Options,
    steps: int = 1,
    sound: int = STEPS,
    *,
    halves: bool = True,
    guides: bool = False,
) -> tuple[Tensor, Tensor]:
    """steps: timesteps of the video. sound: tokens of it. halves: whether a head's halves turn
    together. guides: whether tokens of guides are at the video's end."""
    streams = draw.large_and_small(2, TOKENS, DIM), draw.large_and_small(2, sound, SOUND)
    rows = block.scale_shift_table.shape[0]
    mask = torch.where(draw(2, 1, 1, TEXT) > -1, 0.0, torch.finfo(draw.dtype).min).to(streams[0])
    weights = draw(1, 2 * PIXELS, dtype=torch.float32).abs().clamp(0.1, 1).to(draw.dtype)
    guide = layers.GuideAttentionMask(TOKENS, PIXELS, 2 * PIXELS, weights)
    found: tuple[Tensor, Tensor] = block(
        streams,
        v_context=draw(2, TEXT, DIM),
        a_context=draw(2, TEXT, SOUND),
        attention_mask=mask,
        v_timestep=_timestep(draw, steps, rows, DIM),
        a_timestep=draw(2, 1, rows * SOUND),
        v_pe=_turns(draw, TOKENS, SIZE, halves),
        a_pe=_turns(draw, sound, SOUND_SIZE, halves),
        v_cross_pe=_turns(draw, TOKENS, SOUND_SIZE, halves),
        a_cross_pe=_turns(draw, sound, SOUND_SIZE, halves),
        v_cross_scale_shift_timestep=_timestep(draw, steps, 4, DIM),
        a_cross_scale_shift_timestep=draw(2, 1, 4 * SOUND),
        v_cross_gate_timestep=_timestep(draw, steps, 1, DIM),
        a_cross_gate_timestep=draw(2, 1, SOUND),
        transformer_options=options,
        self_attention_mask=guide if guides else None,
        v_prompt_timestep=draw(2, 1, 2 * DIM),
        a_prompt_timestep=draw(2, 1, 2 * SOUND),
    )
    return found


def _timestep(draw: Draw, steps: int, rows: int, width: int) -> Any:
    """As stock has it for a video: of frames where it can."""
    drawn = draw(2, steps, rows * width)
    per_frame = steps == FRAMES
    return stock.CompressedTimestep(drawn, PIXELS if per_frame else None, per_frame=per_frame)


def _turns(draw: Draw, tokens: int, size: int, halves: bool) -> tuple[Tensor, bool]:
    """Rotations, each head's own."""
    angles = draw(1, tokens, HEADS * size // 2, scale=3.0, dtype=torch.float32)
    found: tuple[Tensor, bool] = layers.freqs_cis_matrix(angles, 0, halves, HEADS, draw.dtype)
    return found
