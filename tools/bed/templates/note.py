"""The note on every example: what it makes, which file goes where, what an 8 GB card should expect."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ..paths import ROOT
from .files import File
from .prediction import LARGE, SMALL, Joint, Model, seconds_a_step

UNKNOWN = "How many frames a second it makes was not measured yet on any card."


@dataclass(frozen=True)
class Work:
    """What the example asks of its model: the size of the video or picture, the steps, the prompts of a step, and pictures beside
    the one that is made."""

    model: Model | Joint
    width: int
    height: int
    length: int
    steps: int
    prompts: int = 2
    fps: int = 16
    references: int = 0


def note(title: str, about: str, files: list[File], work: Work | None, advice: str) -> str:
    """The note's Markdown. work: None where nothing is predicted.

    Without `code` and without a table: nodes that the front end draws as elements give these two colours of their own, whatever
    the note's, and names of files in blue on brown cannot be read.
    """
    releases = dict.fromkeys(file.release for file in files)
    return "\n".join(
        [
            f"# {title}",
            "",
            about,
            "",
            "Put these files into ComfyUI's *models* folder:",
            "",
            *(f"- **{file.name}** ({file.gigabytes:g} GB) into *{file.folder}*" for file in files),
            "",
            f"They are published on huggingface.co in {_listed([f'*{release}*' for release in releases])}. "
            "Press **R** after putting them there, then **Run**. "
            "To see what is being made, set *Live preview method* in the settings to *latent2rgb*.",
            "",
            f"**On an 8 GB card.** {UNKNOWN if work is None else expectation(work)} {advice}",
            "",
        ]
    )


def plain(title: str, about: str, advice: str) -> str:
    """The Markdown of an example that needs no file and samples nothing."""
    return "\n".join([f"# {title}", "", about, "", f"**On an 8 GB card.** Not measured yet. {advice}", ""])


def expectation(work: Work) -> str:
    """What to expect, with the status of each figure: a card of 8 GB has not been measured, a larger one made as small has."""
    each = seconds_a_step(work.model, work.width, work.height, work.length, work.prompts, work.references)
    size, others = f"{work.width}x{work.height}", ""
    if isinstance(work.model, Model):
        size += f", {work.length} frames ({(work.length - 1) / work.fps:.1f} s of video)"
        others = " The README predicts other cards."
    return (
        f"No such card was measured yet. Predicted for an RTX 2060 Super, arithmetic of the diffusion model alone: "
        f"{_rounded(each)} s a step, {_minutes(each * work.steps)} for these {work.steps} steps of {size}; the rest comes on top."
        f"{others}{_measured(work.model)}"
    )


def _measured(model: Model | Joint) -> str:
    """The bench's row for text to video with this model at 480p, if there is one."""
    names: dict[Model | Joint, str] = {SMALL: "1.3B 480x832x81", LARGE: "14B 480x832x81"}
    rows = json.loads((ROOT / "bench" / "results" / "nvidia-h200.json").read_text(encoding="utf-8"))["models"]["rows"]
    for row in rows:
        if row["name"] == names.get(model):
            return (
                f" Measured on an H200 with {row['free GiB']:g} GiB free, text to video in fp16, 832x480, 81 frames: "
                f"{row['ours']['s']:.3g} s a step with guidance, {row['stock']['s']:.3g} s in stock ComfyUI."
            )
    return ""


def _rounded(seconds: float) -> str:
    """Two digits: more would pretend."""
    return f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)
