"""The header of a safetensors file.

The format: 8 bytes little-endian header length, that many bytes of JSON, then the tensors' bytes
back to back.

    {"name": {"dtype": "F16", "shape": [2, 3], "data_offsets": [begin, end]}, ...,
     "__metadata__": {"key": "text"}}

Offsets count from the end of the header.

Stricter than the safetensors library: refused are a name that comes twice, an entry or dtype in
another spelling than the format's, sizes beyond 63 bits, and more than 32 MiB or 16 levels of JSON.
Fields that the format does not know are ignored.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from ..encoding import SAFETENSORS
from ..file import MAX_ELEMENTS, BadFile, Extent, WeightFile, brief, sized, told_as_bad_file
from ..strict_json import is_text, parse

# A real 28 GB checkpoint needs about 200 KB. The safetensors library allows 100 MB, which is
# gigabytes once parsed.
MAX_HEADER_BYTES = 32 << 20


def header_of(path: Path, file: BinaryIO, size: int, prefix: bytes) -> WeightFile:
    """The checked header of an open file of this size, whose first eight bytes were read."""
    length = int.from_bytes(prefix, "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise BadFile(f"{path}: {_what_it_is_instead(prefix, size, length)}")
    with told_as_bad_file(path):
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
    if prefix[:2] == b"PK":
        return "is a zip or .pt archive renamed to .safetensors. Get the .safetensors version of the model."
    if size < 8:
        return f"has only {size} bytes. Download it again."
    if length > MAX_HEADER_BYTES:
        return (
            f"says its header has {length} bytes, more than any safetensors file. It is damaged or of another format."
        )
    return f"is cut short: its header alone needs {sized(length)}, the file has {sized(size)}. Download it again."


def _metadata(path: Path, entry: object) -> dict[str, str]:
    if entry is None:  # JSON null, which the library reads as no metadata
        return {}
    if not isinstance(entry, dict) or not all(is_text(text) for pair in entry.items() for text in pair):
        raise BadFile(f"{path}: its __metadata__ is not a table of texts. The file is damaged.")
    return entry


def _extent(path: Path, name: str, entry: object, data_begin: int, size: int) -> Extent:
    def bad(why: str) -> BadFile:
        return BadFile(f"{path}: tensor {brief(name)} {why}. The file is damaged; download it again.")

    if not is_text(name):
        raise bad("has a name that is no text")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise bad("lacks its dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SAFETENSORS:
        raise bad(f"has the unknown dtype {brief(dtype)}")
    if not isinstance(shape, list) or not all(_is_count(n) for n in shape):
        raise bad(f"has the impossible shape {brief(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
        raise bad(f"has the impossible data_offsets {brief(offsets)}")
    elements = 1
    for n in shape:
        elements *= n
        # Stopped at the first step too far, because a product of a thousand sizes has twenty
        # thousand digits.
        if n > MAX_ELEMENTS or elements > MAX_ELEMENTS:
            raise bad(f"has the impossible shape {brief(shape)}")
    begin, end = offsets
    if end < begin:
        raise bad(f"ends before it begins, at bytes {begin} and {end}")
    if data_begin + end > size:
        raise BadFile(
            f"{path}: is cut short: it has {sized(size)}, and tensor {brief(name)} alone ends at {sized(data_begin + end)}. "
            "Download it again."
        )
    block = SAFETENSORS[dtype]
    if elements * block.nbytes != (end - begin) * block.elements:
        needs = -(-elements * block.nbytes // block.elements)
        raise bad(f"of dtype {dtype} and shape {brief(shape)} needs {needs} bytes, the header gives it {end - begin}")
    return Extent(name, dtype, tuple(shape), data_begin + begin, data_begin + end)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _check_cover(path: Path, extents: list[Extent], data_begin: int, size: int) -> None:
    """Raise unless the tensors lie back to back from the header to the end of the file, as the
    format demands."""
    at, before = data_begin, "the header"
    for extent in extents:
        if extent.begin != at:
            fault = "overlaps" if extent.begin < at else "leaves a hole after"
            raise BadFile(
                f"{path}: tensor {brief(extent.name)} at byte {extent.begin} {fault} {before}, which ends at byte {at}. "
                "The file is damaged; download it again."
            )
        at, before = extent.end, brief(extent.name)
    if at != size:
        raise BadFile(
            f"{path}: has {size - at} bytes after its last tensor. The file is damaged or still being written."
        )
