"""The block types of GGUF files: how many bytes stand for how many elements, and what the elements are.

A row of a packed tensor is a run of blocks. Within a block, groups of elements share a scale, and in some types a
summand:

    value = scale * quant + low        quant: a small integer; low: 0 in types without one

Scale, quant and scale * quant are exact in fp32 for every type (at most 24 significant bits: 11 of d, 8 of a group's
scale, 5 of a quant), so the sum alone is rounded, and a fused multiply-add gives the same bits. As fp16 it is rounded
once more. A value beyond fp16's range becomes infinite, as it does in numpy: these are weights, and no quantiser makes
such a block.

The device's side is src/packed_blocks.cuh.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Parts(NamedTuple):
    """Blocks taken apart. scale and low: [blocks, groups, 1]; quants: [blocks, groups, elements of a group]; fp32."""

    scale: Tensor
    quants: Tensor
    low: Tensor | None = None

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[blocks, elements], computed in this type: in fp32 as the GPU does, in float64 exactly."""
        value = self.scale.to(dtype) * self.quants.to(dtype)
        return (value if self.low is None else value + self.low.to(dtype)).flatten(1)


class BlockType(NamedTuple):
    """One encoding: the size of a block, and how [blocks, bytes] of uint8 are taken apart."""

    bytes: int
    elements: int
    parts: Callable[[Tensor], Parts]


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at a byte of each block, as fp32 [blocks, 1, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).to(torch.float32)[:, :, None]


def _fields(data: Tensor, bits: int) -> Tensor:
    """[..., n] bytes as [..., 8 / bits, n]: the fields of all bytes at one place, lowest first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)[:, None]
    fields: Tensor = (data[..., None, :] >> shifts) & (2**bits - 1)
    return fields


def _nibbles(data: Tensor, run: int) -> Tensor:
    """Low nibbles of `run` bytes, then their high ones, then the next run: [blocks, elements]."""
    return _fields(data.reshape(data.shape[0], data.shape[1] // run, run), 4).flatten(1)


def _signed(data: Tensor, offset: int = 0) -> Tensor:
    return (data.to(torch.int16) - offset).to(torch.float32)


def _table(nibbles: Tensor) -> Tensor:
    return _iq4_values(nibbles.device)[nibbles.long()]


@cache
def _iq4_values(device: torch.device) -> Tensor:
    """Made once for a device: a graph that is being captured can copy nothing from the CPU."""
    with torch.inference_mode(False):
        return torch.tensor(IQ4_VALUES, dtype=torch.float32, device=device)


def _q4_0(blocks: Tensor) -> Parts:
    return Parts(_half(blocks, 0), _signed(_nibbles(blocks[:, 2:], 16), 8)[:, None])


def _q4_1(blocks: Tensor) -> Parts:
    return Parts(_half(blocks, 0), _signed(_nibbles(blocks[:, 4:], 16))[:, None], _half(blocks, 2))


def _fifth_bits(data: Tensor) -> Tensor:
    """Four bytes of single bits, lowest first: [blocks, 32], each 0 or 16."""
    return _fields(data, 1).transpose(1, 2).flatten(1) << 4


def _q5_0(blocks: Tensor) -> Parts:
    quants = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    return Parts(_half(blocks, 0), _signed(quants, 16)[:, None])


def _q5_1(blocks: Tensor) -> Parts:
    quants = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return Parts(_half(blocks, 0), _signed(quants)[:, None], _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Parts:
    return Parts(_half(blocks, 0), blocks[:, 2:].view(torch.int8).to(torch.float32)[:, None])


def _q2_k(blocks: Tensor) -> Parts:
    scales = blocks[:, :16, None]
    quants = _fields(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    return Parts(_half(blocks, 80) * _signed(scales & 15), _signed(quants), -(_half(blocks, 82) * _signed(scales >> 4)))


def _q3_k(blocks: Tensor) -> Parts:
    low = _fields(blocks[:, 96:104], 4).flatten(1)
    high = _fields(blocks[:, 104:108], 2).flatten(1)
    scales = _signed(low | (high << 4), 32)[:, :, None]
    kept = _fields(blocks[:, :32], 1).flatten(1)  # a bit that is set keeps 4 from being taken away
    quants = _fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).flatten(1) | (kept << 2)
    return Parts(_half(blocks, 108) * scales, _signed(quants, 4).reshape(-1, 16, 16))


def _scales_and_mins(data: Tensor) -> tuple[Tensor, Tensor]:
    """Twelve bytes as eight scales and eight mins of 6 bits, [blocks, 8, 1]."""
    first, second, third = data.reshape(-1, 3, 4).unbind(1)
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], 1)
    mins = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], 1)
    return _signed(scales)[:, :, None], _signed(mins)[:, :, None]


def _q4_k(blocks: Tensor) -> Parts:
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    quants = _nibbles(blocks[:, 16:], 32).reshape(-1, 8, 32)
    return Parts(_half(blocks, 0) * scales, _signed(quants), -(_half(blocks, 2) * mins))


def _q5_k(blocks: Tensor) -> Parts:
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    fifth = _fields(blocks[:, 16:48], 1) << 4
    quants = _nibbles(blocks[:, 48:], 32).reshape(-1, 8, 32) | fifth
    return Parts(_half(blocks, 0) * scales, _signed(quants), -(_half(blocks, 2) * mins))


def _q6_k(blocks: Tensor) -> Parts:
    quants = _nibbles(blocks[:, :128], 64) | (_fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).flatten(1) << 4)
    scales = blocks[:, 192:208].view(torch.int8).to(torch.float32)[:, :, None]
    return Parts(_half(blocks, 208) * scales, _signed(quants, 32).reshape(-1, 16, 16))


def _iq4_nl(blocks: Tensor) -> Parts:
    return Parts(_half(blocks, 0), _table(_nibbles(blocks[:, 2:], 16))[:, None])


def _iq4_xs(blocks: Tensor) -> Parts:
    low = _fields(blocks[:, 4:8], 4).transpose(1, 2).flatten(1)
    high = _fields(blocks[:, 2:4], 2).transpose(1, 2).flatten(1)
    scales = _signed(low | (high << 4), 32)[:, :, None]
    return Parts(_half(blocks, 0) * scales, _table(_nibbles(blocks[:, 8:], 16)).reshape(-1, 8, 32))


BLOCK_TYPES = {
    "Q4_0": BlockType(18, 32, _q4_0),
    "Q4_1": BlockType(20, 32, _q4_1),
    "Q5_0": BlockType(22, 32, _q5_0),
    "Q5_1": BlockType(24, 32, _q5_1),
    "Q8_0": BlockType(34, 32, _q8_0),
    "Q2_K": BlockType(84, 256, _q2_k),
    "Q3_K": BlockType(110, 256, _q3_k),
    "Q4_K": BlockType(144, 256, _q4_k),
    "Q5_K": BlockType(176, 256, _q5_k),
    "Q6_K": BlockType(210, 256, _q6_k),
    "IQ4_NL": BlockType(18, 32, _iq4_nl),
    "IQ4_XS": BlockType(136, 256, _iq4_xs),
}


def block_type(encoding: str) -> BlockType:
    """Raises ValueError for a name that is not known."""
    found = BLOCK_TYPES.get(encoding)
    if found is None:
        raise ValueError(f"encoding is {encoding!r}, expected one of {', '.join(BLOCK_TYPES)}")
    return found


def unpacked(packed: Tensor, encoding: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of blocks, [..., bytes] of uint8, as [..., elements] of this type."""
    kind = block_type(encoding)
    blocks = packed.reshape(-1, kind.bytes)
    return kind.parts(blocks).values(dtype).reshape(unpacked_shape(packed, encoding))


def unpacked_shape(packed: Tensor, encoding: str) -> tuple[int, ...]:
    """Raises ValueError where a row is no whole number of blocks."""
    kind = block_type(encoding)
    if packed.ndim == 0 or packed.shape[-1] % kind.bytes:
        raise ValueError(f"packed: {list(packed.shape)} has no rows of {encoding} blocks, of {kind.bytes} bytes each")
    return (*packed.shape[:-1], packed.shape[-1] // kind.bytes * kind.elements)
