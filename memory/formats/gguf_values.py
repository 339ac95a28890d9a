"""Numbers, texts and lists of a GGUF file, taken one after the other from an untrusted file.

A `Cursor` reads only as much of the file as it is asked for. It believes no length or count before
that many bytes are there.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from ..file import BadFile, brief, sized, told_as_bad_file

# The longest real headers hold vocabularies of language models: 250 000 tokens with scores and
# merges, 16 MB.
MAX_HEADER_BYTES = 64 << 20
# Texts in all lists together; each costs a turn of Python's loop. A vocabulary and its merges are
# 600 000.
MAX_TEXTS = 1 << 20
MAX_NAME_BYTES = (1 << 16) - 1
FIRST_READ = 64 << 10

TEXT, LIST, BOOL = 8, 9, 7
# Kinds of values of a fixed size, by their numbers in the file.
FIXED = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"), 4: struct.Struct("<I"),
    5: struct.Struct("<i"), 6: struct.Struct("<f"), BOOL: struct.Struct("<?"), 10: struct.Struct("<Q"), 11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}  # fmt: skip
_U32, _U64 = FIXED[4], FIXED[10]


@dataclass(frozen=True)
class Listed:
    """A list in a header, kept as bytes until it is read, because a vocabulary is long and rarely
    asked for.

    kind   of its elements, by the number in the file
    where  for messages: the file and the name of the value
    """

    kind: int
    count: int
    raw: bytes
    where: str

    def __len__(self) -> int:
        return self.count

    @cached_property
    def numbers(self) -> tuple[Any, ...]:
        """The elements of a list of numbers or truths."""
        if self.kind not in FIXED:
            raise BadFile(f"{self.where} is a list of texts, where numbers should be. The file is damaged.")
        return tuple(value for (value,) in FIXED[self.kind].iter_unpack(self.raw))

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """The elements of a list of texts."""
        if self.kind != TEXT:
            raise BadFile(f"{self.where} is a list of numbers, where texts should be. The file is damaged.")
        found, at = [], 0
        for _ in range(self.count):
            begin = at + 8
            at = begin + _U64.unpack_from(self.raw, at)[0]
            found.append(self.raw[begin:at])
        try:
            return tuple(text.decode() for text in found)
        except UnicodeDecodeError as error:
            raise BadFile(
                f"{self.where} has a text that is no UTF-8. The file is damaged; download it again."
            ) from error


Value = bool | int | float | str | Listed


class Cursor:
    """A position in the header of an open file, of which `beginning` was read already."""

    def __init__(self, path: Path, file: BinaryIO, size: int, beginning: bytes) -> None:
        self.at = 0
        self.path, self._file, self._size = path, file, size
        self._raw = bytearray(beginning)
        self._texts_left = MAX_TEXTS

    def number(self, kind: struct.Struct) -> Any:
        """The next number, of a fixed size."""
        (value,) = kind.unpack_from(self._raw, self._passed(kind.size))
        return value

    def u32(self) -> int:
        value: int = self.number(_U32)
        return value

    def u64(self) -> int:
        value: int = self.number(_U64)
        return value

    def take(self, count: int) -> bytes:
        begin = self._passed(count)
        return bytes(self._raw[begin : self.at])

    def name(self, what: str) -> str:
        """The next text, as a name: at most `MAX_NAME_BYTES` long."""
        length = self.u64()
        if length > MAX_NAME_BYTES:
            raise self.bad(f"{what} has a name of {length} bytes")
        return self._decoded(self.take(length), f"the name of {what}")

    def value(self, name: str) -> Value:
        """The value behind the name of a metadata entry: its kind, then the value."""
        kind = self.u32()
        if kind == TEXT:
            return self._decoded(self.take(self.u64()), f"the metadata entry {brief(name)}")
        if kind == LIST:
            return self._list(name)
        if kind not in FIXED:
            raise self.bad(f"its metadata entry {brief(name)} is of the unknown kind {kind}")
        if kind == BOOL:
            self._refuse_odd_truth(name, self.take(1))
            self.at -= 1
        value: Value = self.number(FIXED[kind])
        return value

    def bad(self, why: str) -> BadFile:
        return BadFile(f"{self.path}: {why}. The file is damaged; download it again.")

    def _list(self, name: str) -> Listed:
        kind, count = self.u32(), self.u64()
        begin = self.at
        if kind == TEXT:
            self._pass_texts(count, name)
        elif kind == LIST:
            raise self.bad(f"its metadata entry {brief(name)} is a list of lists, which no model has")
        elif kind in FIXED:
            self._passed(count * FIXED[kind].size)
        else:
            raise self.bad(f"its metadata entry {brief(name)} is a list of the unknown kind {kind}")
        raw = bytes(self._raw[begin : self.at])
        if kind == BOOL:
            self._refuse_odd_truth(name, raw)
        return Listed(kind, count, raw, f"{self.path}: the metadata entry {brief(name)}")

    def _pass_texts(self, count: int, name: str) -> None:
        if count > self._texts_left:
            raise self.bad(f"its metadata entry {brief(name)} is a list of {count} texts, more than any vocabulary")
        self._texts_left -= count
        raw, at, length_of = self._raw, self.at, _U64.unpack_from
        for _ in range(count):
            if at + 8 > len(raw):
                self._have(at + 8)
            at += 8 + length_of(raw, at)[0]
        self._have(at)
        self.at = at

    def _refuse_odd_truth(self, name: str, raw: bytes) -> None:
        if raw.translate(None, b"\x00\x01"):
            raise self.bad(f"its metadata entry {brief(name)} is neither true nor false")

    def _decoded(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.bad(f"{what} is no UTF-8 text") from error

    def _passed(self, count: int) -> int:
        """Move past the next `count` bytes, reading them if need be; return where they begin."""
        begin = self.at
        self._have(begin + count)
        self.at = begin + count
        return begin

    def _have(self, end: int) -> None:
        if end <= len(self._raw):
            return
        if end > self._size:
            raise BadFile(
                f"{self.path}: is cut short: its header alone needs {sized(end)} at least, the file has {sized(self._size)}. "
                "Download it again."
            )
        if end > MAX_HEADER_BYTES:
            raise self.bad(f"its header has {end} bytes at least, more than any model's")
        # At least doubled each time, so that growing copies in proportion to the header.
        upto = min(max(end, 2 * len(self._raw), FIRST_READ), self._size, MAX_HEADER_BYTES)
        with told_as_bad_file(self.path):
            self._raw += self._file.read(upto - len(self._raw))
        if len(self._raw) < end:
            raise BadFile(f"{self.path}: shrank while it was read. Wait until the download has finished.")
