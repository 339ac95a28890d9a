"""README's figures are those of bench/results, and the results keep the promises made of `auto`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fusestream.bench import report

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "bench" / "results").glob("nvidia-*.json"))


def test_readme_shows_the_measured_figures() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert RESULTS and report.rendered(readme) == readme, "call `python3 dev.py bench report`"


def test_pages_and_plots_show_the_measured_figures() -> None:
    assert report.stale() == [], "call `python3 dev.py bench report`"


def test_the_check_sees_a_changed_figure() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    forged = readme.replace(" us |", " ms |", 1)
    assert forged != readme and report.rendered(forged) != forged


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_auto_is_never_slower_than_stock(path: Path) -> None:
    """What `auto` chose was at least as fast as stock in the same run.

    But for noise: 2 %, or a tenth of a microsecond where the work is one launch and nothing else.
    """
    rows = json.loads(path.read_text(encoding="utf-8"))["kernels"]["rows"]
    slower = []
    for row in rows:
        winner = row.get("auto", "stock")
        seconds = row.get("auto us")
        if seconds is None:
            # The latter: `auto` took another way to accumulate than the row's, which was not timed by itself.
            if winner == "stock" or ("TFLOP/s" in row and winner.split()[-1] not in row["label"]):
                continue
            seconds = row.get(f"{winner} us", row["ours us"])
        noise = 1.05 if winner == "stock" else 1.02  # stock against itself: the clock moved in between
        if seconds > max(row["stock us"] * noise, row["stock us"] + 0.1):
            slower.append((row["op"], row["label"], winner))
    assert rows and not slower
