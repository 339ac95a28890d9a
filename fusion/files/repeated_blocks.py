"""What a file holds whose blocks are alike: what most blocks of a list have, each of them has.

For families whose members differ in what a block is made of: no table has to name them all.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ..base.family import Expected

if TYPE_CHECKING:
    from ...memory import WeightFile

# Of the network itself. What goes with a quantised weight is named otherwise, and not every layer has it.
OWN = (".weight", ".bias", ".scale")


def expected(
    header: WeightFile, prefix: str, lists: Iterable[str], ends: Iterable[str], published: Mapping[str, int]
) -> Expected:
    """
    prefix     of the transformer's names in a whole checkpoint
    lists      of blocks, by name
    ends       other tensors that no file lacks
    published  how many blocks the published model of this width has, by list; nothing where none is known
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
