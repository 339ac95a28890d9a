"""Where the newest ComfyUI is faster than a tier of ours: by kind of work and generation of cards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ..card_rates import PEERS, Who
from ..report.tables import markdown
from .speeds import Kind
from .told import Prediction, instead

TIERS: Mapping[Who, str] = {"stored": "*auto*", "precise": "*Exact*", "fast": "*Balanced*", "turbo": "*Fastest*"}
# In a sentence and in a table.
FILES: Mapping[Who, tuple[str, str]] = {
    "newest": ("an INT8 file, as installed", "INT8, as installed"),
    "newest_attention": ("an INT8 file and its INT8 attention switched on", "INT8, INT8 attention"),
    "newest_w4a4": ("a W4A4 file and that attention", "W4A4, INT8 attention"),
}
KINDS: Mapping[Kind, str] = {"video": "videos", "picture": "pictures"}
CLEAR = 0.02  # what is less is not told as faster
Ratios = Mapping[tuple[Who, Who, Kind, str], Sequence[float]]


def generation(card: str) -> str:
    """`RTX 30` of `RTX 3060 Ti`."""
    return card[: len("RTX 30")]


def ratios(found: Sequence[Prediction]) -> Ratios:
    """How many times as long a tier takes, of every work on every card: by peer, tier, kind of work, generation."""
    told: dict[tuple[Who, Who, Kind, str], list[float]] = defaultdict(list)
    for one in found:
        if one.work.kind not in KINDS:
            continue
        for peer in PEERS:
            if instead(one, peer) is None:
                for tier in TIERS:
                    ratio = one.told[tier].seconds / one.told[peer].seconds
                    told[peer, tier, one.work.kind, generation(one.card.name)].append(ratio)
    return told


def table(found: Sequence[Prediction]) -> str:
    """As Markdown: the least and the most of each."""
    told = ratios(found)
    generations = sorted({key[3] for key in told})
    rows = (
        (file, name, works, *(_between(told[peer, tier, kind, each]) for each in generations))
        for peer, (_, file) in FILES.items()
        for tier, name in TIERS.items()
        for kind, works in KINDS.items()
    )
    return markdown(("newest ComfyUI with", "beside", "works", *generations), rows)


def _between(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    cell = low if low == high else f"{low} to {high}"
    return f"**{cell}**" if max(values) > 1 + CLEAR else cell


def sentences(found: Sequence[Prediction]) -> Sequence[str]:
    """One for each kind of file: than which tier, in some work of this kind on these cards."""
    told = ratios(found)
    generations = sorted({key[3] for key in told})
    lines = []
    for peer, (file, _) in FILES.items():
        where = {tier: _where(told, peer, tier, generations) for tier in TIERS}
        by_place: dict[str, list[str]] = defaultdict(list)
        for tier, name in TIERS.items():
            if where[tier]:
                by_place[where[tier]].append(name)
        said = [f"{_listed(names)} in {place}" for place, names in by_place.items()]
        lines.append(f"With {file}: faster than {'; '.join(said) or 'none'}.")
    return lines


def _where(told: Ratios, peer: Who, tier: Who, generations: Sequence[str]) -> str:
    """The empty word: nowhere."""
    by_kind = {
        works: [each for each in generations if max(told[peer, tier, kind, each]) > 1 + CLEAR]
        for kind, works in KINDS.items()
    }
    if all(len(there) == len(generations) for there in by_kind.values()):
        return "everything"
    everywhere = [works for works, there in by_kind.items() if len(there) == len(generations)]
    on_some = [f"{works} on {_cards(there)}" for works, there in by_kind.items() if 0 < len(there) < len(generations)]
    return " and in ".join((*everywhere, *on_some))


def _cards(generations: Sequence[str]) -> str:
    """`RTX 20, 30 and 40`."""
    first, *others = generations
    return _listed([first, *(each.removeprefix("RTX ") for each in others)])


def _listed(words: Sequence[str]) -> str:
    *others, last = words or [""]
    return f"{', '.join(others)} and {last}" if others else last
