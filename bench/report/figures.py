"""Figures of the cards' results, looked up as words when a page is written: none is typed there.

A card stands behind what was measured on it: what the first one lacks is the next one's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

UNKNOWN = "(not measured yet)"

Cards = Sequence[tuple[str, Mapping[str, Any]]]


@dataclass
class Figures:
    """Looks figures up, as words, and remembers whose they are. cards: names and results, the one to be asked first at the head."""

    cards: Cards
    used: dict[str, None] = field(default_factory=dict)  # short names, in the order of their use

    def first(self, has: Callable[[Mapping[str, Any]], Any]) -> Any:
        """The answer of the first card that has one; None without one."""
        for card, results in self.cards:
            if (found := has(results)) is not None:
                self.used[short_name(card)] = None
                return found
        return None

    def row(self, section: str, **wanted: str) -> Mapping[str, Any]:
        """The first row of this op whose other columns begin so; none: an empty one."""

        def has(results: Mapping[str, Any]) -> Mapping[str, Any] | None:
            rows: Sequence[Mapping[str, Any]] = results.get(section, {}).get("rows", [])
            return next((row for row in rows if all(begins(row, *one) for one in wanted.items())), None)

        def begins(row: Mapping[str, Any], name: str, value: str) -> bool:
            found = str(row.get(name, ""))
            return found == value if name == "op" else found.startswith(value)

        found: Mapping[str, Any] = self.first(has) or {}
        return found

    def models(self, *names: str) -> list[Mapping[str, Any]]:
        """Rows of whole models, all of one card; empty ones where no card has them all."""

        def has(results: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
            known = {row["name"]: row for row in results.get("models", {}).get("rows", [])}
            return [known[name] for name in names] if names and known.keys() >= set(names) else None

        found: list[Mapping[str, Any]] = self.first(has) or [{} for _ in names]
        return found

    def model(self, name: str) -> Mapping[str, Any]:
        return self.models(name)[0]

    def seconds(self, name: str, who: str = "ours") -> float | None:
        """Of a whole model. who: ours or stock."""
        found: float | None = self.model(name).get(who, {}).get("s")
        return found

    def faster(self, name: str) -> str:
        """How many times stock, for a whole model."""
        ratio = self.model(name).get("stock / ours")
        return f"{ratio:.2f}x" if ratio else UNKNOWN

    def ratio(self, op: str, label: str, who: str = "ours") -> float | None:
        """How many times stock, for an op. who: `auto` for what a user gets of matrix work."""
        row = self.row("kernels", op=op, label=label)
        return row["stock us"] / row[f"{who} us"] if f"{who} us" in row else None

    def kernel(self, op: str, label: str, who: str = "ours") -> str:
        """The same as words."""
        ratio = self.ratio(op, label, who)
        return UNKNOWN if ratio is None else f"{ratio:.3g}x"

    def pager(self, label: str) -> float | None:
        value: float | None = self.row("pager", label=label).get("found")
        return value


def short_name(card: str) -> str:
    """`nvidia h100 80gb hbm3` -> `H100`."""
    return card.split()[1].upper()
