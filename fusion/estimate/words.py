"""The words of an estimate, for the text and for the picture."""

from __future__ import annotations

from collections.abc import Iterator

from ..base.card_rates import Source
from ..base.format import counted, quality, took
from ..report.data import Sampling, size
from ..report.summary import pixel_words
from ..report.text import sampling_words, section
from ..sampling.step_timer import Reading
from .fit import Fit, Verdict
from .plan import Change, Estimate
from .ram import RamFit

NOT_COUNTED = "Reading the prompt, decoding and the first reading of the file come on top."
WHOLE = (
    "ComfyUI's own memory management has this model's weights: what fits, and how long it takes, is not reckoned for it. Load it "
    "with a FuseStream loader, with vram_budget -1 or a number of GiB."
)


def as_text(found: Estimate) -> str:
    return "\n".join(lines(found)) + "\n"


def lines(found: Estimate) -> Iterator[str]:
    """Whether it fits and how long it takes first, because a node shows a few lines at once."""
    yield f"FuseStream plan: {found.title}"
    yield asked(found)
    if found.assumed:
        yield found.assumed
    if found.fit is not None:
        yield verdict(found.fit)
        yield time(found)
        changes = [change_words(change, found) for change in found.changes]
        yield from section("What would change it", changes)
        told = [f"{name}: {words}" for name, words in memory(found.fit)]
        yield from section("Memory", told if found.ram is None else [*told, f"RAM: {ram(found.ram)}"])
    elif not found.gaps:
        yield WHOLE
    yield from section("How it computes", [" | ".join(word for word in (found.card, found.kernels) if word)])
    yield from section("Could not be found out", found.gaps)


def asked(found: Estimate) -> str:
    what = pixel_words(found.pixels) or f"sound, a latent {found.work.shape[-1]} long"
    batch = found.work.shape[0]
    many = f", {batch} at once" if batch > 1 else ""
    prompts = f"{('one prompt', 'two prompts', 'three prompts')[found.work.prompts - 1]} a step"
    return f"{what}{many}, {counted(found.work.steps, 'step')}, {prompts}"


def verdict(fit: Fit) -> str:
    if fit.verdict is Verdict.NOT:
        return f"It does not fit: {size(fit.lacks)} are missing."
    what = ("part of a block stays", "parts of blocks stay") if fit.parts else ("block stays", "blocks stay")
    blocks = f"{counted(fit.stays, *what)}, {counted(fit.passes, 'passes', 'pass')} through"
    if fit.verdict is Verdict.TIGHT:
        return f"It fits barely, and leaves the desktop less than {size(fit.reserve)}: {blocks}."
    return f"It fits: {blocks}." if fit.verdict is Verdict.STREAMS else "It fits, and all of the model stays."


def memory(fit: Fit) -> Iterator[tuple[str, str]]:
    """Parts of the memory by name, with their sizes."""
    others = f", of which ComfyUI unloads {size(fit.others)} of other models first" if fit.others else ""
    yield "free for it", size(fit.free) + others
    yield "weights of blocks", f"{size(fit.held)} of {size(fit.model)}"
    if fit.window:
        yield "of these the window that blocks pass through", size(fit.window)
    if fit.kept:
        yield "keys and values of texts, whose weights pass once for a prompt", size(fit.kept)
    yield "other weights", size(fit.rest)
    how = "" if fit.forwards == 1 else ", prompts one after the other"
    yield "activations of a step", size(fit.activations) + how


def ram(found: RamFit) -> str:
    """What comes from the disk again."""
    told = [f"room for {size(found.room)}, files of {size(found.files)}"]
    if found.read_each_step:
        told.append(
            f"{size(found.passing_each_step)} of the model pass in each step, of which "
            f"{size(found.read_each_step)} come from the disk each time: a smaller file, or more RAM, is faster"
        )
    if found.read_each_prompt:
        told.append(f"a new prompt reads about {size(found.read_each_prompt)} from the disk again")
    return "; ".join(told) if len(told) > 1 else f"{told[0]}, all of which stay"


def time(found: Estimate) -> str:
    if found.seconds is None or found.total is None or found.source is None:
        return (
            f"How long it takes is not known: nobody has measured this model on this device ({found.card}), nor can it be "
            "predicted. Sample two steps or more, and this node tells it from then on."
        )
    told = (
        f"A step takes {length(found.seconds, found)}, {counted(found.work.steps, 'step')} {length(found.total, found)}: "
        f"{basis(found)}."
    )
    if found.is_most:
        told += " Work that is left out as it runs makes it shorter. Once it has run, this node tells by how much."
    if found.assumed_bus:
        told += " Of the bus PCIe 3 with 16 lanes was assumed."
    return f"{told} {NOT_COUNTED}"


def length(seconds: float, found: Estimate | Change) -> str:
    """A time of this estimate or change."""
    return f"at most {took(seconds)}" if found.is_most else took(seconds)


def basis(found: Estimate) -> str:
    """Words for the source of the seconds."""
    assert found.source is not None
    words = found.source.value
    if found.source is Source.SCALED and found.by is not None:
        shape = "x".join(str(side) for side in found.by.shape[2:])
        words += f" (latent of {shape}, {took(found.by.seconds)} a step)"
    return words


def change_words(change: Change, found: Estimate) -> str:
    return f"{change_name(change)}: {change_effect(change, found)}"


def change_name(change: Change) -> str:
    if change.what == "quality":
        return f"quality {quality(change.values[0])}"
    if change.what == "few steps":
        return f"a LoRA for {change.values[0]} steps, with guidance 1"
    if change.what == "frames":
        return counted(change.values[0], "frame")
    if change.what == "size":
        height, width = change.values
        return f"{width}x{height}"
    if change.what == "frames and size":
        frames, height, width = change.values
        return f"{counted(frames, 'frame')} of {width}x{height}"
    return "vram_budget -1, automatic"


def change_effect(change: Change, found: Estimate) -> str:
    parts = []
    if change.seconds is not None and change.total is not None:
        parts.append(f"{length(change.seconds, change)} a step, {length(change.total, change)} in all")
    if change.fit is not None and found.fit is not None and change.fit.verdict is not found.fit.verdict:
        parts.append(change.fit.verdict.value)
    if not parts and change.fit is not None:
        parts.append(f"activations {size(change.fit.activations)}, not timed")
    return "; ".join(parts)


# ------------------------------------------------------------------------------------------------------------ while it runs


def running(reading: Reading) -> str:
    """The line under a loader while its model samples."""
    if reading.is_over:
        return sampling_words(Sampling(reading.step, reading.seconds or 0.0, reading.spent))
    if reading.seconds is None or reading.left is None:
        return f"step 1 of {reading.steps}"
    now = min(reading.step + 1, reading.steps)
    return f"step {now} of {reading.steps}, {took(reading.seconds)} a step, {took(reading.left)} left"
