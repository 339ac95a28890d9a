"""The plots: each takes a card's rows of whole models, names its missing ones, and gives SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..end_to_end.row_types import Model, Row
from ..end_to_end.rows import all_rows, table
from .groups import WHO, Rows
from .svg import Canvas, Scale, apart, grid

SIZES = ((480, 832), (720, 1280))
FRAMES = (17, 33, 81)
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Chart:
    """One plot. needs: the rows it shows, all of which must be measured. fills: which command measures them."""

    name: str
    title: str
    needs: tuple[str, ...]
    fills: str
    draw: Callable[[Rows], str]

    def missing(self, rows: Rows) -> list[str]:
        return [name for name in self.needs if name not in rows]


def figure(row: Mapping[str, Any], who: str, name: str = "s") -> float | None:
    """A side's figure; None where it failed."""
    value: float | None = row.get(who, {}).get(name)
    return value


# ------------------------------------------------------------------------------------------------------ share of the bound


def bounded() -> tuple[str, ...]:
    """The rows with a promise, of Wan 2.1. Held to Turing's means they cannot come near this card's bounds, nor are meant to."""
    return tuple(row.name for row in table() if row.note == "" and row.model != "vae22")


def share_of_bound(rows: Rows) -> str:
    """A bar for each row of the table, stock as a mark on it."""
    names = bounded()
    left, top, step = 190.0, 64.0, 24.0
    canvas = Canvas(840, top + step * len(names) + 40)
    x = Scale(0.0, 1.0, left, 715.0)
    bottom = top + step * len(names)
    canvas.text((10, 20), "Share of the bound that each part reaches", "t")
    canvas.text((10, 40), "bound: its arithmetic at this card's best rates, or its copies at the rate of the bus", "s")
    canvas.rect(600, 10, 22, 12, "f-ours")
    canvas.text((628, 20), WHO["ours"], "s")
    canvas.dot((720, 16), "f-stock", 5)
    canvas.text((730, 20), WHO["stock"], "s")
    for tenth in range(0, 11, 2):
        share = tenth / 10
        canvas.line((x(share), top - 6), (x(share), bottom))
        canvas.text((x(share), bottom + 17), f"{share:.0%}", "s m")
    for number, name in enumerate(names):
        y = top + step * number
        canvas.text((left - 8, y + 13), name, "s e")
        ours, stock = (figure(rows[name], who, "share of bound") for who in ("ours", "stock"))
        if ours is not None:
            canvas.rect(left, y + 2, x(ours) - left, step - 8, "f-ours")
        if stock is not None:
            canvas.dot((x(stock), y + step / 2 - 2), "f-stock", 5)
        failed = {who: rows[name].get(who, {}).get("error") for who in WHO}
        words = [f"{ours:.0%}"] if ours is not None else []
        words += [f"{WHO[who]}: {error}" for who, error in failed.items() if error]
        canvas.text((x(ours or 0.0) + 6, y + 13), ", ".join(words), "s")
    return canvas.svg("Share of the bound reached, by part: FuseStream and stock")


# ------------------------------------------------------------------------------------------------------ cost against frames


def sized(model: Model, height: int, width: int, frames: int) -> str:
    return Row(model, "sample", height, width, frames).name


def grown() -> tuple[str, ...]:
    return tuple(
        sized(model, *size, frames) for model in ("wan13", "wan14") for size in SIZES for frames in FRAMES
    )  # fmt: skip


def growth(rows: Rows) -> str:
    """Seconds a step over frames, a panel for each model, on one scale."""
    canvas = Canvas(840, 380)
    seconds = [s for name in grown() for who in WHO if (s := figure(rows[name], who)) is not None]
    y = Scale.over(seconds, 330.0, 60.0, log=True)
    canvas.text((10, 20), "Seconds a step against frames", "t")
    canvas.text((10, 40), "with guidance, a step of two prompts; the scale of seconds is logarithmic", "s")
    panels: tuple[tuple[Model, str], ...] = (("wan13", "1.3B"), ("wan14", "14B"))
    for number, (model, title) in enumerate(panels):
        x = Scale(10.0, 84.0, 60.0 + 400 * number, 300.0 + 400 * number)
        grid(canvas, x, y, FRAMES)
        canvas.text((x.start + 4, 76), title, "t")
        canvas.text(((x.start + x.end) / 2, 366), "frames", "s m")
        ends: list[tuple[float, str, str]] = []
        for height, width in SIZES:
            for who, called in WHO.items():
                found = [(frames, rows[sized(model, height, width, frames)]) for frames in FRAMES]
                points = [(x(frames), y(s)) for frames, row in found if (s := figure(row, who)) is not None]
                canvas.path(points, f"l-{who}") if len(points) > 1 else None
                for point in points:
                    canvas.dot(point, f"f-{who}")
                failed = [frames for frames, row in found if row.get(who, {}).get("error") == OUT_OF_MEMORY]
                for frames in failed:
                    canvas.cross((x(frames), 66), f"l-{who}")
                if failed:
                    ends.append((70.0, f"{called}: {OUT_OF_MEMORY}", f"s f-{who}"))
                if points:
                    at = points[-1][1] + 4
                    ends.append((at, f"{height}p {called}", f"s f-{who}") if not failed else (at, "", ""))
        labels(canvas, x.end + 4, ends)
    return canvas.svg("Seconds a step against frames, 1.3B and 14B at 480p and 720p: FuseStream and stock")


def labels(canvas: Canvas, x: float, ends: Sequence[tuple[float, str, str]]) -> None:
    """Each line's name where it ends, none over another."""
    for (_, words, kind), y in zip(ends, apart([place for place, _, _ in ends]), strict=True):
        if words:
            canvas.text((x, y), words, kind)


# ------------------------------------------------------------------------------------------------------ cost against budget

PLAIN = sized("wan14", 480, 480, 17)


def budgets() -> list[Row]:
    return [row for row in all_rows() if row.group == "budget"]


def budget(rows: Rows) -> str:
    """Seconds a step over GiB of weights that may be held, with what the bus alone would take."""
    canvas = Canvas(820, 340)
    wanted = [(row.ours.vram_budget, row.name) for row in budgets() if row.ours is not None]
    found = [(gib, s, rows[name]) for gib, name in wanted if (s := figure(rows[name], "ours")) is not None]
    stock = figure(rows[PLAIN], "stock")
    y = Scale.over([s for _, s, _ in found] + ([stock] if stock else []), 290.0, 60.0)
    x = Scale(0.0, 17.0, 60.0, 640.0)
    canvas.text((10, 20), "Seconds a step against the budget of VRAM for weights", "t")
    canvas.text(
        (10, 40),
        f"{PLAIN}, whose blocks take 26 GiB: the budget holds what stays on the card and what passes through",
        "s",
    )
    grid(canvas, x, y, [gib for gib, _, _ in found if gib != 2])
    canvas.text(((x.start + x.end) / 2, 326), "GiB", "s m")
    points = [(x(gib), y(s)) for gib, s, _ in found]
    ends = []
    if points:
        canvas.path(points, "l-ours")
        for point in points:
            canvas.dot(point, "f-ours")
        ends.append((points[-1][1] + 4, WHO["ours"], "s f-ours"))
    if stock is not None:
        canvas.path([(x.start, y(stock)), (x.end, y(stock))], "l-stock")
        ends.append((y(stock) + 4, "stock, as the table has it", "s f-stock"))
    arithmetic = rows[PLAIN].get("bounds s", {}).get("arithmetic")
    if arithmetic is not None:
        canvas.path([(x.start, y(arithmetic)), (x.end, y(arithmetic))], "l-bound")
        ends.append((y(arithmetic) + 4, "arithmetic alone", "s f-bound"))
    labels(canvas, x.end + 6, ends)
    return canvas.svg("Seconds a step of 14B against the budget of VRAM for its weights")


CHARTS = (
    Chart("growth", "Cost against frames", grown(), "dev.py bench models --group table --group growth", growth),
    Chart("bounds", "Share of the bound", bounded(), "dev.py bench models", share_of_bound),
    Chart(
        "budget", "Cost against budget", (PLAIN, *(row.name for row in budgets())),
        "dev.py bench models --group table --group budget", budget,
    ),
)  # fmt: skip
