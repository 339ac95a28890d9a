"""The prediction for other cards: bench/README shows it and README a part of it, its sums hold on the
measured card, and its parts do what they say."""

from __future__ import annotations

import pytest

from fusestream.bench import prediction
from fusestream.bench.end_to_end.rows import sampling
from fusestream.bench.prediction import Passes, Rates, step_seconds


def test_the_pages_show_the_prediction() -> None:
    page, readme = (path.read_text(encoding="utf-8") for path in (prediction.PAGE, prediction.README))
    assert prediction.rendered(page) == page, "call `python3 dev.py bench report`"
    forged = page.replace("RTX 2070", "RTX 9999")
    assert forged != page and prediction.rendered(forged) == page
    assert prediction.rendered_short(readme) == readme, "call `python3 dev.py bench report`"
    forged = readme.replace("| RTX 2060 Super |", "| RTX 9999 |")
    assert forged != readme and prediction.rendered_short(forged) == readme


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
    for card, work, seconds in prediction.predictions(prediction.load()):
        assert seconds["fast"] <= seconds["precise"] <= seconds["stock"], f"{card}: {work}"


def test_what_was_not_measured_is_named() -> None:
    with pytest.raises(LookupError, match="no row norm_modulate: nothing"):
        prediction.kernels_row({"kernels": {"rows": []}}, "norm_modulate", "nothing")
