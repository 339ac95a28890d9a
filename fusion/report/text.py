"""A report as text: for the node, for a file, for a bug report. What a user asks first stands first;
lists that are long stand last."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from ..base.format import counted, took
from .data import Report, Sampling, Sparsity, duration, size
from .live import live_lines
from .summary import summary

MOST_LINES = 40  # of kernels or refusals, because a long session has hundreds of shapes


def as_text(report: Report) -> str:
    return "\n".join(lines(report)) + "\n"


def lines(report: Report) -> Iterator[str]:
    yield f"FuseStream report: {report.title}"
    told = list(summary(report))
    yield from told or [report.state]
    yield from section("To go faster", report.advice)
    yield from section("To do with less", report.spare)
    how = " | ".join(word for word in (report.device, report.policy) if word)
    yield from section("How it computed", (how, report.state) if told else (how,))
    if report.streams:
        yield from section("Streaming (a pass: once through all blocks, for one prompt or for both)", streaming(report))
        yield from section("Slowest waits", waits(report))
    if report.sparsity is not None:
        yield from section("Sparse attention", sparse_attention(report.sparsity))
    if report.foretold is not None:
        yield from section("Step cache", (report.foretold.asked, f"the last sampling: {report.foretold.done}"))
    if report.live is not None:
        yield from section("Live video", live_lines(report.live))
    yield from section("Memory", memory(report))
    yield from section("Messages", report.messages)
    yield from section("Could not be found out", report.gaps)
    yield from section("Kernels: who computed what (all models since ComfyUI started)", kernels(report))
    yield from section("Kernels that were not used, by reason", refusals(report))


def section(title: str, body: Iterable[str]) -> Iterator[str]:
    found = list(body)
    if found:
        yield ""
        yield title
        yield from (f"  {line}" for line in found)


def streaming(report: Report) -> Iterator[str]:
    if report.passes:
        unit = "part" if " in parts: " in report.state else "block"
        yield (
            f"a pass through {counted(len(report.layers), unit)}: {duration(report.pass_seconds)}, of which "
            f"{duration(report.stall_seconds)} waiting ({report.stall_share:.1%}); {counted(report.passes, 'pass', 'passes')} seen"
        )
    if report.predicted_pass is not None:
        predicted = sum(layer.predicted or 0.0 for layer in report.layers)
        yield f"predicted at these rates: {duration(report.predicted_pass)}, of which {duration(predicted)} waiting"
    stay = f"{size(report.resident_bytes)} of the blocks stay in VRAM"
    if report.slots:
        yield (
            f"{stay}, the others pass through {size(report.window)} with room for {report.slots}; budget {size(report.budget)}; "
            f"{size(report.streamed_bytes)} cross the bus in each pass"
        )
    else:
        yield f"{stay}; budget {size(report.budget)}"
    if report.rate:
        yield f"bandwidth while copying: {report.rate / 1e9:.2f} GB/s; {report.overlap:.0%} of that time hidden behind computing"
    for route, nbytes in report.routes:
        yield f"from {route}: {size(nbytes)} in all"
    for what, why in report.notes:
        yield f"{what}: {why}"
    for number, one in enumerate(report.what_if):
        if number and all(duration(rest.seconds) == duration(one.seconds) for rest in report.what_if[number - 1 :]):
            yield f"and with more VRAM for the blocks, up to all {size(report.what_if[-1].nbytes)}: the same"
            return
        yield f"predicted with {size(one.nbytes)} for the blocks: {duration(one.seconds)} a pass"


def sampling_words(found: Sampling) -> str:
    """The words that stand under the loader when a sampling is over."""
    return f"{counted(found.steps, 'step')}, {took(found.seconds)} a step, {took(found.spent)} of sampling"


def waits(report: Report) -> Iterator[str]:
    for layer in sorted(report.layers, key=lambda one: -one.stall)[:5]:
        if layer.stall > 0:
            expected = "" if layer.predicted is None else f", predicted {duration(layer.predicted)}"
            yield f"{layer.name}: {duration(layer.stall)}{expected}"


def sparse_attention(found: Sparsity) -> Iterator[str]:
    yield sparse_words(found)
    for why, count in found.dense:
        yield f"dense: {why}: {counted(count, 'attention')}"


def sparse_words(found: Sparsity) -> str:
    """One sentence on sparse attention."""
    words = f"{found.asked}: {found.attentions} of {counted(found.all, 'self-attention')} were sparse"
    if found.visited is not None:
        words += f" and visited {found.visited:.1%} of the key blocks"
    if found.seconds is not None:
        words += f", {duration(found.seconds)} each"
        if found.dense_seconds is not None:
            words += f" in place of {duration(found.dense_seconds)}"
    return words


def memory(report: Report) -> Iterator[str]:
    for pool in report.memories:
        peak = "" if pool.peak is None else f", at most {size(pool.peak)}"
        yield f"{pool.name}: {size(pool.used)} of {size(pool.limit)}{peak}"


def kernels(report: Report) -> Iterator[str]:
    for row in report.kernels[:MOST_LINES]:
        yield f"{row.op} {row.shape}: {row.winner} ({row.why})"
    if len(report.kernels) > MOST_LINES:
        yield f"and {len(report.kernels) - MOST_LINES} more; the JSON has all"


def refusals(report: Report) -> Iterator[str]:
    """A line for each reason; the JSON has each kernel by itself."""
    by_reason: defaultdict[str, dict[str, None]] = defaultdict(dict)  # sets in order
    for row in report.refusals:
        by_reason[row.reason][f"{row.candidate} ({row.op})"] = None
    for reason, kernels in list(by_reason.items())[:MOST_LINES]:
        yield f"{reason}: {', '.join(kernels)}"
    if len(by_reason) > MOST_LINES:
        yield f"and {counted(len(by_reason) - MOST_LINES, 'more reason')}; the JSON has all"
