"""Blocks in the names of a file's tensors: where a diffusion model begins, and what a block lacks.

Blocks of a list are alike: a tensor that most of them have, each of them has. So a family whose
members differ in their blocks needs no table that names them all.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ..base.family import Expected

if TYPE_CHECKING:
    from ...memory import WeightFile

# The network's own tensors. Those that go with a quantised weight are named otherwise, and not
# every layer has them.
OWN = (".weight", ".bias", ".scale")


def prefix_of(header: WeightFile, part: re.Pattern[str], beside: Iterable[str]) -> str | None:
    """The prefix of a diffusion model's names: nothing, or what a whole checkpoint puts there.
    None: the file has no such model.

    part    a name in one of its blocks, whose first group is the prefix. Any block will do: a file
            that lacks one is a model of the family all the same
    beside  names of which it has at least one, and relatives with such blocks have none
    """
    names = header.extents.keys()
    found = (match[1] for name in names if (match := part.fullmatch(name)) is not None)
    return next((prefix for prefix in found if any(prefix + name in names for name in beside)), None)


def expected(
    header: WeightFile, prefix: str, lists: Iterable[str], ends: Iterable[str], published: Mapping[str, int]
) -> Expected:
    """
    prefix     of the transformer's names in a whole checkpoint
    lists      of blocks, by name
    ends       other tensors that no file lacks
    published  how many blocks the published model of this width has, by list; nothing where none is
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
