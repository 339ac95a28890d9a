"""Damage for GGUF headers: to one of the numbers and texts of a header, to a whole entry or tensor, to its bytes, and to the
file around it."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

from gguf_files import HEAD, Piece, joined

from fuzz.mutate import Case


@dataclass(frozen=True)
class Sound:
    """A header, by how much its tensors are aligned, and the bytes of all of them."""

    header: tuple[Piece, ...]
    alignment: int
    body: int

    def case(self) -> Case:
        head = joined(self.header)
        return Case(head, -(-len(head) // self.alignment) * self.alignment + self.body)


NUMBERS = (
    0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 16, 24, 30, 31, 32, 33, 63, 64, 100, 255, 256, 257, 1 << 16, 1 << 20, 2**31 - 1, 2**31,
    2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 8, 2**64 - 1,
)  # fmt: skip
TEXTS = (
    b"", b"a", b"general.alignment", b"comfy.gguf.orig_shape.a", b"split.count", b"\x00", b"a\x00b", b"\xff", b"\xc0\x80",
    b"\xed\xa0\x80", b"\xf0\x9f\x98\x80", b"\xe2\x80\xae", b"x" * 70, b"x" * 5000, b"../../etc", b"%s%n", b"{0}", b"'\"\\\n",
)  # fmt: skip
COUNTS = ("tensors", "entries")


def _number(rng: random.Random, header: list[Piece]) -> None:
    at = _any(rng, header, lambda piece: piece.role not in ("text", "magic"))
    if at is not None:
        piece = header[at]
        near = rng.random() < 0.4
        header[at] = piece.holding(
            piece.number + rng.choice((-32, -8, -2, -1, 1, 2, 8, 32)) if near else rng.choice(NUMBERS)
        )


def _role(rng: random.Random, header: list[Piece]) -> None:
    """As a number, with every role as likely as the others."""
    role = rng.choice(sorted({piece.role for piece in header} - {"text", "magic"}))
    at = _any(rng, header, lambda piece: piece.role == role)
    if at is not None:
        header[at] = header[at].holding(rng.choice(NUMBERS))


def _shape(rng: random.Random, header: list[Piece]) -> None:
    """More or fewer dimensions, said rightly; ones, noughts or far too many elements."""
    at = _any(rng, header, lambda piece: piece.role == "dimensions")
    if at is None:
        return
    sizes = header[at].number
    size = Piece("size", struct.pack("<Q", rng.choice((0, 1, 1, 2, 32, 256, 2**32, 2**62, 2**63))), header[at].group)
    extra = rng.choice((1, 1, 2, 4, 8, 40))
    kind = rng.randrange(3)
    if kind == 0 and sizes <= len(header):
        header[at + 1 : at + 1 + sizes] = header[at + 1 : at + 1 + sizes][::-1]
    elif kind == 1:
        header[at + 1 : at + 1] = [size] * extra
        header[at] = header[at].holding(sizes + extra)
    elif sizes:
        del header[at + 1]
        header[at] = header[at].holding(sizes - 1)


def _text(rng: random.Random, header: list[Piece]) -> None:
    """Another text, its length told rightly or as it was."""
    at = _any(rng, header, lambda piece: piece.role == "text")
    if at is None:
        return
    others = [piece.raw for piece in header if piece.role == "text"]
    raw = rng.choice(TEXTS) if rng.random() < 0.6 else rng.choice(others)
    header[at] = replace(header[at], raw=raw)
    if rng.random() < 0.8:
        header[at - 1] = header[at - 1].holding(len(raw))


def _groups(rng: random.Random, header: list[Piece]) -> None:
    """An entry or tensor twice, gone, or elsewhere; the counts follow, mostly."""
    groups = sorted({piece.group for piece in header} - {HEAD})
    if not groups:
        return
    chosen, other = rng.choice(groups), rng.choice(groups)
    own = [piece for piece in header if piece.group == chosen]
    role = "tensors" if any(piece.role == "dimensions" for piece in own) else "entries"
    kind = rng.randrange(3)
    by = 0
    if kind == 0:
        at = max(i for i, piece in enumerate(header) if piece.group == chosen) + 1
        by = rng.choice((1, 1, 2, 50))
        header[at:at] = own * by
    else:
        header[:] = [piece for piece in header if piece.group != chosen]
        by = -1
        if kind == 1 and other != chosen:  # elsewhere
            at = next((i for i, piece in enumerate(header) if piece.group == other), len(header))
            header[at:at] = own
            by = 0
    if rng.random() < 0.8:
        for i, piece in enumerate(header):
            if piece.role == role:
                header[i] = piece.holding(piece.number + by)


def _piece(rng: random.Random, header: list[Piece]) -> None:
    """One number or text twice or gone: all that follows is read as something else."""
    at = rng.randrange(len(header))
    if rng.random() < 0.5:
        header.insert(at, header[at])
    else:
        del header[at]


def _any(rng: random.Random, header: list[Piece], wanted: Callable[[Piece], bool]) -> int | None:
    places = [i for i, piece in enumerate(header) if wanted(piece)]
    return rng.choice(places) if places else None


PIECES: list[Callable[[random.Random, list[Piece]], None]] = [
    _number, _number, _number, _role, _role, _shape, _text, _text, _groups, _groups, _piece,
]  # fmt: skip


def _bytes(rng: random.Random, head: bytes) -> bytes:
    raw = bytearray(head)
    for _ in range(rng.choice((1, 1, 2, 5))):
        if not raw:
            break
        at = rng.randrange(len(raw))
        kind = rng.randrange(4)
        if kind == 0:
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            raw[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif kind == 2:
            del raw[at : at + rng.choice((1, 4, 8))]
        else:
            raw[at:at] = bytes(rng.choice((1, 4, 8))) if rng.random() < 0.5 else b"\xff" * 8
    return bytes(raw)


def mutate(rng: random.Random, sound: Sound) -> Case:
    """One damaged file made from a sound header. Now and then the damage is none at all, which must be seen too."""
    header = list(sound.header)
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 4))):
        if header:
            rng.choice(PIECES)(rng, header)
    case = replace(sound, header=tuple(header)).case()
    lie = rng.random()
    if lie < 0.12:
        return Case(_bytes(rng, case.head), case.size)
    if lie < 0.16:
        return Case(case.head, max(0, case.size + rng.choice((-(2**20), -32, -8, -1, 1, 8, 2**20))))
    if lie < 0.19:
        cut = rng.randrange(len(case.head) + 1)
        return Case(case.head[:cut], cut)
    return case
