"""Headers of the files that the bench writes piece by piece, and where each tensor lies in them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...memory import ENCODINGS

ALIGNMENT = 32  # of GGUF's tensors
PAGE = 4096
TEXT, LIST = 8, 9  # kinds of values in GGUF


@dataclass(frozen=True)
class Entry:
    """A tensor of the file. kind: its encoding, as `memory` calls it."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        found = ENCODINGS[self.kind].nbytes_of(self.shape)
        assert found is not None, f"{self.name}: {list(self.shape)} are no whole blocks of {self.kind}"
        return found


@dataclass(frozen=True)
class Laid:
    """What comes before the tensors, and at which byte of the file each begins, in the entries' order."""

    header: bytes
    begins: list[int]


def safetensors(entries: Sequence[Entry]) -> Laid:
    header, ends = {}, [0]
    for entry in entries:
        begin, end = ends[-1], ends[-1] + entry.nbytes
        header[entry.name] = {"dtype": entry.kind, "shape": list(entry.shape), "data_offsets": [begin, end]}
        ends.append(end)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return Laid(struct.pack("<Q", len(text)) + text, [8 + len(text) + begin for begin in ends[:-1]])


def gguf(entries: Sequence[Entry], values: Mapping[str, Any]) -> Laid:
    """values: metadata; texts, whole numbers, fractions, truths, and lists of one of these."""
    out = [b"GGUF", struct.pack("<IQQ", 3, len(entries), len(values))]
    for name, value in values.items():
        kind, raw = _value(value)
        out += [_text(name), struct.pack("<I", kind), raw]
    begins, at = [], 0
    for entry in entries:
        sizes = entry.shape[::-1]
        number = ENCODINGS[entry.kind].ggml
        out += [_text(entry.name), struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, number, at)]
        begins.append(at)
        at += -(-entry.nbytes // ALIGNMENT) * ALIGNMENT
    header = b"".join(out)
    header += bytes(-len(header) % ALIGNMENT)
    return Laid(header, [len(header) + begin for begin in begins])


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> tuple[int, bytes]:
    """Its kind, and itself."""
    if isinstance(value, str):
        return TEXT, _text(value)
    if isinstance(value, list):
        kinds = [_value(one) for one in value]
        return LIST, struct.pack("<IQ", kinds[0][0], len(kinds)) + b"".join(raw for _, raw in kinds)
    kind, letter = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}[type(value)]
    return kind, struct.pack(f"<{letter}", value)
