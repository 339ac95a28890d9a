"""Headers of the files that the bench writes piece by piece, and where each tensor lies in them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...memory import ENCODINGS
from ...memory.written_gguf import Entry as Value
from ...memory.written_gguf import laid_out

PAGE = 4096


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
    """The header before the tensors, and the byte of the file at which each begins, in the entries' order."""

    header: bytes
    begins: list[int]


def safetensors(entries: Sequence[Entry], metadata: Mapping[str, str]) -> Laid:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    ends = [0]
    for entry in entries:
        begin, end = ends[-1], ends[-1] + entry.nbytes
        header[entry.name] = {"dtype": entry.kind, "shape": list(entry.shape), "data_offsets": [begin, end]}
        ends.append(end)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return Laid(struct.pack("<Q", len(text)) + text, [8 + len(text) + begin for begin in ends[:-1]])


def gguf(path: Path, entries: Sequence[Entry], values: Mapping[str, Value]) -> Laid:
    header, places, _ = laid_out(path, {entry.name: (entry.kind, entry.shape) for entry in entries}, values)
    return Laid(header, [places[entry.name][0] for entry in entries])
