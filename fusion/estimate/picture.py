"""An estimate as a picture: memory as a bar, and its time beside those of possible changes."""

from __future__ import annotations

from PIL import Image

from ..base.card_rates import Source
from ..base.format import took
from ..report.canvas import MARGIN, SMALL, WIDTH, Canvas, ThemeName
from ..report.data import size
from . import words
from .fit import Fit, Verdict
from .plan import Estimate

NAMES = 400.0  # room for the names of rows
ROW = 54


def draw(found: Estimate, theme: ThemeName = "dark") -> Image.Image:
    """The picture: RGB, WIDTH wide, as high as its content."""
    canvas = Canvas(theme)
    canvas.line(found.title)
    canvas.line(words.asked(found), SMALL)
    if found.assumed:
        canvas.line(found.assumed, SMALL, canvas.theme.stall)
    if found.fit is None:
        canvas.line(words.WHOLE, SMALL)
    else:
        canvas.line(words.verdict(found.fit))
        canvas.line(words.time(found), SMALL)
        memory(canvas, found.fit)
        if found.ram is not None:
            canvas.line(f"RAM: {words.ram(found.ram)}", SMALL)
        if found.seconds is not None:
            times(canvas, found)
    below = " | ".join(word for word in (found.card, found.kernels) if word)
    if below:
        canvas.line(below, SMALL, canvas.theme.faint)
    for gap in found.gaps:
        canvas.line(gap, SMALL, canvas.theme.stall)
    return canvas.finished()


def memory(canvas: Canvas, fit: Fit) -> None:
    """Draw one bar: bytes taken, against bytes free. An excess stands over its end."""
    theme = canvas.theme
    parts = [
        ("weights", fit.held - fit.window + fit.kept, theme.resident),
        ("window", fit.window, theme.copy),
        ("rest", fit.rest, theme.page),
        ("activations", fit.activations, theme.use),
    ]
    parts = [part for part in parts if part[1] > 0]
    left, top, right, _ = canvas.panel("Memory", 108, [(name, colour) for name, _, colour in parts])
    start, end = left + 12, right - 12
    whole = max(fit.free, sum(nbytes for _, nbytes, _ in parts))
    scale = (end - start) / max(whole, 1)
    x = start
    for _, nbytes, colour in parts:
        canvas.rect((x, top + 12, max(x + 1, x + nbytes * scale - 1), top + 56), colour)
        x += nbytes * scale
    limit = start + fit.free * scale
    if x > limit:  # more than is free
        canvas.rect((limit, top + 48, x, top + 60), theme.stall)
    canvas.rect((limit - 2, top + 6, limit + 1, top + 62), theme.ink)
    told = [f"{size(nbytes)} {name}" for name, nbytes, _ in parts]
    canvas.text(start, top + 70, canvas.fitted(", ".join(told), (end - start) * 0.82, SMALL), SMALL, theme.faint)
    canvas.text(end, top + 70, f"{size(fit.free)} free", SMALL, theme.ink, "ra")


def times(canvas: Canvas, found: Estimate) -> None:
    """Draw a bar of time for the work as it is, and for each change whose time is known."""
    theme = canvas.theme
    assert found.total is not None and found.seconds is not None
    is_too_large = found.fit is not None and found.fit.verdict is Verdict.NOT
    rows = [
        (
            "as it is",
            found.seconds,
            words.length(found.total, found),
            found.total,
            Verdict.NOT.value if is_too_large else "",
        )
    ]
    rows += [
        (
            words.change_name(change),
            change.seconds,
            words.length(change.total, change),
            change.total,
            _fits(found, change.fit),
        )
        for change in found.changes
        if change.seconds is not None and change.total is not None
    ]
    keys = (
        [("measured", theme.use)] if found.source in (Source.MEASURED, Source.SCALED) else [("predicted", theme.copy)]
    )
    colour = keys[0][1]
    left, top, right, _ = canvas.panel("Time in all", ROW * len(rows) + 12, keys)
    longest = max(total for *_, total, _ in rows) or 1e-9
    start, end = left + 12 + NAMES, right - 300
    for number, (name, seconds, length, total, fits) in enumerate(rows):
        y = top + 8 + ROW * number
        canvas.text(left + 12, y + ROW / 2 - 2, canvas.fitted(name, NAMES - 12, SMALL), SMALL, theme.ink, "lm")
        x = start + (end - start) * total / longest
        canvas.rect((start, y + 8, x, y + ROW - 12), colour)
        told = fits or f"{length}, {took(seconds)} a step"
        canvas.text(
            x + 12, y + ROW / 2 - 2, canvas.fitted(told, WIDTH - MARGIN - x - 18, SMALL), SMALL, theme.faint, "lm"
        )


def _fits(found: Estimate, fit: Fit | None) -> str:
    """Words for a change that decides whether it fits; else empty."""
    if fit is None or found.fit is None or (fit.verdict is Verdict.NOT) == (found.fit.verdict is Verdict.NOT):
        return ""
    return fit.verdict.value


__all__ = ["draw"]
