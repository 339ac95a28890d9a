"""The changes of an estimate that are told where there is room for few: at a loader, and in the
report on a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..report import advice
from ..report.data import Report
from ..report.gathering import noting, stream_of
from ..sampling.step_timer import pace_of
from . import words
from .plan import WORTH, Change, Estimate, estimate

GEFORCE = "GEFORCE"


def telling(found: Estimate) -> list[Change]:
    """Of qualities the one that matters most, and at most one other. If the model does not fit, or
    barely, those that fit, with the most work left; else the fastest."""
    assert found.fit is not None
    if found.fit.is_lacking:
        told = [one for one in found.changes if one.fit is not None and not one.fit.is_lacking]
        told.sort(key=lambda one: -math.prod(one.work.shape))
    else:
        told = sorted((one for one in found.changes if one.total is not None), key=lambda one: one.total or 0.0)
    qualities = [one for one in told if one.what == "quality"]
    others = [one for one in told if one.what != "quality"]
    # The most exact of those that are as good as the fastest; `changes` has them from exact to fast.
    fast = [
        one for one in found.changes if one in qualities and (one.total or 0.0) <= (qualities[0].total or 0.0) / WORTH
    ]
    return fast[:1] + others[:1]


def with_changes(report: Report, model: Any) -> Report:
    """The report on a streamed MODEL that has sampled, with what would make that sampling faster
    before its own advice. Never raises; what goes wrong is among the report's gaps."""
    gaps: list[str] = []
    with noting(gaps, "what would be faster"):
        report = replace(report, advice=(*_faster(report, model), *report.advice))
    return replace(report, gaps=(*report.gaps, *gaps))


def _faster(report: Report, model: Any) -> Iterator[str]:
    pace = pace_of(model)
    if stream_of(model) is None or pace is None or pace.last is None:
        return
    last = pace.last
    found = estimate(model, last.shape, last.steps, last.prompts)
    told = [] if found.fit is None else telling(found)
    for change in told:
        # Of the budget the report's own advice has more to say.
        if change.what != "budget" and change.total is not None:
            yield f"{words.change_words(change, found)}."
    if not any(change.what == "quality" for change in told) and GEFORCE in report.device.upper():
        yield from advice.faster_qualities(report.tier)
