"""The plot of time against nearness: what is in it, what is not and why, and that no name lies on another."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from fusestream.bench import prediction
from fusestream.bench.fidelity.long import LONG_SECTION
from fusestream.bench.fidelity.variants import LONG, REFERENCE, STOCK_FP16, TURBO_INT8
from fusestream.bench.report import nearness, pages

SVG = "{http://www.w3.org/2000/svg}"


def row(name: str, decibels: float | None, seconds: float | None = None) -> dict[str, Any]:
    return {"name": name, "frames dB": {"median": decibels, "worst": decibels}, "sampling s": seconds}


def results(*rows: dict[str, Any]) -> dict[str, Any]:
    return {LONG_SECTION: {"weights": "w", "sizes": [{"tokens": 1, "rows": []}, {"tokens": 2, "rows": list(rows)}]}}


def drawn(*rows: dict[str, Any]) -> list[nearness.Panel]:
    return nearness.panels(nearness.rows_of(results(*rows)), "card", prediction.all_predictions())


def test_all_ways_have_a_name_and_are_measured_on_longer_videos() -> None:
    ways = {one.name for one in LONG}
    assert set(nearness.CALLED) <= ways and set(nearness.BY_WHO.values()) <= set(nearness.CALLED)
    assert len(set(nearness.CALLED.values())) == len(nearness.CALLED)


def test_a_dot_has_the_predicted_minutes_and_the_measured_nearness() -> None:
    panels = drawn({"name": REFERENCE.name}, row(STOCK_FP16.name, 66.0), row(TURBO_INT8.name, 44.0))
    assert [panel.head.split(",")[0] for panel in panels] == list(nearness.SHOWN), "nothing was timed on the card"
    told = next(
        one.told
        for one in prediction.all_predictions()
        if (one.card.name, one.work.name) == (nearness.SHOWN[0], nearness.WORK)
    )
    found = {dot.name: dot for dot in panels[0].dots}
    assert found[TURBO_INT8.name].time == pytest.approx(told["turbo"].seconds * 20 / 60)
    assert found[STOCK_FP16.name].decibels == 66 and found.keys() == {STOCK_FP16.name, TURBO_INT8.name}
    assert "INT8 + attention" in panels[0].lacking and "stock" not in panels[0].lacking
    text = nearness.nearness(panels)
    assert "nearness not measured: " in text and "auto INT8" in text


def test_what_the_card_took_is_a_panel_of_its_own() -> None:
    same = row(STOCK_FP16.name, None, 2.0)
    panels = drawn(row(TURBO_INT8.name, 44.0, 1.5), same, {"name": "x", "error": "no"}, row("of no name", 30.0, 1.0))
    assert panels[0].unit == "seconds a video" and panels[0].head.startswith("card, measured")
    assert [(dot.name, dot.time) for dot in panels[0].dots] == [(TURBO_INT8.name, 1.5)], "what is the same has no dB"


def test_names_lie_on_no_other() -> None:
    rows = [row(name, 50.0 + 0.1 * place, 2.0 + 0.05 * place) for place, name in enumerate(nearness.CALLED)]
    root = ET.fromstring(nearness.nearness(drawn(*rows)))
    called = set(nearness.CALLED.values())
    places = [
        (float(one.get("x", 0)), float(one.get("y", 0)), one.text or "")
        for one in root.iter(f"{SVG}text")
        if one.text in called
    ]
    assert len(places) == len(nearness.CALLED) + 2 * len(nearness.BY_WHO)
    for (x, y, words), (x2, y2, others) in itertools.combinations(places, 2):
        apart = abs(y - y2) >= nearness.LINE or abs(x - x2) >= nearness.LETTER * (len(words) + len(others)) / 2
        assert apart, (words, others)


def test_a_plot_is_of_the_card_that_measured_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    (tmp_path / "nvidia-one.json").write_text(json.dumps({"models": {"rows": []}}))
    assert nearness.NAME not in pages.images()
    (tmp_path / "nvidia-two.json").write_text(json.dumps(results(row(STOCK_FP16.name, 66.0, 2.0))))
    assert "nvidia two, measured" in pages.images()[nearness.NAME]
