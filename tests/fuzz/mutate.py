"""Damage for safetensors headers: to the JSON as a tree, to its text, and to the file around it.

A tree is JSON with its duplicates kept: an object is an `Obj`, a list of pairs. `Raw` is text put into the JSON as it is,
for numbers and nestings that no writer would write.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Obj(list[tuple[Any, Any]]):
    """A JSON object as pairs, so that a name may come twice."""


class Raw(str):
    """JSON text to be written as it is."""

    __slots__ = ()


@dataclass(frozen=True)
class Case:
    """A file: its first bytes, and its size. What lies between is zeros, as weights are nobody's business here."""

    head: bytes
    size: int


def build(header: bytes, body: int) -> Case:
    return Case(struct.pack("<Q", len(header)) + header, 8 + len(header) + body)


def tree_of(header: bytes) -> Obj:
    tree = json.loads(header, object_pairs_hook=Obj)
    assert isinstance(tree, Obj)
    return tree


def text_of(value: Any) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Obj):
        return "{" + ",".join(f"{text_of(key)}:{text_of(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(text_of, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


NUMBERS: list[Any] = [
    0, 1, 2, 3, 4, 5, 7, 8, 16, -1, -(2**31), -(2**63), 2**31 - 1, 2**31, 2**32, 2**53, 2**53 + 1, 2**62, 2**63 - 1, 2**63,
    2**64 - 1, 2**64, 2**64 + 1, 2**65, 10**19, 10**20, 10**25, True, False, None, 0.0, 1.0, -0.5, 1e3, "1", "", [], [1],
    *map(Raw, ("-0", "1e400", "-1e400", "1E2", "1e-400", "NaN", "Infinity", "-Infinity", "01", "+1", "1.", ".5", "0x10",
               "1_0", "{}", '{"a":1}', "1" + "0" * 400, "9" * 5000, "0." + "3" * 500)),
]  # fmt: skip
TEXTS: list[Any] = [
    "a", "b", "", "__metadata__", "__metadata__ ", "dtype", "x" * 300, "\x00", "a\x00b", "\u202e", "\ufeff", "é", "é",
    "\U0001f600", "/", "..", "../../etc", "%s%n", "{0}", "\n", "'", "\\",
    *map(Raw, (r'"\ud800"', r'"\udc00\ud800"', r'"\ud83d\ude00"', r'"\u0000"', r'"\u00e"', r'"\x41"', '"\t"', r'"\u0061"',
               '"' + r"\u0061" * 50 + '"', "'a'", "a", '"')),
]  # fmt: skip
DTYPES: list[Any] = [
    "F16", "BF16", "F32", "F8_E4M3", "U8", "I8", "F4", "F6_E2M3", "C64", "BOOL", "F64", "f16", "F12", "", " F16", "F16\x00",
    "torch.float16", "F8_E4M3FN", None, 16, 1.5, [], ["F16"], True, Raw('{"F16":null}'), Raw('{"U8":null,"I8":null}'),
    Raw(r'"\u00468"'),
]  # fmt: skip


def nest(rng: random.Random) -> Raw:
    depth = rng.choice((1, 2, 5, 20, 100, 127, 128, 129, 900, 1100, 5000, 30000))
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")))
    inner = rng.choice(("", "1", '"a"', "null"))
    if not inner and opening[-1] == ":":
        inner = "1"
    return Raw(opening * depth + inner + (closing * depth if rng.random() < 0.8 else ""))


def junk(rng: random.Random) -> Any:
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice(TEXTS)
    if kind == 2:
        return rng.choice(DTYPES)
    if kind == 3:
        return nest(rng) if rng.random() < 0.3 else Obj()
    if kind == 4:
        return [rng.choice(NUMBERS) for _ in range(rng.choice((0, 1, 2, 3, 8, 100)))]
    return Obj((rng.choice(TEXTS), rng.choice(NUMBERS)) for _ in range(rng.randrange(4)))


def _tensors(tree: Obj) -> list[int]:
    return [i for i, (name, entry) in enumerate(tree) if name != "__metadata__" and isinstance(entry, Obj)]


def _pick(rng: random.Random, tree: Obj) -> Obj:
    """One tensor's entry, or the table itself when there is none."""
    places = _tensors(tree)
    return tree[rng.choice(places)][1] if places else tree


def _change(rng: random.Random, tree: Obj, field: str, change: Callable[[Any], Any]) -> None:
    entry = _pick(rng, tree)
    for at, (name, value) in enumerate(entry):
        if name == field:
            entry[at] = (name, change(value))
            return
    entry.append((field, change([])))


def _number_in(rng: random.Random, value: Any) -> Any:
    if not isinstance(value, list) or isinstance(value, Obj) or not value:
        return [rng.choice(NUMBERS)]
    value = list(value)
    at = rng.randrange(len(value))
    near = value[at] + rng.choice((-8, -2, -1, 1, 2, 8)) if type(value[at]) is int else 0
    value[at] = near if rng.random() < 0.4 else rng.choice(NUMBERS)
    return value


def _shape(rng: random.Random, tree: Obj) -> None:
    def change(value: Any) -> Any:
        sizes = list(value) if type(value) is list else [1]
        kind = rng.randrange(7)
        if kind == 0:
            return [*sizes, 1]  # true still: a shape may have ones
        if kind == 1:
            return sizes[::-1]
        if kind == 2:
            return sizes + [rng.choice((0, 1, 2**32, 2**63))] * rng.choice((1, 3, 50, 400))
        if kind == 3:
            return [rng.choice((0, 2**40, 2**63))] * rng.choice((1, 2, 5))
        if kind == 4:
            return []
        return junk(rng) if kind == 5 else _number_in(rng, value)

    _change(rng, tree, "shape", change)


def _offsets(rng: random.Random, tree: Obj) -> None:
    def change(value: Any) -> Any:
        kind = rng.randrange(6)
        if kind == 0 and type(value) is list:
            return value[::-1]
        if kind == 1 and type(value) is list:
            return value + value[:1]
        if kind == 2 and type(value) is list and value and all(type(n) is int for n in value):
            by = rng.choice((-4, -1, 1, 4, 2**32, 2**64))
            return [n + by for n in value]
        if kind == 3:
            return [rng.choice(NUMBERS), rng.choice(NUMBERS)]
        return junk(rng) if kind == 4 else _number_in(rng, value)

    _change(rng, tree, "data_offsets", change)


def _dtype(rng: random.Random, tree: Obj) -> None:
    _change(rng, tree, "dtype", lambda _: rng.choice(DTYPES) if rng.random() < 0.9 else junk(rng))


def _rename(rng: random.Random, tree: Obj) -> None:
    if tree:
        at = rng.randrange(len(tree))
        name = rng.choice(TEXTS) if rng.random() < 0.7 else rng.choice(tree)[0]
        tree[at] = (name, tree[at][1])


def _repeat(rng: random.Random, tree: Obj) -> None:
    """The same name, or the same bytes under another name, once or hundreds of times."""
    where = tree if rng.random() < 0.7 else _pick(rng, tree)
    if where:
        name, value = rng.choice(where)
        for i in range(rng.choice((1, 1, 1, 2, 500))):
            where.insert(rng.randrange(len(where) + 1), (name if rng.random() < 0.5 else f"{name}.{i}", value))


def _empty(rng: random.Random, tree: Obj) -> None:
    """One more tensor of no bytes, at a border of two others or in the middle of one."""
    ends = [
        v[1] for i in _tensors(tree) for k, v in tree[i][1] if k == "data_offsets" and type(v) is list and len(v) > 1
    ]
    at = rng.choice(ends) if ends else 0
    at = at + rng.choice((0, 0, 0, 1, -1)) if type(at) is int else at
    shape = rng.choice(([0], [0, 5], [5, 0], [0, 2**62, 2**62], [2**62, 2**62, 0], [0, 2**63], [0, 2**64]))
    entry = Obj([("dtype", rng.choice(DTYPES[:5])), ("shape", shape), ("data_offsets", [at, at])])
    tree.insert(rng.randrange(len(tree) + 1), (f"empty{rng.randrange(3)}", entry))


def _field(rng: random.Random, tree: Obj) -> None:
    entry = _pick(rng, tree)
    kind = rng.randrange(3)
    if kind == 0 and entry:
        entry.pop(rng.randrange(len(entry)))
    elif kind == 1:
        entry.append((rng.choice(TEXTS), junk(rng)))
    else:
        rng.shuffle(entry)


def _metadata(rng: random.Random, tree: Obj) -> None:
    value = (
        junk(rng)
        if rng.random() < 0.5
        else Obj((rng.choice(TEXTS), rng.choice(TEXTS)) for _ in range(rng.randrange(4)))
    )
    tree.insert(rng.randrange(len(tree) + 1), ("__metadata__", value))


def _entry(rng: random.Random, tree: Obj) -> None:
    if tree:
        at = rng.randrange(len(tree))
        name, value = tree[at]
        as_list = [item for _, item in value] if isinstance(value, Obj) else [value]
        tree[at] = (name, as_list if rng.random() < 0.3 else junk(rng))


def _drop(rng: random.Random, tree: Obj) -> None:
    if tree:
        tree.pop(rng.randrange(len(tree)))


def _shuffle(rng: random.Random, tree: Obj) -> None:
    rng.shuffle(tree)


TREE: list[Callable[[random.Random, Obj], None]] = [
    _shape, _shape, _offsets, _offsets, _dtype, _rename, _repeat, _empty, _field, _metadata, _entry, _drop, _shuffle,
]  # fmt: skip
PIECES = [
    b"\x00", b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\xe2\x80\xae", b'"', b"\\", b"{", b"}", b"[", b"]", b",",
    b":", b" ", b"\n", b"\x0b", b"\xc2\xa0", b"//", b"null", b"1e400", b"9" * 30, b"-", b"\\u0000", b"\\ud800",
    b"{}" * 20, b"[" * 200,
]  # fmt: skip


def mutate_text(rng: random.Random, header: bytes) -> bytes:
    raw = bytearray(header)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(raw) + 1)
        kind = rng.randrange(7)
        if kind == 0 and at < len(raw):
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(raw):
            raw[at] = rng.randrange(256)
        elif kind == 2:
            raw[at:at] = rng.choice(PIECES)
        elif kind == 3:
            del raw[at : at + rng.choice((1, 1, 2, 5, 20))]
        elif kind == 4:
            other = rng.randrange(len(raw) + 1)
            raw[at:at] = raw[other : other + rng.choice((1, 5, 30))]
        elif kind == 5:
            digits = [i for i, c in enumerate(raw) if 48 <= c <= 57]
            if digits:
                raw[rng.choice(digits)] = rng.choice(b"0123456789-.eE")
        else:
            raw[at:at] = b" " * rng.choice((1, 8, 4000)) if rng.random() < 0.9 else b"\n"
    return bytes(raw)


def mutate(rng: random.Random, header: bytes, body: int) -> Case:
    """One damaged file made from a sound header. Now and then the damage is none at all, which must be seen too."""
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 4))):
        if rng.random() < 0.75:
            try:
                tree = tree_of(header)
                rng.choice(TREE)(rng, tree)
                header = text_of(tree).encode("utf-8", "surrogatepass")
            except (ValueError, RecursionError, AssertionError):  # damaged beyond a tree already: more of the same
                header = mutate_text(rng, header)
        else:
            header = mutate_text(rng, header)
    case = build(header, body)
    lie = rng.random()
    if lie < 0.03:
        length = rng.choice(
            (0, 1, 7, len(header) - 1, len(header) + 1, 2**31, 2**32, 2**63, 2**64 - 1, rng.getrandbits(64))
        )
        return Case(struct.pack("<Q", max(0, length)) + header, case.size)
    if lie < 0.06:
        return Case(case.head, max(0, case.size + rng.choice((-(2**20), -8, -1, 1, 8, 2**20))))
    if lie < 0.08:
        cut = rng.randrange(len(case.head) + 1)
        return Case(case.head[:cut], cut)
    return case
