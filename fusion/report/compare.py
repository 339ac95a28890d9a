"""Two reports side by side: their differences as text, their pictures beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from PIL import Image

from ..base.format import took
from .canvas import MARGIN, THEMES, ThemeName
from .data import Report, duration, size
from .picture import draw

FIGURES: tuple[tuple[str, Callable[[Report], float], Callable[[float], str]], ...] = (
    ("sampling", lambda r: (r.sampling and r.sampling.spent) or 0.0, took),
    ("a step", lambda r: (r.sampling and r.sampling.seconds) or 0.0, took),
    ("a pass through all blocks", lambda r: r.pass_seconds, duration),
    ("of it waiting", lambda r: r.stall_seconds, duration),
    ("predicted", lambda r: r.predicted_pass or 0.0, duration),
    ("a sparse attention", lambda r: (r.sparsity and r.sparsity.seconds) or 0.0, duration),
    ("key blocks it visits", lambda r: (r.sparsity and r.sparsity.visited) or 0.0, lambda share: f"{share:.1%}"),
    ("blocks that stay in VRAM", lambda r: r.resident_bytes, size),
    ("streamed in each pass", lambda r: r.streamed_bytes, size),
    ("window that they pass through", lambda r: r.window, size),
    ("bandwidth", lambda r: r.rate, lambda rate: f"{rate / 1e9:.2f} GB/s"),
    ("hidden copying", lambda r: r.overlap, lambda share: f"{share:.0%}"),
)


def draw_pair(first: Report, second: Report, theme: ThemeName = "dark") -> Image.Image:
    """Both pictures in one, the second to the right."""
    pictures = [draw(first, theme), draw(second, theme)]
    width = sum(picture.width for picture in pictures)
    sheet = Image.new("RGB", (width, max(picture.height for picture in pictures)), THEMES[theme].ground)
    for number, picture in enumerate(pictures):
        sheet.paste(picture, (number * pictures[0].width, 0))
    line = pictures[0].width
    sheet.paste(THEMES[theme].faint, (line - 1, MARGIN, line + 1, sheet.height - MARGIN))
    return sheet


def compare_text(first: Report, second: Report) -> str:
    return "\n".join(lines(first, second)) + "\n"


def lines(first: Report, second: Report) -> Iterator[str]:
    yield f"A: {first.title} | {first.policy}"
    yield f"B: {second.title} | {second.policy}"
    yield ""
    for name, value, words in FIGURES:
        a, b = value(first), value(second)
        if a or b:
            ratio = f" (B / A {b / a:.2f})" if a else ""
            yield f"{name}: A {words(a)}, B {words(b)}{ratio}"
    if not (first.passes and second.passes):
        yield "No passes to compare: a pass is timed where the blocks stream (vram_budget in the loader)."
    yield from differing(first, second)


def differing(first: Report, second: Report) -> Iterator[str]:
    """Ops that other kernels served, and refusals that only the second report has."""
    found = [{(row.op, row.shape): row.winner for row in report.kernels} for report in (first, second)]
    changed = [
        (key, found[0][key], found[1][key]) for key in found[0] if found[1].get(key, found[0][key]) != found[0][key]
    ]
    new = [(key, found[1][key]) for key in found[1] if key not in found[0]]
    if changed or new:
        yield ""
        yield "Kernels"
    for (op, shape), a, b in changed[:20]:
        yield f"  {op} {shape}: A {a}, B {b}"
    for (op, shape), b in new[:20]:
        yield f"  {op} {shape}: B {b}, not in A"
    reasons = [{(row.op, row.candidate, row.reason) for row in report.refusals} for report in (first, second)]
    for op, candidate, reason in sorted(reasons[1] - reasons[0])[:20]:
        yield f"  only in B: {op}: {candidate} was not used: {reason}"
