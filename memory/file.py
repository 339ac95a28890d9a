"""A safetensors file as extents: which bytes of the file are which tensor.

The format: 8 bytes little-endian header length, that many bytes of JSON, then the tensors' bytes back to back.

    {"name": {"dtype": "F16", "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__": {"key": "text"}}

Offsets count from the end of the header. Everything in the header comes from a stranger, so nothing in it is believed
before it is checked: later code turns these extents into pointers. Reading costs one small read; no tensor is loaded.
"""

from __future__ import annotations

import os
import reprlib
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from .strict_json import is_text, parse

# A real 28 GB checkpoint needs about 200 KB. The safetensors library allows 100 MB, which is gigabytes once parsed.
MAX_HEADER_BYTES = 32 << 20
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
    """Read and check the header of the safetensors file at `path`; raise `BadFile` if anything in it is wrong.

    Stricter than the safetensors library: a name twice, an entry or dtype in another spelling than the format's, a size
    beyond 63 bits, more than 32 MiB or 16 levels of JSON are refused. Fields the format does not know are ignored.
    """
    path = Path(path)
    with open_regular(path) as file:
        return header_of(path, file)


def open_regular(path: Path) -> BinaryIO:
    """The file at `path`, opened to be read; whatever the system has against it is a `BadFile`."""
    with told_as_bad_file(path):
        if not stat.S_ISREG(path.stat().st_mode):  # asked first: opening a pipe would wait for its other end
            raise BadFile(f"{path}: is not a file. Choose the .safetensors file itself.")
        return path.open("rb")


@contextmanager
def told_as_bad_file(path: Path) -> Iterator[None]:
    """The system's errors in this block become `BadFile`, with the file's name and what to look at."""
    try:
        yield
    except OSError as error:
        raise BadFile(
            f"{path}: cannot be read ({error.strerror or error}). Check the path, its permissions and its disk."
        ) from error


def header_of(path: Path, file: BinaryIO) -> WeightFile:
    """The checked header of an open file that stands at its beginning."""
    with told_as_bad_file(path):
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise BadFile(f"{path}: {_what_it_is_instead(prefix, size, length)}")
        raw = file.read(length)
    if len(raw) != length:
        raise BadFile(f"{path}: shrank while it was read. Wait until the download has finished.")
    try:
        table = parse(raw)
    except (ValueError, RecursionError) as error:
        raise BadFile(
            f"{path}: its header is not sound JSON ({error}). The file is damaged or of another format."
        ) from error
    metadata = _metadata(path, table.pop("__metadata__", None))
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


def _metadata(path: Path, entry: object) -> dict[str, str]:
    if entry is None:  # JSON null: the library reads it as none
        return {}
    if not isinstance(entry, dict) or not all(is_text(text) for pair in entry.items() for text in pair):
        raise BadFile(f"{path}: its __metadata__ is not a table of texts. The file is damaged.")
    return entry


def _extent(path: Path, name: str, entry: object, data_begin: int, size: int) -> Extent:
    def bad(why: str) -> BadFile:
        return BadFile(f"{path}: tensor {_short(name)} {why}. The file is damaged; download it again.")

    if not is_text(name):
        raise bad("has a name that is no text")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise bad("lacks its dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise bad(f"has the unknown dtype {_short(dtype)}")
    if not isinstance(shape, list) or not all(_is_count(n) for n in shape):
        raise bad(f"has the impossible shape {_short(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
        raise bad(f"has the impossible data_offsets {_short(offsets)}")
    elements = 1
    for n in shape:
        elements *= n
        # Stopped at the first step too far: the product of a thousand sizes is a number of twenty thousand digits.
        if n > MAX_ELEMENTS or elements > MAX_ELEMENTS:
            raise bad(f"has the impossible shape {_short(shape)}")
    begin, end = offsets
    if end < begin:
        raise bad(f"ends before it begins, at bytes {begin} and {end}")
    if data_begin + end > size:
        raise BadFile(
            f"{path}: is cut short: tensor {_short(name)} ends at byte {data_begin + end}, the file at byte {size}. "
            "Download it again."
        )
    bits = elements * BITS[dtype]
    if bits != (end - begin) * 8:
        raise bad(
            f"of dtype {dtype} and shape {_short(shape)} needs {-(-bits // 8)} bytes, the header gives it {end - begin}"
        )
    return Extent(name, dtype, tuple(shape), data_begin + begin, data_begin + end)


_brief = reprlib.Repr()
_brief.maxlist = _brief.maxdict = 8
_brief.maxstring = _brief.maxother = 120
_brief.maxlevel = 2


def _short(value: object) -> str:
    """What a message shows of something that may be megabytes long."""
    return _brief.repr(value)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _check_cover(path: Path, extents: list[Extent], data_begin: int, size: int) -> None:
    """The tensors must lie back to back from the header to the end of the file, as the format demands."""
    at, before = data_begin, "the header"
    for extent in extents:
        if extent.begin != at:
            fault = "overlaps" if extent.begin < at else "leaves a hole after"
            raise BadFile(
                f"{path}: tensor {_short(extent.name)} at byte {extent.begin} {fault} {before}, which ends at byte {at}. "
                "The file is damaged; download it again."
            )
        at, before = extent.end, _short(extent.name)
    if at != size:
        raise BadFile(
            f"{path}: has {size - at} bytes after its last tensor. The file is damaged or still being written."
        )
