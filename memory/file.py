"""A safetensors file as extents: which bytes of the file are which tensor.

The format: 8 bytes little-endian header length, that many bytes of JSON, then the tensors' bytes back to back.

    {"name": {"dtype": "F16", "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__": {"key": "text"}}

Offsets count from the end of the header. Everything in the header comes from a stranger, so nothing in it is believed
before it is checked: later code turns these extents into pointers. Reading costs one small read; no tensor is loaded.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

# What the safetensors library itself refuses above; a real 28 GB checkpoint needs about 200 KB.
MAX_HEADER_BYTES = 100_000_000
# torch counts elements in signed 64-bit integers.
MAX_ELEMENTS = 2**63 - 1

BITS: Mapping[str, int] = MappingProxyType(
    {
        "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
        "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
        "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
        "U32": 32, "I32": 32, "F32": 32,
        "U64": 64, "I64": 64, "F64": 64, "C64": 64,
    }
)  # fmt: skip


class BadFile(ValueError):
    """A weight file that cannot be trusted. The message names the file, the tensor and what to do."""

    __module__ = "fusestream"  # what ComfyUI shows before the message: not a path of the user's disk


@dataclass(frozen=True)
class Extent:
    """One tensor's place: its bytes are `[begin, end)` of the whole file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class WeightFile:
    """A checked header: extents by name, in file order, and the free-text metadata."""

    path: Path
    size: int
    extents: Mapping[str, Extent]
    metadata: Mapping[str, str]


def read_header(path: str | os.PathLike[str]) -> WeightFile:
    """Read and check the header of the safetensors file at `path`; raise `BadFile` if anything in it is wrong."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise BadFile(f"{path}: {_what_it_is_instead(prefix, size, length)}")
            raw = file.read(length)
    except OSError as error:
        raise BadFile(
            f"{path}: cannot be read ({error.strerror or error}). Check the path and its permissions."
        ) from error
    if len(raw) != length:
        raise BadFile(f"{path}: shrank while it was read. Wait until the download has finished.")
    table = _parse(path, raw)
    metadata = _metadata(path, table.pop("__metadata__", {}))
    data_begin = 8 + length
    extents = sorted(
        (_extent(path, name, entry, data_begin, size) for name, entry in table.items()), key=lambda e: (e.begin, e.end)
    )
    _check_cover(path, extents, data_begin, size)
    return WeightFile(path, size, MappingProxyType({e.name: e for e in extents}), MappingProxyType(metadata))


def _what_it_is_instead(prefix: bytes, size: int, length: int) -> str:
    """Why the first eight bytes are no header length, in the words of the usual accident."""
    if size == 0:
        return "is empty. Download it again."
    if prefix.startswith(b"version "):
        return "is a Git LFS pointer, a small text file that stands for the model. Download the model itself."
    if prefix[:1] == b"<":
        return "is a web page, not a model: the download was answered with an error page. Download it again."
    if prefix[:4] == b"GGUF":
        return "is a GGUF file. FuseStream reads .safetensors files."
    if prefix[:2] == b"PK":
        return "is a zip or .pt archive renamed to .safetensors. Get the .safetensors version of the model."
    if size < 8:
        return f"has only {size} bytes. Download it again."
    if length > MAX_HEADER_BYTES:
        return (
            f"says its header has {length} bytes, more than any safetensors file. It is damaged or of another format."
        )
    return f"is cut short: its header alone needs {length} bytes, the file has {size}. Download it again."


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise BadFile(f"{path}: names {twice!r} twice in its header. The file is damaged.")
        return table

    try:
        table = json.loads(raw.decode("utf-8"), object_pairs_hook=no_duplicates)
    except BadFile:
        raise
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path}: its header is not JSON ({error}). The file is damaged or of another format.") from error
    if not isinstance(table, dict):
        raise BadFile(f"{path}: its header is a JSON {type(table).__name__}, not an object. The file is damaged.")
    return table


def _metadata(path: Path, entry: object) -> dict[str, str]:
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise BadFile(f"{path}: its __metadata__ is not a table of texts. The file is damaged.")
    return entry


def _extent(path: Path, name: str, entry: object, data_begin: int, size: int) -> Extent:
    def bad(why: str) -> BadFile:
        return BadFile(f"{path}: tensor {name!r} {why}. The file is damaged; download it again.")

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise bad("lacks its dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise bad(f"has the unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(_is_count(n) for n in shape):
        raise bad(f"has the impossible shape {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
        raise bad(f"has the impossible data_offsets {offsets!r}")
    elements = math.prod(shape)
    if elements > MAX_ELEMENTS:
        raise bad(f"has the impossible shape {shape!r}")
    begin, end = offsets
    if end < begin:
        raise bad(f"ends before it begins, at bytes {begin} and {end}")
    if data_begin + end > size:
        raise BadFile(
            f"{path}: is cut short: tensor {name!r} ends at byte {data_begin + end}, the file at byte {size}. "
            "Download it again."
        )
    bits = elements * BITS[dtype]
    if bits != (end - begin) * 8:
        raise bad(f"of dtype {dtype} and shape {shape} needs {-(-bits // 8)} bytes, the header gives it {end - begin}")
    return Extent(name, dtype, tuple(shape), data_begin + begin, data_begin + end)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _check_cover(path: Path, extents: list[Extent], data_begin: int, size: int) -> None:
    """The tensors must lie back to back from the header to the end of the file, as the format demands."""
    at, before = data_begin, "the header"
    for extent in extents:
        if extent.begin != at:
            fault = "overlaps" if extent.begin < at else "leaves a hole after"
            raise BadFile(
                f"{path}: tensor {extent.name!r} at byte {extent.begin} {fault} {before}, which ends at byte {at}. "
                "The file is damaged; download it again."
            )
        at, before = extent.end, repr(extent.name)
    if at != size:
        raise BadFile(
            f"{path}: has {size - at} bytes after its last tensor. The file is damaged or still being written."
        )
