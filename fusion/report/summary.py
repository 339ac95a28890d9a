"""The first lines of a report, in plain words: how long it took, and where the time went."""

from __future__ import annotations

from collections.abc import Iterator

from ..base.format import counted, took
from .data import NodeTime, Report, Sampling

MOST_NODES = 6  # that are named; the rest is summed up
SHORT = 0.05  # seconds: shorter nodes are summed up, or not worth a word
SLOW_START = 1.5  # a first step that took so many times the usual one is told


def summary(report: Report) -> Iterator[str]:
    if report.sampling is not None:
        yield sampled(report)
        yield from first_step(report.sampling)
    elif report.pass_seconds > 0:
        yield f"Once through the model takes {took(report.pass_seconds)}{waited(report)}."
    if report.nodes:
        yield f"The nodes that have run took {took(sum(one.seconds for one in report.nodes))}: {nodes(report.nodes)}."


def sampled(report: Report) -> str:
    """The last sampling in a sentence."""
    found = report.sampling
    assert found is not None
    what = pixel_words(found.pixels)
    head = f"{what}: {counted(found.steps, 'step')}" if what else counted(found.steps, "step")
    return f"{head} sampled in {took(found.spent)}, {took(found.seconds)} a step{waited(report)}."


def waited(report: Report) -> str:
    return f", of which {report.stall_share:.0%} was waiting for weights" if report.passes else ""


def first_step(found: Sampling) -> Iterator[str]:
    if found.first > SLOW_START * found.seconds and found.first - found.seconds > SHORT:
        yield f"The first step took {took(found.first)}: it brings the weights, and may compare kernels."


def nodes(found: tuple[NodeTime, ...]) -> str:
    """The nodes of a run with their times, the longest first."""
    named = [one for one in found if one.seconds >= SHORT][:MOST_NODES]
    told = [f"{one.name} {took(one.seconds)}" + (f" ({one.count} nodes)" if one.count > 1 else "") for one in named]
    others = found[len(named) :]
    seconds = sum(one.seconds for one in others)
    if seconds >= SHORT:
        told.append(f"{counted(sum(one.count for one in others), 'other')} {took(seconds)}")
    return ", ".join(told)


def pixel_words(pixels: tuple[int, int, int]) -> str:
    """`832x480, 81 frames`; of a picture without frames; empty where there is no size."""
    frames, height, width = pixels
    if not width:
        return ""
    return f"{width}x{height}" + (f", {counted(frames, 'frame')}" if frames else "")
