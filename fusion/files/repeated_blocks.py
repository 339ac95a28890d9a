"""Blocks in the names of a file's tensors: where a diffusion model begins, what a block lacks, and what stock calls it.

Blocks of a list are alike: a tensor that most of them have belongs to each of them. So a family
whose members differ in their blocks needs no table that names them all.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..base.family import Expected

if TYPE_CHECKING:
    from ...memory import WeightFile

# Ends of the names of a network's own tensors. Those that go with a quantised weight have other
# names, and not every layer has them.
OWN = (".weight", ".bias", ".scale")
BLOCK = re.compile(r"blocks\.(\d+)\.(.*)", re.DOTALL)


def prefix_of(header: WeightFile, part: re.Pattern[str], beside: Iterable[str]) -> str | None:
    """The prefix of a diffusion model's names: empty, or the one of a whole checkpoint. None: the
    file has no such model.

    part    a name in one of its blocks, whose first group is the prefix. Any block will do, because
            a file that lacks one is still a model of the family
    beside  names of which it has at least one, while relatives with such blocks have none
    """
    names = header.extents.keys()
    found = (match[1] for name in names if (match := part.fullmatch(name)) is not None)
    return next((prefix for prefix in found if any(prefix + name in names for name in beside)), None)


def renamed(name: str, outside: Mapping[str, str], inside: Mapping[str, str], block: str) -> str:
    """Stock's name of a tensor of a file in which blocks are `blocks.{i}.`, or of one that goes with it,
    such as a scale.

    outside, inside  stock's beginnings of names by the file's: of the network, and within a block
    block            stock's beginning of a block's names, with {} for its number
    """
    found = BLOCK.fullmatch(name)
    inner, names = (name, outside) if found is None else (found[2], inside)
    begun = next((theirs for theirs in names if inner.startswith(theirs)), None)
    if begun is None:
        return name
    stocks = names[begun] + inner.removeprefix(begun)
    return stocks if found is None else block.format(found[1]) + stocks


def published_counts(
    header: WeightFile, end: str, lists: Sequence[str], published: Mapping[int, Sequence[int]]
) -> dict[str, int]:
    """Numbers of blocks of the published model, by list; empty if none has the width.

    end        name of a tensor whose first size is the width
    published  numbers by width, in the order of the lists
    """
    found = header.extents.get(end)
    counts = published.get(found.shape[0], ()) if found is not None and found.shape else ()
    return dict(zip(lists, counts, strict=False))


def expected(
    header: WeightFile, prefix: str, lists: Iterable[str], ends: Iterable[str], published: Mapping[str, int]
) -> Expected:
    """The tensors that a sound file has: `ends`, and in each block those that most blocks have.

    prefix     of the transformer's names in a whole checkpoint
    lists      names of the lists of blocks
    ends       other tensors that every file has
    published  number of blocks of the published model of this width, by list; empty if none is
               known
    """
    block = re.compile(rf"{re.escape(prefix)}({'|'.join(map(re.escape, lists))})\.(\d+)(\..+)")
    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in header.extents:
        if name.endswith(OWN) and (parts := block.fullmatch(name)) is not None:
            found[parts[1]][int(parts[2])].add(parts[3])
    names = [prefix + end for end in ends]
    for kind, blocks in found.items():
        usual = Counter(inner for inside in blocks.values() for inner in inside)
        inside_each = [inner for inner, count in usual.items() if 2 * count > len(blocks)]
        names += [f"{prefix}{kind}.{i}{inner}" for i in range(max(blocks) + 1) for inner in inside_each]
    doubts = [
        f"has {count} {kind}; the published model of its width has {wanted}. If nobody shortened it on purpose, download it again."
        for kind, wanted in published.items()
        if (count := len(found[kind])) != wanted
    ]
    return Expected(dict.fromkeys(names), doubts=doubts)
