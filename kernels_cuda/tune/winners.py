"""The winners, on disk (`kept_entries.py`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..kept_entries import KeptEntries


@dataclass(frozen=True)
class Winner:
    """The fastest candidate for one (op, shape class, card, driver, code), and the seconds of each
    candidate."""

    name: str
    seconds: dict[str, float]


class WinnersFile(KeptEntries[Winner]):
    title, words = "winners", "kernel choices"

    def read(self, written: Any) -> Winner:
        return Winner(str(written["name"]), {str(n): float(s) for n, s in written["seconds"].items()})

    def written(self, entry: Winner) -> Any:
        return asdict(entry)
