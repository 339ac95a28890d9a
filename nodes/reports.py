"""The nodes that describe a run: Plan before it, Report after it, and Compare for two reports.

A report is made once, when the node runs, and consists of plain values.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import folder_paths
from comfy_api.latest import io, ui

from . import declare
from .declare import About, Node, linked, widget
from .graph import queued
from .graph.as_sampler import as_sampler
from .graph.links import Graph
from .model_files import model_files
from .page import kept_reports

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..fusion.report import Report as Found
    from ..fusion.report.canvas import ThemeName

# The suffix of a name fits into the rest of the 255 bytes that systems allow.
LONGEST_NAME, LONGEST_PREFIX = 200, 1000
STEPS, GUIDANCE = 20, 5.0  # of a plan where no sampler tells
ReportType = io.Custom("FUSESTREAM_REPORT")


class Plan(Node):
    """Costs next to nothing: a loader reads only the file's header, and nothing is sampled."""

    about = About(
        "Plan",
        declare.REPORTS,
        "Tells before sampling whether model and latent fit into the VRAM that is free, how long a step and all of "
        "them take on this card, and what would change it. Run this node alone: click it and press its play button.",
        aliases=["estimate", "will it fit", "how long", "eta", "vram calculator"],
        is_output_node=True,
        hidden=[io.Hidden.prompt, io.Hidden.unique_id],  # the workflow's other models, and its sampler
        outputs=[
            io.String.Output(display_name="text", tooltip="The plan as plain text, for Preview Any or a file."),
            io.Image.Output(display_name="picture", tooltip="The plan as it is shown, for Save Image."),
        ],
    )

    @dataclass(frozen=True)
    class Inputs:
        model: Any = linked(io.Model, "The MODEL that goes to the sampler, LoRAs and Kernels nodes included.")
        latent: Any = linked(io.Latent, "The LATENT that the sampler begins with: only its size counts.")
        steps: int = widget(
            "0: as many as the sampler of this MODEL computes. Or another number.",
            default=0,
            between=(0, 10000),
            is_required=True,
            display_name="steps (0: as sampler)",
        )
        guidance: float = widget(
            "0: as the sampler has it. Or another cfg: with 1 each step computes one prompt, else two.",
            default=0.0,
            between=(0.0, 100.0, 0.1),
            is_required=True,
            display_name="guidance (0: as sampler)",
        )
        theme: ThemeName = declare.theme()

    @classmethod
    def fingerprint_inputs(cls, **_inputs: Any) -> float:  # what is free changes, the inputs do not
        return time.time()

    @classmethod
    def run(cls, inputs: Inputs) -> io.NodeOutput:
        from ..fusion.estimate.picture import draw  # noqa: PLC0415 - the server starts without it
        from ..fusion.estimate.plan import estimate  # noqa: PLC0415
        from ..fusion.estimate.words import as_text  # noqa: PLC0415

        samples = inputs.latent["samples"]
        if samples.is_nested:  # of several kinds, a film and its sound: the first says most
            samples = samples.unbind()[0]
        steps, prompts, assumed = cls.asked(inputs)
        files = model_files(getattr(cls.hidden, "prompt", None) or {})
        found = replace(estimate(inputs.model, samples.shape, steps, prompts, files), assumed=assumed)
        picture, text = draw(found, inputs.theme), as_text(found)
        return io.NodeOutput(text, as_image(picture), ui=shown(picture, text, cls))

    @classmethod
    def asked(cls, inputs: Inputs) -> tuple[int, int, str]:
        """Steps, and prompts of each, as the inputs say, else as the sampler has them; and in a
        sentence what had to be assumed."""
        from ..fusion.estimate.plan import prompts_of  # noqa: PLC0415 - the server starts without it

        steps, prompts, why = inputs.steps or None, prompts_of(inputs.guidance) if inputs.guidance else None, ""
        if steps is None or prompts is None:
            graph = Graph(getattr(cls.hidden, "prompt", None) or {}, queued.kind_of)
            there = as_sampler(graph, str(getattr(cls.hidden, "unique_id", "")))
            steps, prompts, why = steps or there.steps, prompts or there.prompts, there.why
        assumed = [
            words for value, words in ((steps, f"{STEPS} steps"), (prompts, f"a guidance of {GUIDANCE}")) if not value
        ]
        told = f"Assumed: {' and '.join(assumed)}, because {why}. Set them on this node." if assumed else ""
        return steps or STEPS, prompts or prompts_of(GUIDANCE), told


class ReportNode(Node):
    """Runs when its input is there, so connect the output of sampling."""

    about = About(
        "Report",
        declare.REPORTS,
        "Shows what happened while sampling: when weights came, when compute waited for them, what stayed in VRAM, "
        "which kernels ran and why not others, and what to change to go faster.",
        aliases=["timeline", "profile", "streaming report", "why slow"],
        is_output_node=True,
        outputs=[
            io.AnyType.Output(display_name="after", tooltip="What came in, for the nodes that follow."),
            ReportType.Output(display_name="report", tooltip="For FuseStream Compare."),
            io.String.Output(display_name="text", tooltip="The report as plain text, for Preview Any or a file."),
        ],
    )

    @dataclass(frozen=True)
    class Inputs:
        after: Any = linked(
            io.AnyType, "Whatever the report shall wait for, usually the sampler's LATENT. It is handed on unchanged."
        )
        model: Any = linked(
            io.Model, "The MODEL that was sampled with. Without it only kernels and memory are reported.", optional=True
        )
        theme: ThemeName = declare.theme()
        write_json: bool = widget("Also write all figures into ComfyUI's output folder.", default=False)
        write_trace: bool = widget(
            "Also write the timeline as a Chrome trace, for chrome://tracing or ui.perfetto.dev.", default=False
        )
        filename_prefix: str = widget(
            "Of the files that are written, below ComfyUI's output folder.", default="fusestream/report"
        )

    @classmethod
    def run(cls, inputs: Inputs) -> io.NodeOutput:
        from ..fusion import report  # noqa: PLC0415 - the server starts without it
        from ..fusion.report.gathering import trace_of  # noqa: PLC0415

        found = kept_reports.gathered(inputs.model)
        kept_reports.keep(found, inputs.model)
        text = report.as_text(found)
        trace = trace_of(inputs.model) if inputs.write_trace else None
        if inputs.write_trace and trace is None:
            text += "\nNo trace was written: the model does not stream.\n"
        files = {"json": report.as_json(found) if inputs.write_json else None, "trace.json": trace}
        try:
            for path in written({kind: content for kind, content in files.items() if content}, inputs.filename_prefix):
                text += f"\nwritten: {path}"
        # The result of an hour of work is passed on all the same.
        except (OSError, ValueError) as error:
            text += f"\nNo file was written: {reason_not_written(error)}\n"
        return io.NodeOutput(inputs.after, found, text, ui=shown(report.draw(found, inputs.theme), text, cls))

    @classmethod
    def validate_inputs(cls, filename_prefix: str | None = None) -> bool | str:
        return prefix_fault(filename_prefix or "") or True


class Compare(Node):
    """Runs nothing itself."""

    about = About(
        "Compare",
        declare.REPORTS,
        "Shows two reports side by side: times, bytes, memory, and which kernels differ.",
        aliases=["a/b", "compare reports"],
        is_output_node=True,
        outputs=[
            io.String.Output(display_name="text", tooltip="What differs, as plain text, for Preview Any or a file.")
        ],
    )

    @dataclass(frozen=True)
    class Inputs:
        first: Found = linked(ReportType, "A report: A, on the left.")
        second: Found = linked(ReportType, "Another report: B, on the right.")
        theme: ThemeName = declare.theme()

    @classmethod
    def run(cls, inputs: Inputs) -> io.NodeOutput:
        from ..fusion import report  # noqa: PLC0415

        text = report.compare_text(inputs.first, inputs.second)
        return io.NodeOutput(text, ui=shown(report.draw_pair(inputs.first, inputs.second, inputs.theme), text, cls))


def as_image(picture: Image) -> Any:
    """The picture as an IMAGE [1, height, width, 3] in fp32."""
    import numpy  # noqa: PLC0415
    import torch  # noqa: PLC0415

    return torch.from_numpy(numpy.asarray(picture, dtype=numpy.float32) / 255.0)[None]


def shown(picture: Image, text: str, cls: type[io.ComfyNode]) -> dict[str, Any]:
    """Picture and text, as the front end takes them from a node."""
    return {**ui.PreviewImage(as_image(picture), cls=cls).as_dict(), **ui.PreviewText(text).as_dict()}


def prefix_fault(prefix: str) -> str | None:
    """Why no system accepts a file of such a name, in a sentence."""
    if any(ord(letter) < ord(" ") for letter in prefix):
        return "filename_prefix has a letter that no file name can have, such as a line break or NUL. Type it anew."
    longest = max(len(part.encode("utf-8", "replace")) for part in prefix.replace("\\", "/").split("/"))
    if longest > LONGEST_NAME or len(prefix) > LONGEST_PREFIX:
        return f"filename_prefix is too long: a name in it may have {LONGEST_NAME} bytes, all of it {LONGEST_PREFIX} letters."
    return None


def reason_not_written(error: OSError | ValueError) -> str:
    """The reason in words, without the path, which names folders."""
    if not isinstance(error, OSError):
        return str(error)
    reason = error.strerror or type(error).__name__
    return f"{reason}. Choose another filename_prefix, or see whether ComfyUI's output folder can be written to."


def written(files: dict[str, str], prefix: str) -> list[str]:
    """Write each content to a file of that ending, under one new number. Returns the files'
    names."""
    if not files:
        return []
    fault = prefix_fault(prefix)
    if fault is not None:
        raise ValueError(fault)
    root = folder_paths.get_output_directory()
    folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(prefix, root)
    names = []
    for ending, content in files.items():
        path = Path(folder) / f"{name}_{counter:05}_.{ending}"
        path.write_text(content, encoding="utf-8")
        names.append(str(Path(subfolder) / path.name))
    return names
