"""The header of a GGUF file, versions 2 and 3.

The format is little-endian. A text is its length as u64 and so many bytes of UTF-8.

    "GGUF", u32 version, u64 tensors, u64 entries
    entries   metadata: text name, u32 kind, the value; for a list u32 kind, u64 count, the elements
    tensors   text name, u32 dimensions, u64 each, u32 type, u64 offset
    data      begins at the next multiple of the alignment, and so does every tensor in it

ggml names the fastest dimension first; an extent's shape has it last, as torch does. ggml's blocks
of quantised numbers run along that dimension.

Stricter than llama.cpp: refused are texts that are not UTF-8, more than a million texts in lists,
and headers of more than 64 MiB. Laxer: tensors may have more than four dimensions, as those of
video models do, and names of any length up to 64 KiB. Bytes behind the last tensor are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from ..encoding import GGML, GGML_OTHERS, Encoding
from ..file import MAX_ELEMENTS, BadFile, Extent, WeightFile, brief, sized
from .gguf_values import FIXED, MAX_HEADER_BYTES, Cursor, Listed, Value

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Wan 14B has 1100 tensors and 30 entries. Each costs a turn of Python's loop.
MAX_TENSORS = MAX_ENTRIES = 1 << 16
MAX_DIMENSIONS = 8
ALIGNMENT, DEFAULT_ALIGNMENT = "general.alignment", 32
# Prefix of the entry that holds a tensor's original shape; the tensor's name follows. Converters of
# diffusion models write it for a tensor that they reshaped for want of dimensions or of whole
# blocks in a row.
ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
LEAST_ENTRY, LEAST_TENSOR = 13, 24  # the fewest bytes that one takes
INTEGERS = {kind for kind, number in FIXED.items() if number.format[-1:] in "BbHhIiQq"}


def header_of(path: Path, file: BinaryIO, size: int, beginning: bytes) -> WeightFile:
    """The checked header of an open file of this size, whose first bytes were read."""
    cursor = Cursor(path, file, size, beginning)
    cursor.take(len(MAGIC))
    _check_version(path, cursor.u32())
    tensors, entries = cursor.u64(), cursor.u64()
    for count, least, most, what in (
        (tensors, LEAST_TENSOR, MAX_TENSORS, "tensors"),
        (entries, LEAST_ENTRY, MAX_ENTRIES, "metadata entries"),
    ):
        if count > most or count * least > min(size, MAX_HEADER_BYTES):
            raise cursor.bad(f"says it has {count} {what}, more than it has room for or any model has")
    values = _values(cursor, entries)
    described = _described(cursor, tensors)
    alignment = _alignment(cursor, values)
    data_begin = _aligned(cursor.at, alignment)
    extents = sorted(
        (_extent(cursor, path, size, data_begin, alignment, one, values) for one in described.items()),
        key=lambda extent: (extent.begin, extent.end),
    )
    _check_cover(cursor, extents, data_begin, alignment)
    return WeightFile(
        path,
        size,
        MappingProxyType({extent.name: extent for extent in extents}),
        MappingProxyType({name: value for name, value in values.items() if isinstance(value, str)}),
        MappingProxyType(values),
    )


def _check_version(path: Path, version: int) -> None:
    if version in VERSIONS:
        return
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if swapped in (1, *VERSIONS):
        raise BadFile(f"{path}: is a big-endian GGUF file. Get the little-endian one, which is the usual kind.")
    if version == 1:
        raise BadFile(f"{path}: is a GGUF file of version 1, of 2023. Get a newer file of the same model.")
    raise BadFile(
        f"{path}: is a GGUF file of version {version}; versions 2 and 3 are known. It is damaged, or newer than this FuseStream."
    )


def _values(cursor: Cursor, count: int) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for i in range(count):
        name = cursor.name(f"its metadata entry {i}")
        if name in values:
            raise cursor.bad(f"its metadata entry {brief(name)} comes twice")
        values[name] = cursor.value(name)
    return values


_Described = tuple[tuple[int, ...], Encoding, int]  # shape, encoding, offset


def _described(cursor: Cursor, count: int) -> dict[str, _Described]:
    """The tensors by name, as the header describes them. Each is checked by itself only."""
    found: dict[str, _Described] = {}
    for i in range(count):
        name = cursor.name(f"tensor {i}")
        if name in found:
            raise cursor.bad(f"the name {brief(name)} comes twice among its tensors")
        dimensions = cursor.u32()
        if dimensions > MAX_DIMENSIONS:
            raise cursor.bad(f"tensor {brief(name)} has {dimensions} dimensions")
        shape = tuple(reversed([cursor.u64() for _ in range(dimensions)]))
        if _count(shape) is None:
            raise cursor.bad(f"tensor {brief(name)} has the impossible shape {brief(list(shape))}")
        found[name] = shape, _encoding(cursor, name, cursor.u32()), cursor.u64()
    return found


def _count(shape: tuple[int, ...]) -> int | None:
    """Number of elements; None if, at any step, torch could not count them."""
    elements = 1
    for size in shape:
        elements *= size
        if size > MAX_ELEMENTS or elements > MAX_ELEMENTS:
            return None
    return elements


def _encoding(cursor: Cursor, name: str, number: int) -> Encoding:
    encoding = GGML.get(number)
    if encoding is None and number in GGML_OTHERS:
        raise BadFile(
            f"{cursor.path}: tensor {brief(name)} is of type {GGML_OTHERS[number]}, which FuseStream does not read. Get the model "
            "as Q4_K_M, Q5_K_M, Q8_0 or another of the types that it does."
        )
    if encoding is None:
        raise cursor.bad(f"tensor {brief(name)} is of type {number}, which ggml does not have")
    return encoding


def _alignment(cursor: Cursor, values: Mapping[str, Value]) -> int:
    alignment = values.get(ALIGNMENT, DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.bad(f"its {ALIGNMENT} is {_told(alignment)}, which is no power of two")
    return alignment


def _told(value: Value) -> str:
    return "a list" if isinstance(value, Listed) else brief(value)


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


def _extent(
    cursor: Cursor,
    path: Path,
    size: int,
    data_begin: int,
    alignment: int,
    described: tuple[str, _Described],
    values: Mapping[str, Value],
) -> Extent:
    name, (shape, encoding, offset) = described
    nbytes = encoding.nbytes_of(shape)
    if nbytes is None or encoding.row_bytes(shape) is None:
        raise cursor.bad(
            f"tensor {brief(name)} of type {encoding.name} and shape {brief(list(shape))} has rows that are no whole blocks of "
            f"{encoding.elements}"
        )
    if offset % alignment:
        raise cursor.bad(
            f"tensor {brief(name)} begins at byte {offset} of the data, which is no multiple of {alignment}"
        )
    begin = data_begin + offset
    if begin + nbytes > size:
        raise BadFile(
            f"{path}: is cut short: it has {sized(size)}, and tensor {brief(name)} alone ends at {sized(begin + nbytes)}. "
            "Download it again. (Where it came in several pieces that had to be joined, join them.)"
        )
    return Extent(name, encoding.name, _original_shape(cursor, name, shape, values), begin, begin + nbytes)


def _original_shape(cursor: Cursor, name: str, shape: tuple[int, ...], values: Mapping[str, Value]) -> tuple[int, ...]:
    value = values.get(ORIGINAL_SHAPE + name)
    if value is None:
        return shape
    if isinstance(value, Listed) and value.kind in INTEGERS and value.count <= MAX_DIMENSIONS:
        original = value.numbers
        if min(original, default=1) >= 0 and _count(original) == _count(shape):
            return original
    raise cursor.bad(
        f"tensor {brief(name)} has the shape {brief(list(shape))}, and not as many elements in the one that it was made of"
    )


def _check_cover(cursor: Cursor, extents: list[Extent], data_begin: int, alignment: int) -> None:
    """Raise unless the tensors lie one behind the other, with no more between them than the
    alignment asks for."""
    at, before = data_begin, "the header"
    for extent in extents:
        if extent.begin != _aligned(at, alignment):
            fault = "overlaps" if extent.begin < at else "leaves a hole after"
            raise cursor.bad(
                f"tensor {brief(extent.name)} at byte {extent.begin} {fault} {before}, which ends at byte {at}"
            )
        at, before = extent.end, brief(extent.name)
