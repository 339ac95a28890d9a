"""Live video in a report: its stages, their overlap and their waits, from the last groups of
frames."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from ..base.format import counted
from ..base.hooks import LAST_LIVE
from ..live.engine import Tally
from ..live.lanes import STAGES, Ran
from .canvas import SMALL, Canvas
from .data import Live, LiveStage, Report, Stretch, duration

SHOWN = 6  # groups in the picture: more would be thinner than their gaps
ROW, LABEL = 54, 124.0


def live_of(model: Any) -> Live | None:
    """The last live video made with a MODEL, by whichever clone of it; None if there is none."""
    tally: Tally | None = getattr(getattr(model, "model", None), LAST_LIVE, None)
    if tally is None or not tally.ran:
        return None
    groups: dict[int, dict[str, Ran]] = {}
    for one in tally.ran:
        groups.setdefault(one.group, {})[one.stage] = one
    # the oldest group may be cut
    whole = [stages for stages in groups.values() if stages.keys() >= set(STAGES)]
    if not whole:
        return None
    span = max(one.end for one in tally.ran) - min(stages[STAGES[0]].start for stages in whole)
    stages = tuple(
        LiveStage(name, median(one[name].end - one[name].start for one in whole), _waited(whole, name))
        for name in STAGES
    )
    rate = len(whole) * tally.batch / span if span > 0 else 0.0
    return Live(
        tally.frames,
        tally.skipped,
        tally.batch,
        rate,
        stages,
        overlapped(tally.ran),
        _timeline(whole[-SHOWN:]),
        tally.replayed,
    )


def _waited(whole: Sequence[Mapping[str, Ran]], stage: str) -> float:
    """The usual seconds between the end of the stage before and the beginning of this one."""
    number = STAGES.index(stage)
    if number == 0:
        return 0.0
    return max(0.0, median(one[stage].start - one[STAGES[number - 1]].end for one in whole))


def overlapped(ran: Sequence[Ran]) -> float:
    """The share in which several stages run, of the time in which any does."""
    moves = sorted([(one.start, 1) for one in ran] + [(one.end, -1) for one in ran])
    some = several = 0.0
    at_work = 0
    for (at, change), (after, _) in pairwise(moves):
        at_work += change
        some += (after - at) * (at_work > 0)
        several += (after - at) * (at_work > 1)
    return several / some if some > 0 else 0.0


def _timeline(whole: Sequence[Mapping[str, Ran]]) -> tuple[Stretch, ...]:
    begin = min(stages[STAGES[0]].start for stages in whole)
    ran = (stages[name] for stages in whole for name in STAGES)
    return tuple(Stretch(one.stage, one.group, one.start - begin, one.end - begin) for one in ran)


def live_lines(found: Live) -> Iterator[str]:
    """Lines on a live video."""
    skipped = f", {counted(found.skipped, 'of them skipped', 'of them skipped')}" if found.skipped else ""
    yield f"{counted(found.frames, 'frame')}{skipped}; {found.rate:.1f} a second at last"
    each = "each frame" if found.batch == 1 else f"each {found.batch} frames"
    yield f"{each}: " + ", ".join(f"{stage.name} {duration(stage.seconds)}" for stage in found.stages)
    yield f"several stages ran at once in {found.overlap:.0%} of the time"
    if found.replayed:
        yield f"{counted(found.replayed, 'encoding or decoding was', 'encodings and decodings were')} replayed as CUDA graphs"
    for stage in found.stages:
        if stage.waited:
            yield f"{stage.name} began {duration(stage.waited)} behind what it gets"


def draw_live(canvas: Canvas, report: Report) -> None:
    """Draw a row for each stage over the time of the last frames, groups in two alternating
    colours."""
    found = report.live
    assert found is not None
    theme = canvas.theme
    colours = theme.use, theme.copy
    box = canvas.panel("Live video, the last frames", ROW * len(STAGES) + 6)
    left, top, right, _ = box
    span = max(stretch.end for stretch in found.timeline) or 1e-9
    scale = (right - left - LABEL - 8) / span
    for number, name in enumerate(STAGES):
        canvas.text(left + 10, top + 30 + ROW * number, name, SMALL, theme.faint, "lm")
    for stretch in found.timeline:
        x, y = left + LABEL + stretch.start * scale, top + 7 + ROW * STAGES.index(stretch.kind)
        end = max(x + 1, left + LABEL + stretch.end * scale - 1)
        canvas.rect((x, y, end, y + 46), colours[stretch.layer % 2])
    share = LABEL / (right - left)
    words = f"{found.rate:.1f} frames a second, {found.overlap:.0%} of the time several stages"
    canvas.axis(box, [(share, "0"), (share + (1 - share) / 2, words), (1.0, duration(span))])
