"""A GGUF file, version 3, written piece by piece. `formats/gguf.py` has the format, and reads the
result.

    with GgufWriter(path, {"name": ("Q8_0", (2, 32)), ...}, {"general.architecture": "wan"}) as w:
        w.append("name", bytes of some rows)
        ...

Other readers know four dimensions at most. A tensor of more is written in four, with its original
shape in the metadata.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping, Sequence

from .encoding import ENCODINGS
from .formats.gguf import ALIGNMENT, DEFAULT_ALIGNMENT, MAGIC, ORIGINAL_SHAPE
from .formats.gguf_values import BOOL, FIXED, LIST, TEXT
from .unfinished import NotWritten, UnfinishedFile

Entry = bool | int | float | str | bytes | Sequence[int] | Sequence[float] | Sequence[str]

VERSION = 3
MOST_DIMENSIONS = 4
# Kinds of values by their numbers in the file, for single values and for the elements of a list.
U8, U32, I32, F32 = 0, 4, 5, 6


class GgufWriter(UnfinishedFile):
    """Writer of one file. tensors: encoding and shape, as torch has it, by name. Whole numbers are
    written as u32, in lists as i32."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        values: Mapping[str, Entry],
    ) -> None:
        super().__init__(path, *laid_out(path, tensors, values))


def laid_out(
    path: str | os.PathLike[str], tensors: Mapping[str, tuple[str, tuple[int, ...]]], values: Mapping[str, Entry]
) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """The bytes before the tensors of such a file, [begin, end) of each tensor in it, and its bytes
    in all."""
    entries = {ALIGNMENT: DEFAULT_ALIGNMENT, **values}
    described, relative, at = [], {}, 0
    for name, (encoding, shape) in tensors.items():
        kind = ENCODINGS[encoding]
        nbytes = kind.nbytes_of(shape)
        if kind.ggml is None or nbytes is None or kind.row_bytes(shape) is None:
            raise NotWritten(f"{path}: GGUF cannot hold {name}, of type {encoding} and shape {list(shape)}.")
        if len(shape) > MOST_DIMENSIONS:
            entries[ORIGINAL_SHAPE + name] = list(shape)
        sizes = tuple(reversed(_folded(shape)))
        described.append(_text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind.ggml, at))
        relative[name] = at, at + nbytes
        at = _aligned(at + nbytes)
    head = MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(entries))
    try:
        head += b"".join(_text(name) + _value(value) for name, value in entries.items()) + b"".join(described)
    except (struct.error, OverflowError) as error:
        raise NotWritten(f"{path}: GGUF cannot hold a number of its metadata, {dict(values)} ({error}).") from error
    begin = _aligned(len(head))
    places = {name: (begin + start, begin + end) for name, (start, end) in relative.items()}
    return head.ljust(begin, b"\0"), places, begin + at


def _folded(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in at most MOST_DIMENSIONS dimensions: the last ones are merged."""
    kept = MOST_DIMENSIONS - 1
    return shape if len(shape) <= MOST_DIMENSIONS else (*shape[:kept], math.prod(shape[kept:]))


def _aligned(at: int) -> int:
    return -(-at // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Entry) -> bytes:
    """The value's kind, and the value."""
    if isinstance(value, str):
        return struct.pack("<I", TEXT) + _text(value)
    if isinstance(value, bool | int | float):
        kind = BOOL if isinstance(value, bool) else U32 if isinstance(value, int) else F32
        return struct.pack("<I", kind) + FIXED[kind].pack(value)
    if isinstance(value, bytes):
        return struct.pack("<IIQ", LIST, U8, len(value)) + value
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", LIST, TEXT, len(value)) + b"".join(_text(str(one)) for one in value)
    kind, letter = (F32, "f") if value and isinstance(value[0], float) else (I32, "i")
    return struct.pack(f"<IIQ{len(value)}{letter}", LIST, kind, len(value), *value)
