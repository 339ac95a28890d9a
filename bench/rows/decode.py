"""decode_attention and rms_rope_keep: a token that Qwen3 4B writes, after texts of several lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels_cuda.ops.attention import decode_attention
from ...kernels_cuda.ops.norm import rms_rope_keep
from ..row import Row, Tensors

HEADS, KEY_HEADS, D = 32, 8, 128


def kept(places: int) -> Tensor:
    return torch.randn(1, KEY_HEADS, places, D, device="cuda").half().transpose(1, 2)


def at(place: int) -> Tensor:
    return torch.tensor([place], dtype=torch.int32, device="cuda")


def over(seen: int, room: int) -> Tensors:
    return torch.randn(1, 1, HEADS, D, device="cuda").half(), kept(room), kept(room), at(seen - 1)


def read(seen: int) -> int:
    """Bytes of the keys and values that are seen."""
    return 2 * seen * KEY_HEADS * D * 2


def token() -> Tensors:
    packed = torch.randn(1, 1, 1, HEADS + 2 * KEY_HEADS, D, device="cuda")
    weights = (torch.randn(D, device="cuda").half() for _ in range(2))
    angle = torch.rand(1024, D // 2, device="cuda")
    return (
        *torch.split(packed, [HEADS, KEY_HEADS, KEY_HEADS], 3),
        *weights,
        angle.cos(),
        angle.sin(),
        kept(1024),
        kept(1024),
        at(700),
    )


def attended(seen: int, room: int) -> Row:
    return Row(
        "decode_attention",
        f"Qwen3 4B: {seen} keys of {room}",
        lambda: over(seen, room),
        (None, -1),
        decode_attention.stock,
        moved=lambda _tensors, _outputs: read(seen),
    )


def moved(tensors: Tensors, outputs: tuple[Tensor, ...]) -> int:
    """The key and value of a token, and its row in either room."""
    return sum(t.nbytes for t in (*tensors[:5], *outputs) if t is not None) + 4 * KEY_HEADS * D


ROWS = [
    *(attended(seen, room) for seen, room in ((300, 1536), (1500, 1536), (8192, 8192), (32768, 32768))),
    Row("rms_rope_keep", "Qwen3 4B: one token", token, (1e-6,), rms_rope_keep.stock, moved=moved),
]
