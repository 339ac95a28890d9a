"""The prediction for other cards: bench/README shows it and README a part of it, its sums hold on the
measured card, and its parts do what they say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fusestream.bench import prediction
from fusestream.bench.card_rates import shares
from fusestream.bench.end_to_end.rows import sampling
from fusestream.bench.prediction import step_seconds
from fusestream.fusion.estimate.rates import FILE, Passes, Rates


def test_the_pages_show_the_prediction() -> None:
    page, readme = (path.read_text(encoding="utf-8") for path in (prediction.PAGE, prediction.README))
    assert prediction.rendered(page) == page, "call `python3 dev.py bench report`"
    forged = page.replace("RTX 2070", "RTX 9999")
    assert forged != page and prediction.rendered(forged) == page
    assert prediction.rendered_short(readme) == readme, "call `python3 dev.py bench report`"
    forged = readme.replace("| RTX 2060 Super |", "| RTX 9999 |")
    assert forged != readme and prediction.rendered_short(forged) == readme


def test_what_ships_is_what_the_results_say() -> None:
    assert FILE.read_text(encoding="utf-8") == prediction.shipped_text(), "call `python3 dev.py bench report`"


def test_a_card_of_each_generation_is_told_in_short() -> None:
    known = {card.name for card in prediction.CARDS}
    assert known >= set(prediction.IN_SHORT)
    assert all(f"| {name} | " in prediction.short_text() for name in prediction.IN_SHORT)


def test_its_sums_are_within_a_fifth_of_what_was_measured() -> None:
    found = list(prediction.check(prediction.load()))
    assert len(found) >= 5
    for name, who, predicted, measured in found:
        assert abs(predicted / measured - 1) < 0.2, f"{name}, {who}: {predicted:.3g} for {measured:.3g}"


def test_a_step_is_compute_or_copies() -> None:
    row = sampling("wan14", 480, 832, 81, 3)
    passes, plenty = Passes(100.0, 0.0), 80.0
    fast, slow = (Rates(gemm, 1e14, 1e12, 1e10) for gemm in (1e15, 1e14))
    assert step_seconds(row, slow, passes, plenty) > step_seconds(row, fast, passes, plenty)
    small = sampling("wan14", 480, 480, 17, 3)
    bound_by_bus = step_seconds(small, Rates(1e18, 1e18, 1e15, 1e10), passes, gib=7.0)
    assert bound_by_bus == pytest.approx(2 * (28.0e9 - 7 * 2**30) / 1e10, rel=0.05)


def test_auto_is_never_predicted_slower_than_stock() -> None:
    for card, work, told in prediction.predictions(prediction.load()):
        seconds = {who: found.seconds for who, found in told.items()}
        assert seconds["fast"] <= seconds["precise"] <= seconds["stock"], f"{card}: {work}"
        assert seconds["sparse"] < seconds["turbo"] < seconds["fast"], f"{card}: {work}"


def test_int8_is_in_doubt_on_turing_alone() -> None:
    turing = {card.name for card in prediction.CARDS if card.turing}
    for card, work, told in prediction.predictions(prediction.load()):
        doubted = {who for who, found in told.items() if found.slow is not None}
        assert doubted == ({"peer", "turbo", "sparse"} if card in turing else set()), f"{card}: {work}"
        assert all(found.slow > found.seconds for found in told.values() if found.slow is not None)
    assert str(prediction.Told(12.34, 13.57)) == "12.3 (13.6)" and str(prediction.Told(12.34)) == "12.3"


def test_half_of_the_blocks_is_half_of_self_attention() -> None:
    row, passes = sampling("wan13", 480, 832, 81, 3), Passes(0.0, 0.0)
    dense = Rates(1e30, 1e14, 1e12, 1e12)
    half = replace(dense, own=2e14)
    ratio = step_seconds(row, half, passes, 80.0) / step_seconds(row, dense, passes, 80.0)
    assert ratio == pytest.approx((0.5 * 32760 + 512) / (32760 + 512), rel=1e-6), "the prompt is looked at as ever"


def test_a_smaller_file_copies_less() -> None:
    row, passes = sampling("wan14", 480, 480, 17, 3), Passes(0.0, 0.0)
    bus = Rates(1e30, 1e30, 1e15, 1e10)
    whole, small = (step_seconds(row, bus, passes, gib=0.0, stored=stored) for stored in (1.0, 0.5))
    assert small == pytest.approx(whole / 2)


def test_turbo_takes_the_fastest_of_what_it_offers() -> None:
    def entry(tflops: float, share: float, slow: float | None = None) -> dict[str, Any]:
        told = [{"card": "GeForce X", "as_compiled": True, "tflops": tflops, "share": share}]
        if slow is not None:
            told.append({**told[0], "card": "GeForce X, IMMA at half rate", "tflops": slow})
        return {"predictions": told}

    model = {
        "linear 1x1 precise": entry(9.0, 0.9),
        "linear 1x1 fast": entry(16.0, 0.8),
        "torch 32x128": entry(6.0, 0.6),
        "linear_int8 1x1": entry(20.0, 0.5, 9.0),
        "linear_int8 1x2": entry(19.0, 0.5, 11.0),
        "attention 128 precise": entry(9.0, 0.9),
        "attention 128 fast": entry(14.0, 0.7),
        "attention 128 turbo": entry(15.0, 0.8, 11.0),
        "attention 128 turbo_half": entry(18.0, 0.6, 12.0),
        **{f"attention 128 {tier} listed": entry(8.0, 0.4) for tier in ("precise", "fast", "turbo", "turbo_half")},
    }
    found, slow = (shares(model, "32x128", slow) for slow in (False, True))
    assert found["attention turbo"] == pytest.approx(1.8) and slow["attention turbo"] == pytest.approx(1.4)
    assert found["gemm turbo"] == pytest.approx(2.0) and slow["gemm turbo"] == pytest.approx(1.1)
    assert found["attention listed"] == pytest.approx(0.8) and found["gemm fast"] == 0.8


def test_what_was_not_measured_is_named() -> None:
    with pytest.raises(LookupError, match="no row norm_modulate: nothing"):
        prediction.kernels_row({"kernels": {"rows": []}}, "norm_modulate", "nothing")


def test_turbo_is_as_quick_as_it_is_to_be_on_turing() -> None:
    """At the sheet's rate of INT8; at half of it 14B may take longer."""
    told = {(card, work): found["turbo"] for card, work, found in prediction.predictions(prediction.load())}
    small, large = (told["RTX 2060 Super", f"{model} 480x832x81"] for model in ("1.3B", "14B"))
    assert small.seconds <= 11.2 and large.seconds <= 60
