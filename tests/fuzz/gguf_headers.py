"""Hands damaged GGUF headers to `read_header` and watches what it does.

    python tests/fuzz/gguf_headers.py --count 1000000 --seed 1 --jobs 2

The rule is `campaign.py`'s. What an accepted header promises is told anew by a few lines that trust the file; the `gguf`
package is the second opinion: it reads what is accepted, or the reason stands in `LAXER`, and refuses what is refused in the
words of `AGREED`.

What it found: nothing in 1 000 000 cases (seed 12) with version 0.19.0 of the package beside it.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import gguf

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Path(__file__).resolve().parent / "corpus" / "gguf.jsonl"
if __name__ == "__main__":  # called as a script: nobody has loaded the pack or put `tests` on the path
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]
    from bed import pack

    pack.load()

from gguf_files import TYPES, Tensor, Typed, nbytes, pieces  # noqa: E402

from fusestream.memory import WeightFile, read_header  # noqa: E402
from fuzz import campaign  # noqa: E402
from fuzz.campaign import SLOW, Finding, is_text, need  # noqa: E402
from fuzz.mutate import Case  # noqa: E402
from fuzz.mutate_gguf import Sound, mutate  # noqa: E402

BY_NUMBER = {number: (name, elements, size) for name, (number, elements, size) in TYPES.items()}
MOST_BYTES = 1 << 16  # of a file that the package is asked about: it reads lists element by element

# What is refused with these words the package refuses, too. About the rest it is not asked: it looks at little, and of a list
# that is longer than the file it reads every element, which takes years.
AGREED = (
    "is a GGUF file of version",
    "metadata entry .* is of the unknown kind",
    "which ggml does not have",
    "among its tensors",
)
# We take these, the package does not.
LAXER = {
    "array is too big|Maximum allowed dimension": "of a tensor without elements numpy counts those of its other dimensions",
    "Bad type for general.alignment": "an integer of another kind says the same",
    "tuple index out of range": "a single number, of a type that numpy does not have",
}


def judge(path: Path) -> str:
    """`read_header`'s answer, held to the rule: "accepted", or the message it refused with."""
    verdict, header = campaign.answer(path, read_header, SLOW)
    if header is not None:
        check_promises(path, header)
    if path.stat().st_size <= MOST_BYTES:
        compare(path, verdict)
    return verdict


class Plain:
    """A GGUF header read by somebody who trusts it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.file.seek(8)
        tensors, entries = self.take("<QQ")
        self.values = {self.text(): self.value() for _ in range(entries)}
        self.tensors = []
        for _ in range(tensors):
            name, (dimensions,) = self.text(), self.take("<I")
            self.tensors.append((name, self.take(f"<{dimensions}Q")[::-1], *self.take("<IQ")))
        alignment = self.values.get("general.alignment", 32)
        self.begin = -(-self.file.tell() // alignment) * alignment

    def take(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self.file.read(struct.calcsize(form)))

    def text(self) -> str:
        return self.file.read(*self.take("<Q")).decode()

    def value(self, kind: int | None = None) -> Any:
        if kind is None:
            (kind,) = self.take("<I")
        if kind == 8:
            return self.file.read(*self.take("<Q"))
        if kind == 9:
            kind, count = self.take("<IQ")
            return [self.value(kind) for _ in range(count)]
        return self.take("<" + "BbHhIif?..Qqd"[kind])[0]


def check_promises(path: Path, header: WeightFile) -> None:
    """What an accepted header promises, told anew from the file."""
    with path.open("rb") as file:
        plain = Plain(file)
    size = path.stat().st_size
    need(header.path == path and header.size == size, "wrong path or size")
    need(header.values.keys() == plain.values.keys(), "other metadata than in the file")
    need(all(map(is_text, (*header.metadata, *header.metadata.values()))), "metadata that is no text")
    need(header.metadata.keys() == {k for k, v in plain.values.items() if isinstance(v, bytes)}, "other texts")
    need(len(plain.tensors) == len(header.extents), "a name comes twice")
    ends = plain.begin
    for extent in header.extents.values():
        need(ends <= extent.begin, "extents that overlap, or are not in order")
        ends = extent.end
    for name, shape, number, offset in plain.tensors:
        extent = header.extents[name]
        kind, elements, block = BY_NUMBER[number]
        original = plain.values.get(f"comfy.gguf.orig_shape.{name}", shape)
        need(extent.name == name and is_text(name), "a name that is no text")
        need((extent.dtype, list(extent.shape)) == (kind, list(original)), "another type or shape")
        need(all(type(n) is int and 0 <= n < 2**63 for n in extent.shape), "a size that torch cannot hold")
        count = 1
        for n in shape:
            count *= n
        need(count < 2**63 and count % elements == 0, "a shape that is no whole blocks")
        need(extent.nbytes == count // elements * block, "a size that type and shape do not give")
        need(extent.begin == plain.begin + offset and extent.end <= size, "an extent that lies elsewhere")


def compare(path: Path, verdict: str) -> None:
    """The package's opinion on the same file."""
    if verdict != "accepted" and not any(re.search(why, verdict) for why in AGREED):
        return
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            gguf.GGUFReader(path)
    except Exception as error:  # it raises whatever its arithmetic raises
        why = f"{type(error).__name__}: {error}"
        if verdict == "accepted" and not any(re.search(known, why) for known in LAXER):
            raise Finding(f"accepted, but the package says {why[:200]}") from error
        return
    if verdict != "accepted":
        raise Finding(f"the package reads it; refused with {verdict[:200]}")


def seeds() -> list[Sound]:
    """Sound headers made by hand, with the size of what follows them."""
    shape = [Typed("i32", n) for n in (64, 2, 2)]
    models: list[tuple[dict[str, Any], list[Tensor], int]] = [
        ({}, [], 32),
        ({"general.architecture": "wan"}, [Tensor("a", "F16", (2, 3))], 32),
        (
            {
                "general.architecture": "t5encoder",
                "general.alignment": 64,
                "n": Typed("u64", 2**40),
                "yes": True,
                "x": 0.5,
            },
            [Tensor("a", "Q8_0", (3, 32)), Tensor("b", "Q4_K", (2, 512)), Tensor("é\U0001f600", "F32", (5,))],
            64,
        ),
        (
            {"comfy.gguf.orig_shape.a": shape, "tokens": ["a", "b", ""], "scores": [0.5, 1.0], "types": [True, False]},
            [
                Tensor("a", "Q6_K", (1, 256)),
                Tensor("s", "F32", ()),
                Tensor("e", "BF16", (0, 4)),
                Tensor("i", "I8", (3,)),
            ],
            32,
        ),
        ({"split.no": 0, "split.count": 1, "none": []}, [Tensor(n, "F16", (4,)) for n in "abcd"], 32),
        ({}, [Tensor("big", "Q4_0", (2**17, 2**17)), Tensor("c", "F64", (1, 2, 3, 4, 5))], 32),
    ]
    return [
        Sound(
            tuple(pieces(values, tensors, version=2 + i % 2, alignment=alignment)),
            alignment,
            sum(-(-nbytes(one) // alignment) * alignment for one in tensors),
        )
        for i, (values, tensors, alignment) in enumerate(models)
    ]


def corpus() -> Iterator[tuple[str, Case, str]]:
    """The kept cases: a name, the file, and how the answer must begin."""
    for line in CORPUS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield row["name"], Case(base64.b64decode(row["head"]), row["size"]), row["says"]


def run(seed: int, count: int, sound: list[Sound], folder: Path) -> tuple[Counter[str], list[dict[str, Any]]]:
    return campaign.run(mutate, judge, seed, count, sound, folder)


if __name__ == "__main__":
    raise SystemExit(campaign.command(__doc__, mutate, judge, lambda _folder: seeds()))
