"""The Report node, shown after sampling, and the Compare node, which shows two reports side by side.

A report is made once, when the node runs: what it hands on are plain values.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import folder_paths
from comfy_api.latest import io, ui

from . import kept_reports
from .loaders import CATEGORY

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..fusion.report import Report as Found
    from ..fusion.report.canvas import ThemeName

# What goes behind a name is shorter than the rest of the 255 bytes that systems take.
LONGEST_NAME, LONGEST_PREFIX = 200, 1000
ReportType = io.Custom("FUSESTREAM_REPORT")


def theme_input() -> Any:
    return io.Combo.Input(
        "theme", options=["dark", "light"], default="dark", optional=True, tooltip="Colours of the picture."
    )


class ReportNode(io.ComfyNode):
    """Runs when its input is there: connect what sampling makes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FuseStreamReport",
            display_name="FuseStream Report",
            category=CATEGORY,
            description="Shows what happened while sampling: when weights came, when compute waited for them, what stayed in VRAM, "
            "which kernels ran and why not others, and what to change to go faster.",
            search_aliases=["timeline", "profile", "streaming report", "why slow", "fusestream"],
            is_output_node=True,
            inputs=[
                io.AnyType.Input(
                    "after",
                    tooltip="Whatever the report shall wait for, usually the sampler's LATENT. It is handed on unchanged.",
                ),
                io.Model.Input(
                    "model",
                    optional=True,
                    tooltip="The MODEL that was sampled with. Without it only kernels and memory are reported.",
                ),
                theme_input(),
                io.Boolean.Input(
                    "write_json",
                    default=False,
                    optional=True,
                    tooltip="Also write all figures into ComfyUI's output folder.",
                ),
                io.Boolean.Input(
                    "write_trace",
                    default=False,
                    optional=True,
                    tooltip="Also write the timeline as a Chrome trace, for chrome://tracing or ui.perfetto.dev.",
                ),
                io.String.Input(
                    "filename_prefix",
                    default="fusestream/report",
                    optional=True,
                    tooltip="Of the files that are written, below ComfyUI's output folder.",
                ),
            ],
            outputs=[
                io.AnyType.Output(display_name="after", tooltip="What came in, for the nodes that follow."),
                ReportType.Output(display_name="report", tooltip="For FuseStream Compare."),
                io.String.Output(display_name="text", tooltip="The report as plain text, for Preview Any or a file."),
            ],
        )

    @classmethod
    def execute(
        cls,
        after: Any,
        model: Any = None,
        theme: ThemeName = "dark",
        write_json: bool = False,
        write_trace: bool = False,
        filename_prefix: str = "fusestream/report",
    ) -> io.NodeOutput:
        from ..fusion import report  # noqa: PLC0415 - the server starts without it
        from ..fusion.report.gathering import trace_of  # noqa: PLC0415

        found = report.gather(model)
        kept_reports.keep(found, model)
        text = report.as_text(found)
        trace = trace_of(model) if write_trace else None
        if write_trace and trace is None:
            text += "\nNo trace was written: the model does not stream.\n"
        files = {"json": report.as_json(found) if write_json else None, "trace.json": trace}
        try:
            for path in written({kind: content for kind, content in files.items() if content}, filename_prefix):
                text += f"\nwritten: {path}"
        except (OSError, ValueError) as error:  # what was made in an hour is handed on all the same
            text += f"\nNo file was written: {reason_not_written(error)}\n"
        return io.NodeOutput(after, found, text, ui=shown(report.draw(found, theme), text, cls))

    @classmethod
    def validate_inputs(cls, filename_prefix: str | None = None) -> bool | str:
        return prefix_fault(filename_prefix or "") or True


class Compare(io.ComfyNode):
    """Runs nothing itself."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FuseStreamCompare",
            display_name="FuseStream Compare",
            category=CATEGORY,
            description="Shows two reports side by side: times, bytes, memory, and which kernels differ.",
            search_aliases=["a/b", "compare reports", "fusestream"],
            is_output_node=True,
            inputs=[
                ReportType.Input("first", tooltip="A report: A, on the left."),
                ReportType.Input("second", tooltip="Another report: B, on the right."),
                theme_input(),
            ],
            outputs=[
                io.String.Output(display_name="text", tooltip="What differs, as plain text, for Preview Any or a file.")
            ],
        )

    @classmethod
    def execute(cls, first: Found, second: Found, theme: ThemeName = "dark") -> io.NodeOutput:
        from ..fusion import report  # noqa: PLC0415

        text = report.compare_text(first, second)
        return io.NodeOutput(text, ui=shown(report.draw_pair(first, second, theme), text, cls))


def as_image(picture: Image) -> Any:
    """As an IMAGE [1, height, width, 3] in fp32."""
    import numpy  # noqa: PLC0415
    import torch  # noqa: PLC0415

    return torch.from_numpy(numpy.asarray(picture, dtype=numpy.float32) / 255.0)[None]


def shown(picture: Image, text: str, cls: type[io.ComfyNode]) -> dict[str, Any]:
    """Picture and text, as the front end takes them from a node."""
    return {**ui.PreviewImage(as_image(picture), cls=cls).as_dict(), **ui.PreviewText(text).as_dict()}


def prefix_fault(prefix: str) -> str | None:
    """Why no system takes a file of such a name, in a sentence."""
    if any(ord(letter) < ord(" ") for letter in prefix):
        return "filename_prefix has a letter that no file name can have, such as a line break or NUL. Type it anew."
    longest = max(len(part.encode("utf-8", "replace")) for part in prefix.replace("\\", "/").split("/"))
    if longest > LONGEST_NAME or len(prefix) > LONGEST_PREFIX:
        return f"filename_prefix is too long: a name in it may have {LONGEST_NAME} bytes, all of it {LONGEST_PREFIX} letters."
    return None


def reason_not_written(error: OSError | ValueError) -> str:
    """Without the path, which names folders."""
    if not isinstance(error, OSError):
        return str(error)
    reason = error.strerror or type(error).__name__
    return f"{reason}. Choose another filename_prefix, or see whether ComfyUI's output folder can be written to."


def written(files: dict[str, str], prefix: str) -> list[str]:
    """Write each content to a file of that ending, all under one new number. Returns their names below the output folder."""
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
