"""Advice on going faster or needing less: rules over a report, each with the figures it rests
on."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .data import GIB, Report, WhatIf, duration, size

WORTH = 0.05  # share of a pass: less is not worth a word
SLOW_DISK = 8e9  # bytes per second; a lower rate is the disk's, because PCIe 3 and later are faster


def faster(report: Report) -> Iterator[str]:
    """Advice on going faster that follows from what was waited for, in order of weight."""
    if not report.streams:
        return
    if not report.passes:
        yield (
            "Nothing has run yet with this model: connect the MODEL that the sampler has, and the sampler's output to `after`; "
            "the report comes when it is done."
        )
        return
    now, usual = _held(report), _usual(report)
    if report.stall_share > WORTH:
        share = f"{report.stall_share:.0%} of a pass is waiting for weights"
        better = next((one for one in larger(report) if one.seconds < usual * (1 - WORTH)), None)
        if better is not None:
            yield (
                f"{share}. By prediction {size(better.nbytes)} of VRAM for the blocks in place of {size(now)} make a pass "
                f"{duration(better.seconds)} instead of {duration(usual)}: raise vram_budget to "
                f"{math.ceil(better.nbytes / GIB * 100) / 100:.2f}, if the card has it."
            )
        else:
            yield f"{share}, and more VRAM would not help: the bus or the disk is what is slow."
        if 0 < report.rate < SLOW_DISK and report.device != "CPU":
            yield (
                f"Weights came at {report.rate / 1e9:.1f} GB/s, which is a disk's rate and not the bus's: free RAM, so that the "
                "file stays in the page cache, or move it to a faster disk."
            )
        yield "Longer or larger videos hide more of the waiting: the same bytes serve more arithmetic."


def spare(report: Report) -> Iterator[str]:
    """Advice on doing with less VRAM at the same speed."""
    if report.passes and report.stall_share <= WORTH:
        now, usual = _held(report), _usual(report)
        less = next((one for one in report.what_if if one.seconds <= usual * 1.02), None)
        if less is not None and less.nbytes < 0.8 * now:
            yield (
                f"By prediction {size(less.nbytes)} for the blocks in place of {size(now)} would be as fast: lower vram_budget if "
                "something else needs the VRAM."
            )


def _held(report: Report) -> int:
    return report.window + report.resident_bytes


def _usual(report: Report) -> float:
    return report.predicted_pass or report.pass_seconds


def faster_qualities(tier: str) -> Iterator[str]:
    """Advise qualities that add in FP16, which a GeForce card does twice as fast, and which round
    more. 'Balanced' is not advised for a tier that computes as stored, because it unpacks an INT8
    file."""
    rounds = (
        "'Fastest' also rounds attention's queries and keys to 8 bits, which is faster still for long or large videos. Look "
        "whether you see the difference."
    )
    if tier == "precise":
        yield f"quality 'Balanced' in the loader adds in FP16, which a GeForce card does twice as fast; {rounds}"
    elif tier == "stored":
        yield f"quality 'Fastest' in the loader adds in FP16, which a GeForce card does twice as fast. {rounds}"


def larger(report: Report) -> list[WhatIf]:
    return [one for one in report.what_if if one.nbytes > _held(report)]
