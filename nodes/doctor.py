"""The doctor as a node, and for the page's menu, which needs no graph: a report on this machine, to read and to paste."""

from __future__ import annotations

import time
from pathlib import Path

import folder_paths
from comfy_api.latest import io, ui

from ..fusion.base.family import Role
from . import files
from .loaders import CATEGORY


class Doctor(io.ComfyNode):
    """Needs nothing but itself in a graph: it is an output node."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FuseStreamDoctor",
            display_name="FuseStream Doctor",
            category=CATEGORY,
            description="Looks at driver, card, kernels, pager, disk and ComfyUI, and writes what it finds: for a bug report, or "
            "to see why something is slow.",
            search_aliases=["diagnose", "system info", "bug report", "fusestream"],
            is_output_node=True,
            inputs=[
                io.Boolean.Input(
                    "measure",
                    default=True,
                    optional=True,
                    tooltip="Also measures how fast weights reach the card and how fast the disk is: a few seconds, 256 MB read.",
                ),
            ],
            outputs=[
                io.String.Output(
                    tooltip="The report as plain text, without folder names of yours. Connect it to Preview Any."
                )
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, measure: bool = True) -> float:  # noqa: ARG003 - the machine changes, the inputs do not
        return time.time()

    @classmethod
    def execute(cls, measure: bool = True) -> io.NodeOutput:
        text = examined(measure)
        return io.NodeOutput(text, ui=ui.PreviewText(text))


def examined(measure: bool) -> str:
    """The whole report. Takes seconds where it measures."""
    from ..fusion.doctor import as_text, examine  # noqa: PLC0415 - the server starts without it

    return as_text(examine(None, pack_folders(), largest_model(), measure=measure))


def pack_folders() -> list[Path]:
    return [Path(folder) for folder in folder_paths.get_folder_paths("custom_nodes")]


def largest_model() -> Path | None:
    """The file by which to measure the disk: the one that takes longest to load."""
    roles = (Role.DIFFUSION, Role.CHECKPOINT)
    paths = (path for role in roles for name in files.listed(role) if (path := files.where(role, name)))
    sizes = {Path(path): Path(path).stat().st_size for path in paths if Path(path).is_file()}
    return max(sizes, key=sizes.__getitem__, default=None)
