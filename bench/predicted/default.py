"""By default beside stock on cards that were not at hand: of stock's time, ours, for each way to store a file.

The newest ComfyUI stands for INT8 files as it is installed, with its INT8 products and torch's attention. Files of the other kinds
stock makes FP16, as ours do: the times differ by attention, passes and what crosses the bus. What stock, or city96's pack, needs to
unpack them is not counted, so ours take at most this part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..card_rates import Card, Who
from ..end_to_end.row_types import Model
from ..end_to_end.rows import KINDS_OF_FILES, WITHOUT
from ..end_to_end.storages import STORED, heading
from ..report.tables import markdown
from .load import step_seconds
from .passes import pass_bytes
from .speeds import speeds_on
from .told import SHORT_CARDS, Prediction
from .works import Work

# The bench's models, as the predicted works call them.
WORKS: Mapping[Model, str] = {
    "wan13": "Wan 1.3B 480x832x81",
    "wan14": "Wan 14B 480x832x81",
    "klein4": "Flux.2 klein 4B 1024x1024",
    "z_image": "Z-Image Turbo 1024x1024",
    "sdxl": "SDXL 1024x1024",
}
MULTIPLY_FP8 = ("RTX 40", "RTX 50")  # there ComfyUI multiplies fp8 on both sides, and attention alone is ours
ON_BOTH_SIDES = "at most 1"
MOST = 1.005  # of stock's time: above, ours is told as slower


def default_table(results: Mapping[str, Any], found: Sequence[Prediction]) -> str:
    """A line for each work, a column for each storage; in a cell the cards of README."""
    by = {(one.card.name, one.work.name): one for one in found}
    passes = {"stock": pass_bytes(results, "stock"), "precise": pass_bytes(results, "ours")}

    def cells(model: Model, work: str) -> tuple[str, ...]:
        ones = [by[card, work] for card in SHORT_CARDS]
        kinds = ("-" if (model, storage) in WITHOUT else told(ones, storage, passes) for storage in KINDS_OF_FILES)
        return work, *kinds

    return markdown(("Work", *map(heading, KINDS_OF_FILES)), (cells(model, work) for model, work in WORKS.items()))


def told(ones: Sequence[Prediction], storage: str, passes: Mapping[str, Mapping[str, float]]) -> str:
    """Of every card, in their order."""
    return " / ".join(cell(one, storage, passes) for one in ones)


def cell(found: Prediction, storage: str, passes: Mapping[str, Mapping[str, float]]) -> str:
    if storage == "fp8_scaled" and found.card.name.startswith(MULTIPLY_FP8):
        return ON_BOTH_SIDES
    part = share(found, storage, passes)
    return f"{part:.2f}" + (" **slower**" if part > MOST else "")


def share(found: Prediction, storage: str, passes: Mapping[str, Mapping[str, float]]) -> float:
    """Of stock's time, ours by default."""
    if storage == "int8_convrot":
        return found.told["stored"].seconds / found.told["newest"].seconds
    stored = STORED[storage]
    return _seconds(found.card, found.work, "precise", passes, stored) / _seconds(
        found.card, found.work, "stock", passes, stored
    )


def _seconds(card: Card, work: Work, who: Who, passes: Mapping[str, Mapping[str, float]], stored: float) -> float:
    speeds = replace(speeds_on(card, who, work.kind, passes[who]), stored=stored)
    return step_seconds(work.load, speeds, card.gib, work.prompts, work.forwards)
