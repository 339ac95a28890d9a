"""The plot of ways to leave out steps: nearness to all steps against the steps that were computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .charts import labels
from .svg import Canvas, Scale, grid

NAME = "bench-step-cache.svg"
TITLE = "Nearness to all steps against the share of steps computed"
CALLED = {
    "Step Cache": ("Step Cache", "ours"),
    "ComfyUI's EasyCache": ("EasyCache", "stock"),
    "Fewer steps": ("fewer steps", "bound"),
}
OBEYED = 0.03  # share of videos by which a setting may obey less than all steps


def frontier(steps: Mapping[str, Any]) -> str:
    """A panel for each number of steps. steps: of the results of `bench models steps`."""
    canvas = Canvas(840, 380)
    decibels = [row["frames dB"][0] for one in steps.values() for row in one["rows"] if "frames dB" in row]
    y = Scale(10.0, max(decibels) + 4, 330.0, 60.0)
    canvas.text((10, 20), TITLE, "t")
    canvas.text(
        (10, 40), "frames in dB of the same videos with all steps; a cross: fewer videos are as their prompts say", "s"
    )
    for number, (count, one) in enumerate(steps.items()):
        x = Scale(10.0, 90.0, 50.0 + 400 * number, 330.0 + 400 * number)
        grid(canvas, x, y, range(10, 100, 20))
        canvas.text((x.start + 4, 76), f"{count} steps", "t")
        canvas.text(((x.start + x.end) / 2, 366), "% of the steps computed", "s m")
        ends: list[tuple[float, str, str]] = []
        for way, (called, kind) in CALLED.items():
            points = _points(canvas, x, y, int(count), one, way, kind)
            if points:
                ends.append((points[-1][1] + 4, called, f"s f-{kind}"))
        labels(canvas, x.end + 4, ends)
    return canvas.svg(f"{TITLE}: Step Cache, EasyCache and fewer steps")


def _points(
    canvas: Canvas, x: Scale, y: Scale, steps: int, one: Mapping[str, Any], way: str, kind: str
) -> Sequence[tuple[float, float]]:
    """A way's settings, from the fewest computed steps to the most, drawn."""
    obeyed = next((row["right"] for row in one["rows"] if "frames dB" not in row), 0)
    rows = sorted((row for row in one["rows"] if row["way"] == way), key=lambda row: -row["left out"])
    points = [(x(100 * (1 - row["left out"] / steps)), y(row["frames dB"][0])) for row in rows]
    if len(points) > 1:
        canvas.path(points, f"l-{kind}")
    for row, point in zip(rows, points, strict=True):
        if row["right"] < obeyed - OBEYED * one["videos"]:
            canvas.cross(point, f"l-{kind}")
        else:
            canvas.dot(point, f"f-{kind}")
    return points
