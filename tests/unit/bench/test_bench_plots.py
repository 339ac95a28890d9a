"""Plots and the page of all groups: drawn from rows alone, the same bytes each time, and never with rows missing."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from fusestream.bench.end_to_end.rows import all_rows
from fusestream.bench.report import charts, claims, documents, groups, pages
from fusestream.bench.report.figures import UNKNOWN, Cards

ROOT = Path(__file__).resolve().parents[3]


def measured() -> dict[str, Any]:
    """A result with every row of whole models in it; stock runs out of memory where it is known to."""
    found = []
    for number, row in enumerate(all_rows()):
        one: dict[str, Any] = {"name": row.name, "group": row.group, "asked": row.asked, "asked s": row.seconds}
        one |= {
            "asked first": row.asked_first,
            "free GiB": 8.0,
            "met": None,
            "environment": {"torch": "2.11", "date": "today", "ComfyUI": "0.30.0"},
        }
        one["bounds s"] = {"arithmetic": 0.3, "bus": 0.2, "bound": 0.3}
        for who, _ in row.sides:
            s = 0.5 + number / 10 + (0.2 if who == "stock" else 0.0)
            one[who] = {"s": s, "first s": s + 1, "peak GiB": 6.5, "share of bound": 0.5, "finite": True}
            if who == "stock" and row.seconds:
                one[who] = {"error": "out of memory", "peak GiB": 7.9}
        if row.work == "video":
            one["ours"] |= {"parts s": [{"text": 1.0, "sampling": 9.0}, {"text": 0.5, "sampling": 8.0}]}
        if "ours" in one:
            one["ours"]["kernels measured s"] = 3.0
        if row.storage != "fp16":
            one["accuracy"] = {"stock": 0.4, "ours": 0.02}
        found.append(one)
    return {"models": {"rows": found}}


@pytest.mark.parametrize("chart", charts.CHARTS, ids=lambda chart: chart.name)
def test_a_plot_is_sound_and_always_the_same(chart: charts.Chart) -> None:
    rows = groups.by_name(measured())
    assert chart.missing(rows) == []
    drawn = chart.draw(rows)
    assert drawn == chart.draw(dict(reversed(rows.items()))), "the order in the file does not matter"
    root = ET.fromstring(drawn)
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    assert "prefers-color-scheme: dark" in drawn and "FuseStream" in drawn
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for shape in root:
        x, y = float(shape.get("x", shape.get("cx", 0))), float(shape.get("y", shape.get("cy", 0)))
        assert 0 <= x <= width and 0 <= y <= height, ET.tostring(shape)


def test_stock_out_of_memory_everywhere_leaves_a_plot() -> None:
    results = measured()
    for row in results["models"]["rows"]:
        if "stock" in row:
            row["stock"] = {"error": "out of memory", "peak GiB": 7.9}
    for chart in charts.CHARTS:
        ET.fromstring(chart.draw(groups.by_name(results)))


def test_a_plot_without_its_rows_is_not_drawn_and_says_what_measures_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = measured()
    results["models"]["rows"] = [row for row in results["models"]["rows"] if row["group"] != "budget"]
    (tmp_path / "nvidia-card.json").write_text(json.dumps(results))
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    assert set(pages.images()) == {
        "bench-growth-nvidia-card.svg",
        "bench-bounds-nvidia-card.svg",
        "bench-step-cache.svg",
    }
    page = pages.rendered_page((ROOT / "bench" / "results.md").read_text(encoding="utf-8"))
    assert "(../docs/images/bench-growth-nvidia-card.svg)" in page and "bench-budget" not in page
    assert "9 of its rows have yet to be measured. `dev.py bench models --group table --group budget`" in page
    assert "(docs/images/bench-growth-nvidia-card.svg)" in pages.rendered("<!-- plot:begin -->\n<!-- plot:end -->\n")


@pytest.mark.deep
def test_plots_that_cannot_be_drawn_any_more_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {name: tmp_path / name for name in ("results", "images")}
    for folder in folders.values():
        folder.mkdir()
    monkeypatch.setattr(pages, "RESULTS", folders["results"])
    monkeypatch.setattr(pages, "IMAGES", folders["images"])
    for name, block in (("README", "plot"), ("PAGE", "plots"), ("CLAIMS", "claims"), ("LAB", "lab")):
        monkeypatch.setattr(pages, name, tmp_path / f"{name}.md")
        (tmp_path / f"{name}.md").write_text(f"<!-- {block}:begin -->\n<!-- {block}:end -->\n")
    file = folders["results"] / "nvidia-card.json"
    file.write_text(json.dumps(measured()))
    assert len(pages.stale()) == 8
    pages.write()
    assert pages.stale() == [] and len(list(folders["images"].iterdir())) == 4
    (folders["images"] / "bench-growth-nvidia-card.svg").write_text("<svg/>")
    assert pages.stale() == ["bench-growth-nvidia-card.svg"]
    file.write_text(json.dumps({"models": {"rows": []}}))
    pages.write()
    assert pages.stale() == []
    assert [path.name for path in folders["images"].iterdir()] == ["bench-step-cache.svg"], "which is of no card"


@pytest.mark.deep
def test_every_group_has_a_table_with_its_misses() -> None:
    results = measured()
    found = groups.by_name(results)
    text = groups.text(results)
    assert all(f"### {heading}" in text for heading in groups.HEADINGS.values()) and "Not measured" not in text
    for row in all_rows():
        assert f"| {row.name} |" in text
    promised = next(row for row in all_rows() if row.asked_first and row.group == "short")
    promise = f"| {promised.asked:g}x, first {promised.asked_first:g}x |"
    assert promise in groups.group("short", found)
    off = next(row for row in all_rows() if row.note == "kernels off" and row.model == "wan13")
    ours, plain = found[off.name]["ours"]["s"], found["1.3B 480x832x81"]["ours"]["s"]
    assert f"{ours / plain:.2f}x" in groups.line(off, found)
    assert (
        "- 1.3B video 480x832x81, 10 steps, FuseStream: first text 1 s, sampling 9 s; later text 0.5 s, sampling 8 s; "
        "3 s of the first for comparing kernels that no earlier row had compared"
    ) in text
    assert (
        text.count("for comparing kernels") == sum(row.work == "video" for row in all_rows())
        and "Later steps" not in text
    )
    found["1.3B 480x480x17"]["ours"]["all s"] = [[9.0, 1.0, 1.1, 1.0]]
    found["14B 480x480x17"]["stock"]["all s"] = [[9.0, 1.0, 1.02]]
    assert "10.0% at most (1.3B 480x480x17, FuseStream)" in groups.text(results)
    assert "- 14B 480x480x17, fp8_e4m3fn, error against stock in fp32: stock 0.4, FuseStream 0.02" in text
    results["models"]["rows"] = [row for row in results["models"]["rows"] if row["group"] not in ("ram", "cold")]
    results["models"]["rows"].remove(next(row for row in results["models"]["rows"] if row["group"] == "storage"))
    text = groups.text(results)
    assert "Not measured yet: 3 of 3 rows. `dev.py bench models --group ram` fills them." in text
    assert "Not measured yet: 1 of 2 rows. `dev.py bench models --group storage`" in text


PER_FRAME = "Below 1.3 times SD 1.5's time per frame, on an RTX 2060 Super"


def told(cards: Cards) -> dict[str, claims.Told]:
    return {one.claim: one for each in documents.DOCUMENTS.values() for one in claims.told(cards, each)}


def test_a_figure_is_the_first_cards_that_has_it_and_figures_that_are_compared_are_one_cards() -> None:
    def model(name: str, stock: float, ours: float) -> dict[str, Any]:
        return {"name": name, "stock": {"s": stock}, "ours": {"s": ours}, "stock / ours": stock / ours, "free GiB": 8.0}

    new = {"models": {"rows": [model(documents.SMALL, 3.0, 1.0), model(documents.LARGE, 60.0, 20.0)]}}
    old = {
        "models": {
            "rows": [
                model(documents.SMALL, 1.6, 0.81),
                model(documents.MIDDLE, 8.0, 4.0),
                model(documents.PICTURE, 0.04, 0.008),
            ]
        }
    }
    cards = [("nvidia h100 80gb", new), ("nvidia h200", old)]
    found = told(cards)
    fits = found["Wan, T5-XXL and the VAE in 8 GB of VRAM"]
    assert (fits.cards, fits.reached) == ("H100", "reached")
    faster = found["Match or beat stock by fusion while weights stream"]
    assert faster.here.startswith(f"2.00x for {documents.MIDDLE}, 3.00x for {documents.SMALL}")
    assert (faster.cards, faster.reached) == ("H200, H100", UNKNOWN), "of the third nothing is measured"
    assert found[PER_FRAME].here.startswith("1.25 times: ") and found[PER_FRAME].cards == "H200"
    assert found["BF16 weights converted once and kept"].cards == ""


def test_claims_are_held_against_what_is_there() -> None:
    results = json.loads((ROOT / "bench" / "results" / "nvidia-h200.json").read_text(encoding="utf-8"))
    text, *others = (
        claims.tables(cards, documents.DOCUMENTS)
        for cards in ([("nvidia h200", results)], [], [("nvidia h200", {"kernels": results["kernels"]})])
    )
    large = next(row for row in results["models"]["rows"] if row["name"] == documents.LARGE)
    assert f"{large['ours']['s']:.3g} s a step" in text and UNKNOWN not in text
    assert all(UNKNOWN in other and other.count("\n") == text.count("\n") for other in others)


def test_what_is_not_reached_comes_first_and_follows_from_the_figures() -> None:
    rows = [
        {"op": "linear", "label": "Wan 14B 480x832x81, ffn in", "stock us": 50.0, "auto us": 10.0},
        {"op": "linear", "label": "Wan 1.3B 480x832x81, ffn in", "stock us": 50.0, "auto us": 25.0},
        {"op": "linear", "label": "Wan 14B 480x832x81, o with gate and residual", "stock us": 12.0, "auto us": 10.0},
        {"op": "instance_norm", "label": "style net 1080p: 1x32x1080x1920 channels-first", "stock us": 9.0, "ours us": 1.0},
    ]  # fmt: skip
    inventory = documents.DOCUMENTS["StyleForge's inventory of kernels"]
    found = claims.told([("nvidia h200", {"kernels": {"rows": rows}})], inventory)
    assert [(one.claim.split()[0], one.reached) for one in found] == [
        ("Attention", UNKNOWN), ("Attention", "missed"), ("Feed-forward", "in part"), ("Instance", "reached"),
    ]  # fmt: skip
    assert len(documents.DOCUMENTS) == 5


def test_a_frame_of_wan_stands_beside_a_picture_of_sd_15() -> None:
    seconds = {"1.3B 480x832x81": (1.6, 0.81), "SD 1.5 512x512": (0.04, 0.008)}
    rows = [{"name": name, "stock": {"s": stock}, "ours": {"s": ours}} for name, (stock, ours) in seconds.items()]
    found = told([("nvidia h200", {"models": {"rows": rows}})])[PER_FRAME]
    here = found.here
    assert here.startswith("1.25 times: ") and "10 ms a step" in here and "0.04 s and 0.032 s in 4 steps" in here
    assert "0.3 s and 0.24 s in 30" in here and "Against ComfyUI's SD 1.5 it is 0.25 times" in here
    assert found.reached == "reached"
    rows[1]["ours"]["s"] = 0.007
    found = told([("nvidia h200", {"models": {"rows": rows}})])[PER_FRAME]
    assert found.here.startswith("1.43 times: ") and found.reached == "missed"


def test_tries_and_halves_of_rows_are_not_shown() -> None:
    results = measured()
    first, second, *_ = results["models"]["rows"]
    first["quick"] = True
    del second["stock"]
    assert {first["name"], second["name"]} & groups.by_name(results).keys() == set()


def test_peaks_are_those_of_rows_in_which_the_budget_was_ours() -> None:
    results = measured()
    said = told([("nvidia h200", results)])["Below 7 GB at most"].here
    assert "6.50 GiB at most" in said
    by_name = groups.by_name(results)
    by_name["14B 480x480x17, fp8_e4m3fn"]["ours"]["peak GiB"] = 7.2
    by_name["14B 480x480x17, 16 GiB of weights"]["ours"] |= {
        "peak GiB": 17.0,
        "side": {"vram_budget": 16.0, "ballast": False},
    }
    said = told([("nvidia h200", results)])["Below 7 GB at most"].here
    assert "6.50 GiB at most" in said and "7.20 GiB at most (14B 480x480x17, fp8_e4m3fn) in all " in said
