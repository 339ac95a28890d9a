"""The pages' figures are those of bench/results, and the results keep the promises made of `auto`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fusestream.bench import kitchen, report
from fusestream.bench.chosen import CHOSEN_TIERS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "bench" / "results").glob("nvidia-*.json"))


def test_readme_and_bench_show_the_measured_figures() -> None:
    readme, page = (path.read_text(encoding="utf-8") for path in (report.README, report.PAGE))
    assert RESULTS and report.rendered(readme) == readme, "call `python3 dev.py bench report`"
    assert report.rendered_page(page) == page, "call `python3 dev.py bench report`"
    for part in ("kernels", "matrix", "pager", "host", "fidelity", "groups", "plots"):
        assert f"<!-- {part}:begin -->" in page
    assert "<!-- models:begin -->" in readme and "<!-- fidelity:begin -->" in readme


def test_pages_and_plots_show_the_measured_figures() -> None:
    assert report.stale() == [], "call `python3 dev.py bench report`"


def test_the_check_sees_a_changed_figure() -> None:
    page = report.PAGE.read_text(encoding="utf-8")
    forged = page.replace(" us |", " ms |", 1)
    assert forged != page and report.rendered_page(forged) != forged
    readme = report.README.read_text(encoding="utf-8")
    begin = readme.index("<!-- models:begin -->")
    forged = readme[:begin] + readme[begin:].replace(" s |", " ms |", 1)
    assert forged != readme and report.rendered(forged) != forged


def test_the_tiers_stand_beside_their_rival_where_it_was_there() -> None:
    label = f"{CHOSEN_TIERS[0].split('|')[1]}: 1x12x32760x32760x128"
    row = {"op": "attention", "stock us": 2000.0, "ours us": 1000.0, "TFLOP/s": 400.0}
    errors = {"ours": 0.011, "stock": 0.0003}
    rows = [
        row | {"label": f"{label} turbo", "errors": errors | {kitchen.INT8: 0.018}, f"{kitchen.INT8} us": 1100.0},
        row | {"label": f"{label} precise", "errors": errors},
        row | {"label": f"{label} fast"},  # nothing is known of its error
        row | {"label": "another shape precise", "errors": errors},
    ]
    told = report.tiers_table({"kernels": {"rows": rows}}).splitlines()[2:]
    assert [line.split(" | ")[2:] for line in told] == [
        ["turbo", "2000 us", "1000 us, 400 TFLOP/s", "1.10%", "1100 us", "1.80% |"],
        ["precise", "2000 us", "1000 us, 400 TFLOP/s", "1.10%", "-", "- |"],
    ]


def test_what_a_block_costs_the_host_is_shown_where_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    empty = "<!-- host:begin -->\n<!-- host:end -->\n"
    (tmp_path / "nvidia-card.json").write_text(json.dumps({"models": {"rows": []}}))
    assert "|" not in report.rendered_page(empty)
    rows = [
        {"label": "a fused block", "us": 812.3, "bound": 700.0},
        {"label": "the pager: acquire + release", "us": 99.6, "bound": 250.0},
        {"label": "stock's block", "us": 2000.4, "bound": None},
    ]
    host = {"environment": {"torch": "2.11", "date": "today"}, "rows": rows}
    (tmp_path / "nvidia-card.json").write_text(json.dumps({"host": host}))
    shown = report.rendered_page(empty)
    assert report.rendered_page(shown) == shown
    assert "Measured on nvidia card with torch 2.11 (today):" in shown
    assert "| a fused block | **missed** 812 us | 700 us |" in shown
    assert "| the pager: acquire + release | 100 us | 250 us |" in shown
    assert "| stock's block | 2000 us |  |" in shown


def test_the_card_that_most_was_measured_on_comes_first_and_of_others_only_what_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    (whole,) = [path for path in RESULTS if path.stem == "nvidia-h200"]
    found = json.loads(whole.read_text(encoding="utf-8"))
    (tmp_path / "nvidia-z.json").write_text(json.dumps(found))
    few = [row for row in found["models"]["rows"] if row["group"] == "live"]
    (tmp_path / "nvidia-a.json").write_text(json.dumps({"models": {"rows": few}}))
    (tmp_path / "nvidia-b.json").write_text(json.dumps({"pager": found["pager"]}))
    assert [card for card, _ in report.measured_cards()] == ["nvidia z", "nvidia a", "nvidia b"]
    page = report.rendered_page(
        "<!-- groups:begin -->\n<!-- groups:end -->\n<!-- plots:begin -->\n<!-- plots:end -->\n"
    )
    first, other = page.split("**nvidia a**")
    assert "### Pictures" in first and "### Live video" in first and "Not measured yet" in first
    assert other.count("### ") == 1 and "### Live video" in other and "Not measured yet" not in other
    assert "nvidia b" not in page and "bench-growth-nvidia-z" in page and "bench-growth-nvidia-a" not in page


OF_KERNELS = [path for path in RESULTS if "kernels" in json.loads(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("path", OF_KERNELS, ids=lambda path: path.stem)
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
