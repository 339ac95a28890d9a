"""Our attention kernels: which of them are predicted, and what their machine code does not say.

A walk leaves out the search for new maxima, which long inputs meet once or twice a row, and on sm_86 the cut at the last key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .flow import Rules

UNIT = "attention.cubin"
HEADS = (64, 96, 128)
TIERS = ("precise", "fast", "turbo", "turbo_half")
# By the folder of what was compiled: the cards, and the branches that are taken.
VARIANTS = {
    "sm_75": (("2060s",), ("SHFL", "FSEL:16")),
    "sm_86": (("3060ti", "4060"), ("SHFL", "FSEL:16")),
    "sm_120": (("5060",), ("SHFL", "FSEL:16")),
}
KEYS = 32  # of a tile, which is an iteration


@dataclass(frozen=True)
class Kernel:
    """listed: visits the blocks of a list, and has their tail."""

    head: int
    tier: str
    listed: bool

    @property
    def symbol(self) -> str:
        return f"attention_{self.head}_{self.tier}" + ("_listed" if self.listed else "")

    @property
    def label(self) -> str:
        return f"attention {self.head} {self.tier}" + (" listed" if self.listed else "")

    def flops(self, rows: int) -> int:
        """Of a block, for one tile of keys: QK and PV."""
        return 2 * 2 * rows * KEYS * self.head


# Lists are for models of many tokens, whose heads have 128 elements.
KERNELS = (
    *(Kernel(head, tier, False) for head in HEADS for tier in TIERS),
    *(Kernel(128, tier, True) for tier in TIERS),
)


def rules(variant: str) -> Rules:
    return Rules(skip=VARIANTS[variant][1])


# ----------------------------------------------------------------------------------------------------------- README's tables

PAGE = Path(__file__).parent / "README.md"
_BLOCK = re.compile(r"(<!-- attention:begin (\w+) -->\n).*?(<!-- attention:end -->)", re.DOTALL)
_HEADS = ("heads of", "`precise`", "`fast`", "`turbo`, FP32 sums", "`turbo`, half sums")


def rendered(page: str, stored: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with its tables anew. stored: predictions, by the variant that they are of."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{_table(stored[found[2]])}\n\n{found[3]}", page)


def _table(stored: Mapping[str, Any]) -> str:
    rows = [_HEADS, ("---",) * len(_HEADS), *_rows(stored)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _rows(stored: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for listed in (False, True):
        for head in sorted(HEADS, reverse=True):
            kernels = [kernel for kernel in KERNELS if (kernel.head, kernel.listed) == (head, listed)]
            if kernels:
                name = f"{head}, blocks of a list" if listed else str(head)
                yield name, *(_told(stored[kernel.label]["predictions"]) for kernel in kernels)


def _told(predictions: list[Mapping[str, Any]]) -> str:
    """TFLOP/s on each card, and of the first one the share of the peak of these sums."""
    found = [p for p in predictions if p["as_compiled"]]
    speeds = " / ".join(f"{p['tflops']:.1f}" for p in found)
    return f"{speeds}, {found[0]['share']:.0%}"
