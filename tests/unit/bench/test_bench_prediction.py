"""The prediction for other cards: bench/README shows it and README a part of it, its sums hold on the measured card, and its parts
do what they say."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace

import pytest

from fusestream.bench import prediction
from fusestream.bench.card_rates import CARDS, IN_INT8, PEERS
from fusestream.bench.predicted import default, faster, held, told, works
from fusestream.bench.predicted.unets import LEAST_ROWS
from fusestream.bench.report import pages
from fusestream.bench.turing.cli import BLACKWELL_RESULTS, NEWER_RESULTS
from fusestream.kernels_cuda.ops.matmul import integer_rule

RESULTS = prediction.load()
FOUND = list(told.predictions(RESULTS))
# How far the sums may be off in a row of the measured card: more than they were found to be, and less than would mislead.
OFF = {"1.3B": 0.12, "14B": 0.2, "klein": 0.36, "Z-Image": 0.35, "Qwen3": 0.85}
NO_PASSES: dict[str, float] = defaultdict(float)


def test_the_pages_show_the_prediction() -> None:
    page, readme = (path.read_text(encoding="utf-8") for path in (pages.PAGE, pages.README))
    for text, render, row in (
        (page, pages.rendered_page, "| RTX 2070 |"),
        (readme, pages.rendered, "| RTX 2060 Super | 55"),
    ):
        forged = text.replace(row, "| RTX 9999 |")
        assert forged != text and render(forged) == text, "call `python3 dev.py bench report`"


def test_every_card_and_work_is_told_and_called_a_prediction() -> None:
    page, short = prediction.text(), prediction.short_text()
    assert page.startswith("All of this is predicted, not measured.")
    for card in CARDS:
        assert f"{card.name} {card.pcie}.0 x{card.lanes}" in page
    for work in works.works():
        assert page.count(f"Predicted, {work.title}:") == 1
    lines = told.whole_table(FOUND).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {card.name}" for card in CARDS]
    assert short.startswith("**Predicted, not measured**") and max(map(len, short.splitlines())) <= 100
    rows = [line for line in short.splitlines() if line.startswith("| RTX")]
    assert [row.split(" | ")[0] for row in rows] == [f"| {name}" for name in told.SHORT_CARDS]
    assert all(row.count("/") == len(told.SHORT_HEADS) for row in rows)


def test_its_sums_are_as_near_to_what_was_measured_as_is_said() -> None:
    found = list(held.check(RESULTS))
    assert {name.split()[0].split("-4B")[0] for name, *_ in found} >= {"1.3B", "14B", "klein", "Z-Image", "Qwen3"}
    for name, who, predicted, measured in found:
        most = next(most for start, most in OFF.items() if name.startswith(start))
        assert abs(predicted / measured - 1) < most, f"{name}, {who}: {predicted:.3g} for {measured:.3g}"
    assert held.farthest(RESULTS, ("1.3B",)) <= held.farthest(RESULTS, ("1.3B", "14B")) < OFF["14B"]
    with pytest.raises(LookupError, match="no row of Wan 99B"):
        held.farthest(RESULTS, ("Wan 99B",))


def test_auto_is_never_predicted_slower_than_stock() -> None:
    for one in FOUND:
        seconds, what = {who: found.seconds for who, found in one.told.items()}, f"{one.card.name}: {one.work.name}"
        # A language model's weights may take longer on the bus than any way to compute.
        assert seconds["fast"] <= seconds["precise"] <= seconds["stock"], what
        if "sparse" in seconds:
            assert seconds["sparse"] < seconds["turbo"] < seconds["fast"], what
        if "stored" in seconds:
            assert seconds["turbo"] < seconds["stored"] < seconds["precise"], what
        assert one.told.keys() == set(told.who_does(one.work))


def test_int8_is_in_doubt_on_turing_alone() -> None:
    turing = {card.name for card in CARDS if card.turing}
    assert {one.card.name for one in FOUND} > turing
    for one in FOUND:
        doubted = {who for who, found in one.told.items() if found.slow is not None}
        of_bytes = set(IN_INT8) & one.told.keys()
        assert doubted == (of_bytes if one.card.name in turing else set()), f"{one.card.name}: {one.work.name}"
        assert all(found.slow > found.seconds for found in one.told.values() if found.slow is not None)
    assert str(told.Told(12.34, 13.57)) == "12.3 (13.6)" and str(told.Told(12.34)) == "12.3"
    assert told.Told(0.05, 0.1).a_second == "20 (10)"
    low, high = told.slowed(FOUND)
    assert 1 < low < high < 2


def test_the_peer_is_as_quick_as_its_kernels_were_read_to_be() -> None:
    """What was found by hand: 14B about 50 s a step, 41 with a W4A4 file."""
    by = {(one.card.name, one.work.name): one.told for one in FOUND}
    large = by["RTX 2060 Super", "Wan 14B 480x832x81"]
    assert large["newest_attention"].seconds == pytest.approx(50, abs=2)
    assert large["newest_w4a4"].seconds == pytest.approx(41, abs=1)
    for told_ in by.values():
        if "newest" in told_:
            assert told_["newest_attention"].seconds < told_["newest"].seconds < told_["stock"].seconds
    rtx50 = by["RTX 5060", "Wan 14B 480x832x81"]
    assert rtx50["newest_w4a4"].seconds > rtx50["newest_attention"].seconds, "no product of 4 bits there"


# ------------------------------------------------------------------------------------------------------- who is faster


def forged(name: str, kind: str, **seconds: float) -> told.Prediction:
    card = next(card for card in CARDS if card.name == name)
    work = next(work for work in works.works() if work.kind == kind and "720x1280" not in work.name)
    usual = dict.fromkeys((*PEERS, *faster.TIERS), 10.0)
    return told.Prediction(card, work, {who: told.Told(s) for who, s in {**usual, **seconds}.items()})  # type: ignore[misc]


def test_where_the_newest_comfyui_is_faster_is_said_from_the_figures() -> None:
    cards = ("RTX 2060", "RTX 3070", "RTX 4060")
    none = [forged(name, kind) for name in cards for kind in ("video", "picture")]
    assert [one.endswith("faster than none.") for one in faster.sentences(none)] == [True] * len(PEERS)
    some = [
        *(forged(name, "video", newest=9.0, stored=8.0, turbo=9.1) for name in cards),
        forged("RTX 2060", "picture", newest=9.5, newest_w4a4=7.0),
        forged("RTX 3070", "picture", newest=9.5),
        forged("RTX 4060", "picture"),
    ]
    as_installed, attention, w4a4 = faster.sentences(some)
    assert as_installed.startswith("With an INT8 file, as installed: faster than ")
    assert "*Exact* and *Balanced* in videos and in pictures on RTX 20 and 30" in as_installed
    assert "*auto* and *Fastest* in pictures on RTX 20 and 30" in as_installed
    assert attention.endswith("switched on: faster than none.")
    assert w4a4.endswith("faster than *auto*, *Exact*, *Balanced* and *Fastest* in pictures on RTX 20.")
    table = faster.table(some)
    assert "| INT8, as installed | *Exact* | videos | **1.11** | **1.11** | **1.11** |" in table
    assert "| W4A4, INT8 attention | *auto* | pictures | **1.43** | 1.00 | 1.00 |" in table
    both = [*none, forged("RTX 2070", "video", newest=5.0)]
    assert "| INT8, as installed | *auto* | videos | **1.00 to 2.00** | 1.00 | 1.00 |" in faster.table(both)


def test_turbo_is_as_quick_as_it_is_to_be_on_turing() -> None:
    """At the sheet's rate of INT8; at half of it 14B may take longer."""
    turbo = {(one.card.name, one.work.name): one.told["turbo"] for one in FOUND if "turbo" in one.told}
    small, large = (turbo["RTX 2060 Super", f"Wan {model} 480x832x81"] for model in ("1.3B", "14B"))
    assert small.seconds <= 11.2 and large.seconds <= 60


def test_unets_round_weights_where_the_rule_does() -> None:
    assert LEAST_ROWS == integer_rule.LEAST_ROWS
    found = {work.name: work.load for work in works.works()}
    large, small = found["SDXL 1024x1024"], found["SD 1.5 512x512"]
    assert 0 < large.in_halves / large.products < small.in_halves / small.products < 0.5


def test_blackwells_code_is_as_near_to_adas_as_is_said() -> None:
    """The shares that an RTX 5060 is given are another generation's: of halves. Integers have a prediction of their own there."""
    own, adas = (json.loads(path.read_text(encoding="utf-8")) for path in (BLACKWELL_RESULTS, NEWER_RESULTS))
    compared = [name for name in own if name.startswith("attention 128") and not name.endswith(("listed", "int8"))]
    assert len(compared) == 4
    for name in compared:
        mine, others = (
            next(p["share"] for p in model[name]["predictions"] if p["as_compiled"]) for model in (own, adas)
        )
        assert mine == pytest.approx(others, abs=0.03), name


def test_by_default_nobody_is_slower_than_stock_with_the_same_file() -> None:
    """The promise of `auto`, by prediction: each storage of each model on each card of the table."""
    table = default.default_table(RESULTS, FOUND)
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert [row[0].strip("| ") for row in rows] == list(default.WORKS.values())
    assert "slower" not in table
    parts = [
        float(one) for row in rows for cell in row[1:] for one in cell.strip(" |").split(" / ") if one[0].isdigit()
    ]
    assert len(parts) > 40 and all(0.3 < part <= default.MOST for part in parts)


def test_a_slower_default_would_be_told() -> None:
    found = next(one for one in FOUND if one.work.name == default.WORKS["wan13"])
    slower = replace(found, told={**found.told, "stored": told.Told(3.0), "newest": told.Told(2.0)})
    assert default.cell(slower, "int8_convrot", {}) == "1.50 **slower**"
