"""A report as a picture: the last pass as a timeline, every block's waits and place, bandwidth,
memory against budgets."""

from __future__ import annotations

from PIL import Image

from ..base.format import counted
from .canvas import MARGIN, SMALL, WIDTH, Canvas, ThemeName
from .data import Report, duration, size
from .live import draw_live
from .summary import summary
from .text import sparse_words

ROWS = (("copy", "bus"), ("use", "compute"), ("stall", "waits"))
NOTHING = 1e-3  # share of a pass: a shorter wait is not drawn
LABEL = 124.0  # room for the names of rows, left of a plot over time


def draw(report: Report, theme: ThemeName = "dark") -> Image.Image:
    """The picture: RGB, WIDTH wide, as high as its content."""
    canvas = Canvas(theme)
    head(canvas, report)
    if report.live is not None:
        draw_live(canvas, report)
    if report.timeline:
        timeline(canvas, report)
    if report.layers:
        layers(canvas, report)
    if any(stretch.kind == "copy" for stretch in report.timeline):
        bandwidth(canvas, report)
    memory(canvas, report)
    foot(canvas, report)
    return canvas.finished()


def head(canvas: Canvas, report: Report) -> None:
    canvas.line(report.title)
    for line in summary(report):
        canvas.line(line, SMALL)
    words = " | ".join(word for word in (report.device, report.policy) if word)
    if words:
        canvas.line(words, SMALL, canvas.theme.faint)
    canvas.line(report.state, SMALL, canvas.theme.faint)
    if report.sparsity is not None:
        canvas.line(f"Sparse attention: {sparse_words(report.sparsity)}.", SMALL)
    if report.foretold is not None:
        canvas.line(f"Step cache: {report.foretold.done}.", SMALL)


def timeline(canvas: Canvas, report: Report) -> None:
    """Draw three rows over the time of the last pass."""
    theme = canvas.theme
    colours = {"copy": theme.copy, "use": theme.use, "stall": theme.stall, "evict": theme.page, "fill": theme.page}
    rows = ROWS + ((("pages", "pages"),) if any(s.kind in ("evict", "fill") for s in report.timeline) else ())
    box = canvas.panel("Last pass", 54 * len(rows) + 6, [(name, colours.get(kind, theme.page)) for kind, name in rows])
    left, top, right, _ = box
    label, span = LABEL, max(stretch.end for stretch in report.timeline) or 1e-9
    scale = (right - left - label - 8) / span
    row_of = {kind: number for number, (kind, _) in enumerate(rows)}
    row_of |= {"evict": len(ROWS), "fill": len(ROWS)}
    for number, (_, name) in enumerate(rows):
        canvas.text(left + 10, top + 30 + 54 * number, name, SMALL, theme.faint, "lm")
    for stretch in report.timeline:
        if stretch.kind == "stall" and stretch.end - stretch.start < span * NOTHING:
            continue  # a mark is at least a pixel wide, which would exaggerate a few microseconds
        y = top + 6 + 54 * row_of[stretch.kind]
        x = left + label + stretch.start * scale
        # A gap between neighbours, if there is room for one.
        end = max(x + 1, left + label + stretch.end * scale - 1)
        canvas.rect((x, y, end, y + 46), colours[stretch.kind])
    share = label / (right - left)
    canvas.axis(box, [(share, "0"), (share + (1 - share) / 2, duration(span / 2)), (1.0, duration(span))])


def layers(canvas: Canvas, report: Report) -> None:
    """Draw a column for each block: its computing and waiting, the predicted wait and, below, where
    it is."""
    theme = canvas.theme
    keys = [
        ("compute", theme.use),
        ("waits", theme.stall),
        ("predicted", theme.ink),
        ("stays", theme.resident),
        ("streamed", theme.copy),
    ]
    box = canvas.panel("Blocks", 280, keys)
    left, top, right, bottom = box
    floor, room = bottom - 52, bottom - 52 - top - 44
    tallest = (
        max((layer.use + max(layer.stall, layer.predicted or 0.0) for layer in report.layers), default=0.0) or 1e-9
    )
    width = (right - left - 16) / len(report.layers)
    for number, layer in enumerate(report.layers):
        x, end = left + 8 + number * width, left + 8 + (number + 1) * width - (2 if width > 6 else 0)
        used, waited = (room * seconds / tallest for seconds in (layer.use, layer.stall))
        if used:
            canvas.rect((x, floor - used, end, floor), theme.use)
        if waited:
            canvas.rect((x, floor - used - waited, end, floor - used), theme.stall)
        if layer.predicted is not None:
            y = floor - used - room * layer.predicted / tallest
            canvas.rect((x, y - 1, end, y + 1), theme.ink)
        canvas.rect((x, floor + 10, end, bottom - 10), theme.resident if layer.resident else theme.copy)
    canvas.text(left + 10, top + 6, f"tallest: {duration(tallest)}", SMALL, theme.faint)
    last = report.layers[-1].name
    streamed = f", {size(report.streamed_bytes)} streamed in each pass" if report.streamed_bytes else ""
    words = f"{size(report.resident_bytes)} stay{streamed}"
    canvas.axis(box, [(0.0, report.layers[0].name), (0.5, words), (1.0, last)])


def bandwidth(canvas: Canvas, report: Report) -> None:
    """Draw the rate of each copy over the time of the last pass."""
    theme = canvas.theme
    copies = [stretch for stretch in report.timeline if stretch.kind == "copy" and stretch.nbytes]
    span = max(stretch.end for stretch in report.timeline) or 1e-9
    rates = [copy.nbytes / max(copy.end - copy.start, 1e-9) for copy in copies]
    peak = max(rates, default=0.0) or 1.0
    box = canvas.panel("Bandwidth", 130, [("bytes per second of each copy", theme.copy)])
    left, top, right, bottom = box[0] + LABEL, box[1], box[2] - 8, box[3]
    for copy, rate in zip(copies, rates, strict=True):
        x, end = (left + (right - left) * at / span for at in (copy.start, copy.end))
        canvas.rect((x, bottom - (bottom - top - 36) * rate / peak, end, bottom), theme.copy)
    canvas.text(left + 10, top + 6, f"highest {peak / 1e9:.2f} GB/s", SMALL, theme.faint)
    share = LABEL / (box[2] - box[0])
    words = f"{report.rate / 1e9:.2f} GB/s while copying, all passes"
    canvas.axis(box, [(share, "0"), (share + (1 - share) / 2, words), (1.0, duration(span))])


def memory(canvas: Canvas, report: Report) -> None:
    """Draw a bar for each pool: taken now, the most ever taken, and the limit."""
    pools = [pool for pool in report.memories if pool.limit > 0]
    if not pools:
        return
    theme = canvas.theme
    left, top, right, _ = canvas.panel(
        "Memory", 62 * len(pools) + 8, [("now", theme.use), ("most", theme.ink), ("limit", theme.faint)]
    )
    for number, pool in enumerate(pools):
        y, end = top + 8 + 62 * number, right - 12
        start = left + 10
        words = f"{size(pool.used)} of {size(pool.limit)}" + (f", most {size(pool.peak)}" if pool.peak else "")
        canvas.text(start, y, pool.name, SMALL)
        canvas.text(end, y, words, SMALL, theme.faint, "ra")
        bar = y + SMALL + 7
        canvas.rect((start, bar, end, bar + 20), theme.panel, theme.faint)
        canvas.rect((start, bar, start + (end - start) * min(1.0, pool.used / pool.limit), bar + 20), theme.use)
        if pool.peak:
            x = start + (end - start) * min(1.0, pool.peak / pool.limit)
            canvas.rect((x - 3, bar - 3, x, bar + 23), theme.ink)


def foot(canvas: Canvas, report: Report) -> None:
    canvas.y += 8
    for advice in (*report.advice, *report.spare)[:2]:
        canvas.line(advice, SMALL)
    if report.gaps:
        canvas.line(
            f"{counted(len(report.gaps), 'thing')} could not be found out; the text says why.",
            SMALL,
            canvas.theme.stall,
        )


__all__ = ["MARGIN", "WIDTH", "draw"]
