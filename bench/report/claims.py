"""The claims that this project grew from, beside measurements: docs/how-it-works has a table for each document.

Whether a claim is reached is worked out of the figures where it names one. What is not reached comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .figures import UNKNOWN, Cards, Figures
from .tables import markdown

REACHED, MISSED, IN_PART = "reached", "missed", "in part"
OTHERWISE, UNTRIED, PREDICTED = "done otherwise", "not tried", "predicted"
# What is not reached comes first.
ORDER = (UNKNOWN, MISSED, UNTRIED, IN_PART, OTHERWISE, PREDICTED, REACHED)


@dataclass(frozen=True)
class Claim:
    """
    text     what a document promises
    here     what is so here, or how that is found
    reached  whether that is what was promised, or how that is found: one of ORDER
    """

    text: str
    here: str | Callable[[Figures], str]
    reached: str | Callable[[Figures], str]


@dataclass(frozen=True)
class Told:
    """A claim, held against figures. cards: on which it was measured."""

    claim: str
    reached: str
    here: str
    cards: str


def told(cards: Cards, claims: Sequence[Claim]) -> list[Told]:
    """These claims, what is not reached first."""
    found = []
    for claim in claims:
        figures = Figures(cards)
        here = claim.here if isinstance(claim.here, str) else claim.here(figures)
        reached = claim.reached if isinstance(claim.reached, str) else claim.reached(Figures(cards))
        found.append(Told(claim.text, reached, here, ", ".join(figures.used)))
    return sorted(found, key=lambda one: ORDER.index(one.reached))


def verdict(*reached: bool | None) -> str:
    """One of ORDER, for what is promised in so many parts; None: not measured."""
    if None in reached:
        return UNKNOWN
    return REACHED if all(reached) else IN_PART if any(reached) else MISSED


def at_least(least: float, op: str, *labels: str, who: str = "auto") -> Callable[[Figures], str]:
    """Whether an op is so many times stock, at each of these shapes."""

    def found(f: Figures) -> str:
        ratios = [f.ratio(op, label, who) for label in labels]
        return verdict(*(None if ratio is None else ratio >= least for ratio in ratios))

    return found


def tables(cards: Cards, documents: Mapping[str, Sequence[Claim]]) -> str:
    """Markdown: one table for each document."""
    parts = []
    for title, claims in documents.items():
        rows = [(one.claim, one.reached, one.here, one.cards) for one in told(cards, claims)]
        parts.append(f"### {title}\n\n{markdown(('Claim', 'Reached', 'Here', 'Measured on'), rows)}")
    return "\n\n".join(parts)
