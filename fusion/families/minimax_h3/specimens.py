"""Small specimens of stock's MiniMax H3 blocks: of a whole file, and of a pruned one, whose
modulation is in fp32 and without a SiLU. Each in all types in which a stream may be ours."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import comfy.ldm.minimax.model as stock
import torch
from torch import Tensor

from ....kernels_cuda.ops.views.checks import word
from ...base.specimen import Draw, Options, Specimen
from ...fused.block import AROUND_FP32
from .block import _Fused, fuse

HEADS, SIZE, TURNED = 2, 64, 48
DIM, FFN, TIME = 192, 128, 32
# (first, last, row): a prompt with a picture in it, sound and video, at two timesteps.
SEGMENTS = ((0, 3, 1), (3, 5, 0), (5, 7, 1), (7, 11, 5), (11, 20, 0))
TOKENS = SEGMENTS[-1][1]
SOURCE = (stock, stock.Attention, stock.MLP, stock.AdalnProj)


def specimens() -> Sequence[Specimen]:
    return (
        _specimen("MiniMax H3 block", _called),
        _specimen("MiniMax H3 block of a pruned file", _called, apply_silu=False, adaln_dtype=torch.float32),
        _specimen("MiniMax H3 block without RoPE", partial(_called, turns=False)),
    )


def _specimen(name: str, call: Any, **kind: Any) -> Specimen:
    types = tuple(map(word, AROUND_FP32))
    replaces: dict[type, type] = {_Fused: stock.DiTBlock}
    return Specimen(name, partial(_built, **kind), call, fuse, replaces, SOURCE, types)


def _built(draw: Draw, **kind: Any) -> Any:
    """The weights are fp16 even if the model's stream is fp32, and stock casts them."""
    settings: dict[str, Any] = {"operations": draw.operations, "device": draw.device, "dtype": torch.float16}
    made = stock.DiTBlock(DIM, HEADS, SIZE, FFN, TIME, 1e-5, 1e-5, **kind, **settings)
    return made.requires_grad_(False)  # kitchen refuses to turn in place where gradients are wanted


def _called(block: Any, draw: Draw, options: Options, turns: bool = True) -> Tensor:
    """In a pruned file's network the timesteps stay fp32."""
    x = draw.large_and_small(2, TOKENS // 2, DIM).flatten(0, 1)
    t_emb = draw(2, TIME, dtype=None if block.adaln_proj.apply_silu else torch.float32)
    angles = draw(TOKENS, TURNED // 2, scale=3.0, dtype=torch.float32).repeat(1, 2)
    freqs = stock.rope_rotation_table(angles, draw.dtype) if turns else None
    out: Tensor = block(x, t_emb, SEGMENTS, freqs, transformer_options=options)
    return out
