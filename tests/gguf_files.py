"""GGUF files byte by byte, sound or not, as a test wants them. The `gguf` package writes sound ones alone.

A header is a list of pieces: numbers and texts, each knowing what it is and of which entry or tensor it is a part, so that a
fuzzer can change one of them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

# Of ggml's types: number, elements and bytes of a block. Written out again on purpose: a test must not believe the table it tests.
TYPES = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34), "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210), "IQ4_NL": (20, 32, 18), "IQ4_XS": (23, 256, 136), "I8": (24, 1, 1), "I16": (25, 1, 2),
    "I32": (26, 1, 4), "I64": (27, 1, 8), "F64": (28, 1, 8), "BF16": (30, 1, 2),
}  # fmt: skip
# Of packed types: where in a block the halves lie that scale it, and numbers for them that make a weight of about a tenth.
SCALES = {
    "Q4_0": ((0,), 0.02), "Q4_1": ((0, 2), 0.02), "Q5_0": ((0,), 0.01), "Q5_1": ((0, 2), 0.01), "Q8_0": ((0,), 1e-3),
    "Q2_K": ((80, 82), 1e-2), "Q3_K": ((108,), 1e-3), "Q4_K": ((0, 2), 2e-4), "Q5_K": ((0, 2), 1e-4), "Q6_K": ((208,), 1e-4),
    "IQ4_NL": ((0,), 2e-3), "IQ4_XS": ((0,), 1e-4),
}  # fmt: skip
KINDS = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"), "f32": (6, "f"),
    "bool": (7, "?"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d"),
}  # fmt: skip
TEXT, LIST = 8, 9
HEAD = -1  # the group of what comes before all entries


@dataclass(frozen=True)
class Piece:
    """role: what it is; group: the number of the entry or tensor that it is a part of."""

    role: str
    raw: bytes
    group: int = HEAD

    @property
    def number(self) -> int:
        return int.from_bytes(self.raw, "little")

    def holding(self, number: int) -> Piece:
        """The same with another number in it, as much of it as there is room for."""
        return replace(self, raw=(number % (1 << 8 * len(self.raw))).to_bytes(len(self.raw), "little"))


@dataclass(frozen=True)
class Typed:
    """A metadata value of a kind that Python's own types do not tell."""

    kind: str
    value: Any


@dataclass(frozen=True)
class Tensor:
    """shape: as torch has it. offset: None behind the one before."""

    name: str
    type: str | int
    shape: Sequence[int]
    data: bytes | None = None
    offset: int | None = None


def nbytes(tensor: Tensor) -> int:
    _, elements, size = TYPES[tensor.type] if isinstance(tensor.type, str) else (0, 1, 1)
    return math.prod(tensor.shape) // elements * size


def pieces(
    values: Mapping[str, Any], tensors: Sequence[Tensor], *, version: int = 3, alignment: int = 32
) -> list[Piece]:
    """The header's. alignment: by which the tensors lie; it is said where it is none of the entries."""
    found = [
        Piece("magic", b"GGUF"),
        Piece("version", struct.pack("<I", version)),
        Piece("tensors", struct.pack("<Q", len(tensors))),
        Piece("entries", struct.pack("<Q", len(values))),
    ]
    for group, (name, value) in enumerate(values.items()):
        found += [replace(piece, group=group) for piece in (*_text(name), *_value(value))]
    at = 0
    for group, tensor in enumerate(tensors, len(values)):
        number = TYPES[tensor.type][0] if isinstance(tensor.type, str) else tensor.type
        here = [
            *_text(tensor.name),
            Piece("dimensions", struct.pack("<I", len(tensor.shape))),
            *(Piece("size", struct.pack("<Q", size)) for size in reversed(tensor.shape)),
            Piece("type", struct.pack("<I", number)),
            Piece("offset", struct.pack("<Q", at if tensor.offset is None else tensor.offset)),
        ]
        found += [replace(piece, group=group) for piece in here]
        at = -(-(at + nbytes(tensor)) // alignment) * alignment
    return found


def _text(text: str | bytes) -> tuple[Piece, Piece]:
    raw = text.encode() if isinstance(text, str) else text
    return Piece("length", struct.pack("<Q", len(raw))), Piece("text", raw)


def _value(value: Any) -> list[Piece]:
    if isinstance(value, (str, bytes)):
        return [Piece("kind", struct.pack("<I", TEXT)), *_text(value)]
    if isinstance(value, list):
        head = [Piece("kind", struct.pack("<I", LIST))]
        inner = [_value(one) for one in value]
        kind = inner[0][0] if inner else Piece("kind", struct.pack("<I", KINDS["u8"][0]))
        count = Piece("count", struct.pack("<Q", len(value)))
        return [*head, kind, count, *(piece for one in inner for piece in one[1:])]
    typed = value if isinstance(value, Typed) else Typed(_KIND_OF[type(value)], value)
    number, letter = KINDS[typed.kind]
    return [Piece("kind", struct.pack("<I", number)), Piece("number", struct.pack(f"<{letter}", typed.value))]


_KIND_OF = {bool: "bool", int: "u32", float: "f32"}


def joined(header: Sequence[Piece]) -> bytes:
    return b"".join(piece.raw for piece in header)


def file_of(
    path: Path,
    values: Mapping[str, Any] | None = None,
    tensors: Sequence[Tensor] = (),
    *,
    version: int = 3,
    alignment: int = 32,
    padded: bool = True,
) -> Path:
    """A file of these. padded: up to a multiple of the alignment at the end too, as most writers do."""
    raw = joined(pieces(values or {}, tensors, version=version, alignment=alignment))
    if tensors:
        raw = raw.ljust(-(-len(raw) // alignment) * alignment, b"\x00")
    for i, tensor in enumerate(tensors):
        data = tensor.data if tensor.data is not None else bytes([i % 251 + 1]) * nbytes(tensor)
        is_last = i + 1 == len(tensors)
        raw += data
        if padded or not is_last:
            raw = raw.ljust(len(raw) + -len(data) % alignment, b"\x00")
    path.write_bytes(raw)
    return path


def random_blocks(kind: str, shape: Sequence[int], seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Packed numbers of about a tenth, of this shape: bytes [..., bytes of a row]."""
    _, elements, size = TYPES[kind]
    at, scale = SCALES[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (math.prod(shape) // elements, size), np.uint8)
    for offset in at:
        blocks[:, offset : offset + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks.reshape(*shape[:-1], -1)
