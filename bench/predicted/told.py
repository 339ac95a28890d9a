"""The predictions of each work on each card, by who computes, and their tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..card_rates import CARDS, IN_INT8, PEERS, VISITED, WHO, Card, Who
from ..report.tables import markdown
from .kitchen import computed
from .load import step_seconds
from .passes import pass_bytes
from .speeds import HEAD, Kind, model_of, speeds_on, torchs_attention
from .works import LIVE, Work, works

Unit = Literal["min", "s", "a second"]
HEADS: Mapping[Who, str] = {
    "stock": "ComfyUI",
    "newest": "newest ComfyUI, INT8",
    "newest_attention": "newest, INT8 and its attention",
    "newest_w4a4": "newest, W4A4 and that attention",
    "stored": "*auto*, INT8",
    "precise": "*precise*",
    "fast": "*fast*",
    "turbo": "*turbo*",
    "sparse": f"*turbo*, {VISITED:.0%} of the blocks",
}
SIDES: tuple[Who, ...] = ("stock", "precise", "turbo")  # of whom all steps are told
# Stock's 14B at 720p ran out of memory with 8 GiB free on the card that was measured; with more nobody tried it.
TOO_LARGE, TRIED = "720x1280x81", 8.0
UNKNOWN, OUT_OF_MEMORY = "?", "out of memory"
# Of all steps, a line for each card: heading, work, and in which unit it is told.
WHOLE: tuple[tuple[str, str, Unit], ...] = (
    ("1.3B", "Wan 1.3B 480x832x81", "min"),
    ("14B", "Wan 14B 480x832x81", "min"),
    ("14B, 4 steps", "Wan 14B 480x832x81 in 4 steps", "min"),
    ("5B", "Wan 2.2 5B 704x1280x121", "min"),
    ("klein 4B", "Flux.2 klein 4B 1024x1024", "s"),
    ("live", LIVE, "a second"),
)
WHOLE_SIDES: tuple[Who, ...] = ("stock", "newest_attention", "stored", "turbo")
# README's: two works on three cards.
SHORT_WORKS: tuple[tuple[str, Unit], ...] = (("Wan 14B 480x832x81", "min"), ("Flux.2 klein 4B 1024x1024", "s"))
SHORT_CARDS = ("RTX 2060 Super", "RTX 3060 Ti", "RTX 4060")
SHORT_HEADS: Mapping[Who, str] = {
    "stock": "ComfyUI, FP16",
    "newest": "newest, INT8",
    "newest_attention": "INT8 + attention",
    "newest_w4a4": "W4A4 + attention",
    "stored": "*auto*, INT8",
    "turbo": "*Fastest*",
}


@dataclass(frozen=True)
class Told:
    """Seconds a step, and with INT8 products at half their rate, where that is in doubt and makes a difference."""

    seconds: float
    slow: float | None = None

    def __str__(self) -> str:
        return f"{self.seconds:.3g}" + ("" if self.slow is None else f" ({self.slow:.3g})")

    @property
    def a_second(self) -> str:
        """How often that is done in one."""
        return f"{1 / self.seconds:.2g}" + ("" if self.slow is None else f" ({1 / self.slow:.2g})")


@dataclass(frozen=True)
class Prediction:
    card: Card
    work: Work
    told: Mapping[Who, Told]


NOBODY: Mapping[Kind, Sequence[Who]] = {
    "video": (),
    "picture": ("sparse",),  # too short to leave parts of it out
    "u-net": (*PEERS, "stored", "sparse"),  # there is no INT8 file
    "text": (*PEERS, "stored", "turbo", "sparse"),  # no text encoder multiplies in bytes here
}


def who_does(work: Work) -> Sequence[Who]:
    return [who for who in WHO if who not in NOBODY[work.kind]]


def predictions(results: Mapping[str, Any]) -> Iterator[Prediction]:
    stock, ours = pass_bytes(results, "stock"), pass_bytes(results, "ours")
    rounding = pass_bytes(results, "ours", rounds="heads")
    by: dict[Who, Mapping[str, float]] = {
        "stock": stock,
        "stored": pass_bytes(results, "ours", rounds="products"),
        "turbo": rounding,
        "sparse": rounding,
    }
    todo = works()
    for card in CARDS:
        torchs = torchs_attention(card, HEAD, model_of(card.turing, False)[0])
        for work in todo:

            def seconds(who: Who, slow: bool, card: Card = card, work: Work = work, torchs: float = torchs) -> float:
                if who in PEERS:
                    load, speeds = computed(card, who, work.load, stock, ours, torchs, slow and card.turing)
                else:
                    load, speeds = work.load, speeds_on(card, who, work.kind, by.get(who, ours), slow=slow)
                return step_seconds(load, speeds, card.gib, work.prompts, work.forwards)

            told = {}
            for who in who_does(work):
                usual, slow = seconds(who, False), seconds(who, True) if who in IN_INT8 else None
                told[who] = Told(usual, None if slow == usual else slow)
            yield Prediction(card, work, told)


# ----------------------------------------------------------------------------------------------------------------- cells


def took(seconds: float) -> str:
    """As people say it."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.2g} min" if minutes < 10 else f"{minutes:.0f} min"


def instead(found: Prediction, who: Who) -> str | None:
    """The word in place of a figure, where stock runs out of memory or nobody knows."""
    if who not in ("stock", *PEERS) or TOO_LARGE not in found.work.name:
        return None
    return OUT_OF_MEMORY if who == "stock" and found.card.gib <= TRIED else UNKNOWN


def a_step(found: Prediction, who: Who) -> str:
    if who not in found.told:
        return "-"
    told = found.told[who]
    return instead(found, who) or (told.a_second if found.work.is_live else str(told))


def all_steps(found: Prediction) -> str:
    """Stock, *precise*, *turbo*."""
    if found.work.is_live:
        return " / ".join(f"{1 / found.told[who].seconds:.2g}" for who in SIDES)
    return " / ".join(instead(found, who) or took(found.told[who].seconds * found.work.steps) for who in SIDES)


# ---------------------------------------------------------------------------------------------------------------- tables


def tables(found: Sequence[Prediction]) -> str:
    """One of each work."""
    found_tables: list[str] = []
    for work in works():
        ones = [one for one in found if one.work.name == work.name]
        asked = who_does(work)
        heads = ["Card", *(HEADS[who] for who in asked)]
        is_sum = work.steps > 1
        heads += ["all steps: " + " / ".join(HEADS[who] for who in SIDES)] if is_sum else []
        rows = (
            (one.card.name, *(a_step(one, who) for who in asked), *([all_steps(one)] if is_sum else ())) for one in ones
        )
        found_tables.append(f"Predicted, {work.title}:\n\n{markdown(heads, rows)}")
    return "\n\n".join(found_tables)


def whole_table(found: Sequence[Prediction]) -> str:
    """A line for each card."""
    by = {(one.card.name, one.work.name): one for one in found}
    rows = (
        (
            card.name,
            *(" / ".join(in_all(by[card.name, work], who, unit) for who in WHOLE_SIDES) for _, work, unit in WHOLE),
        )
        for card in CARDS
    )
    return markdown(("Card", *(f"{name}, {unit}" for name, _, unit in WHOLE)), rows)


def short_table(found: Sequence[Prediction]) -> str:
    """README's: both works in a cell."""
    by = {(one.card.name, one.work.name): one for one in found}
    rows = (
        (card, *(" / ".join(in_all(by[card, work], who, unit) for work, unit in SHORT_WORKS) for who in SHORT_HEADS))
        for card in SHORT_CARDS
    )
    return markdown(("", *SHORT_HEADS.values()), rows)


def in_all(found: Prediction, who: Who, unit: Unit) -> str:
    """The time of all steps."""
    if who not in found.told:
        return "-"
    seconds = found.told[who].seconds * found.work.steps
    figure = {"min": seconds / 60, "s": seconds, "a second": 1 / seconds}[unit]
    return f"{figure:.2g}" if figure < 100 else f"{figure:.0f}"


def slowed(found: Sequence[Prediction]) -> tuple[float, float]:
    """How many times as long videos take where INT8 products run at half their rate: the least and the most."""
    told = [told for one in found if one.work.kind == "video" for told in one.told.values()]
    times = [one.slow / one.seconds for one in told if one.slow is not None]
    return min(times), max(times)
