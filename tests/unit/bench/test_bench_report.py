"""The pages' figures are those of bench/results, and the results keep the promises made of `auto`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fusestream.bench import kitchen
from fusestream.bench.report import pages, tables
from fusestream.bench.report.chosen import CHOSEN_TIERS

ROOT = Path(__file__).resolve().parents[3]
RESULTS = sorted((ROOT / "bench" / "results").glob("nvidia-*.json"))


def test_readme_and_bench_show_the_measured_figures() -> None:
    readme, page = (path.read_text(encoding="utf-8") for path in (pages.README, pages.PAGE))
    assert RESULTS and pages.rendered(readme) == readme, "call `python3 dev.py bench report`"
    assert pages.rendered_page(page) == page, "call `python3 dev.py bench report`"
    for part in ("kernels", "matrix", "pager", "host", "fidelity", "default", "groups", "plots"):
        assert f"<!-- {part}:begin -->" in page
    assert "<!-- models:begin -->" in readme


def test_pages_and_plots_show_the_measured_figures() -> None:
    assert pages.stale() == [], "call `python3 dev.py bench report`"


@pytest.mark.deep
def test_the_check_sees_a_changed_figure() -> None:
    page = pages.PAGE.read_text(encoding="utf-8")
    forged = page.replace(" us |", " ms |", 1)
    assert forged != page and pages.rendered_page(forged) != forged
    readme = pages.README.read_text(encoding="utf-8")
    begin = readme.index("<!-- models:begin -->")
    forged = readme[:begin] + readme[begin:].replace(" s |", " ms |", 1)
    assert forged != readme and pages.rendered(forged) != forged


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
    told = tables.tiers({"kernels": {"rows": rows}}).splitlines()[2:]
    assert [line.split(" | ")[2:] for line in told] == [
        ["turbo", "2000 us", "1000 us, 400 TFLOP/s", "1.10%", "1100 us", "1.80% |"],
        ["precise", "2000 us", "1000 us, 400 TFLOP/s", "1.10%", "-", "- |"],
    ]


@pytest.mark.deep
def test_what_a_block_costs_the_host_is_shown_where_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    empty = "<!-- host:begin -->\n<!-- host:end -->\n"
    (tmp_path / "nvidia-card.json").write_text(json.dumps({"models": {"rows": []}}))
    assert "|" not in pages.rendered_page(empty)
    rows = [
        {"label": "a fused block", "us": 812.3, "bound": 700.0},
        {"label": "the pager: acquire + release", "us": 99.6, "bound": 250.0},
        {"label": "stock's block", "us": 2000.4, "bound": None},
    ]
    host = {"environment": {"torch": "2.11", "date": "today"}, "rows": rows}
    (tmp_path / "nvidia-card.json").write_text(json.dumps({"host": host}))
    shown = pages.rendered_page(empty)
    assert pages.rendered_page(shown) == shown
    assert "Measured on nvidia card with torch 2.11 (today):" in shown
    assert "| a fused block | **missed** 812 us | 700 us |" in shown
    assert "| the pager: acquire + release | 100 us | 250 us |" in shown
    assert "| stock's block | 2000 us |  |" in shown


@pytest.mark.deep
def test_the_card_that_most_was_measured_on_comes_first_and_of_others_only_what_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    (whole,) = [path for path in RESULTS if path.stem == "nvidia-h200"]
    found = json.loads(whole.read_text(encoding="utf-8"))
    (tmp_path / "nvidia-z.json").write_text(json.dumps(found))
    few = [row for row in found["models"]["rows"] if row["group"] == "live"]
    (tmp_path / "nvidia-a.json").write_text(json.dumps({"models": {"rows": few}}))
    (tmp_path / "nvidia-b.json").write_text(json.dumps({"pager": found["pager"]}))
    assert [card for card, _ in pages.measured_cards()] == ["nvidia z", "nvidia a", "nvidia b"]
    page = pages.rendered_page("<!-- groups:begin -->\n<!-- groups:end -->\n<!-- plots:begin -->\n<!-- plots:end -->\n")
    first, other = page.split("**nvidia a**")
    assert "### Pictures" in first and "### Live video" in first and "Not measured yet" in first
    assert other.count("### ") == 1 and "### Live video" in other and "Not measured yet" not in other
    assert "nvidia b" not in page and "bench-growth-nvidia-z" in page and "bench-growth-nvidia-a" not in page
    # What the first has not, another has: then nothing is said to be missing.
    some = [row for row in found["models"]["rows"] if row["group"] == "writing"]
    rest = [row for row in found["models"]["rows"] if row not in some]
    (tmp_path / "nvidia-z.json").write_text(json.dumps(found | {"models": {"rows": rest}}))
    (tmp_path / "nvidia-a.json").write_text(json.dumps({"models": {"rows": some}}))
    first, other = pages.rendered_page("<!-- groups:begin -->\n<!-- groups:end -->").split("**nvidia a**")
    assert "--group writing" not in first and "Not measured yet" in first and "### Text" in other


OF_KERNELS = [path for path in RESULTS if "kernels" in json.loads(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("path", OF_KERNELS, ids=lambda path: path.stem)
def test_auto_is_hardly_ever_slower_than_stock_and_where_it_was_the_page_says_so(path: Path) -> None:
    results = json.loads(path.read_text(encoding="utf-8"))
    rows, slower = results["kernels"]["rows"], tables.slower_than_stock(results)
    assert rows and len(slower) < 0.01 * len(rows) and all(times < 1.05 for _, times in slower)
    page = (ROOT / "bench" / "results.md").read_text(encoding="utf-8")
    assert f"not slower than stock in {len(rows) - len(slower)} of {len(rows)} rows." in page
    assert all(f"`{row['op']}`, {row['label']} ({times:.2f} times" in page for row, times in slower)


def test_slower_than_stock_is_told_from_noise() -> None:
    def row(stock: float, auto: float, winner: str = "cuda") -> dict[str, Any]:
        return {
            "op": "gelu",
            "label": f"{stock} {auto}",
            "auto": winner,
            "stock us": stock,
            "ours us": auto,
            "auto us": auto,
        }

    quick, noise, launch, slow = row(100.0, 50.0), row(100.0, 101.9), row(2.0, 2.09), row(100.0, 103.0)
    itself = row(100.0, 104.0, "stock")
    results = {"kernels": {"rows": [quick, noise, launch, slow, itself]}}
    assert [(one["label"], round(times, 2)) for one, times in tables.slower_than_stock(results)] == [
        ("100.0 103.0", 1.03)
    ]
    assert "in 4 of 5 rows. **missed** in 1: `gelu`, 100.0 103.0 (1.03 times, cuda)" in tables.auto_told(results)
