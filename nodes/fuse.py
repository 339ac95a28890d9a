"""The Fuse node: a network for pictures in, the same out over FuseStream's kernels, and what was replaced in it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from comfy_api.latest import io, ui

from . import between_prompts, choices, notices
from .loaders import CATEGORY

if TYPE_CHECKING:
    from ..fusion import Mode, Precision

Depth = io.Custom("DA3_MODEL")  # what stock calls Depth Anything 3's MODEL


def attach() -> None:
    """What was captured of networks is given back after each prompt where ComfyUI would not ask for it. Called once."""
    between_prompts.always(_give_back)


def _give_back() -> None:
    giving_back = sys.modules.get(f"{(__package__ or '').rpartition('.')[0]}.fusion.networks.giving_back")
    if giving_back is not None:  # something was fused
        giving_back.after_prompt()


class FuseNode(io.ComfyNode):
    """Of an upscale model, a background remover, a detector or a depth model: what goes in is what comes out."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        kinds = io.MatchType.Template("network", [io.UpscaleModel, io.BackgroundRemoval, io.Model, Depth])
        return io.Schema(
            node_id="FuseStreamFuse",
            display_name="FuseStream Fuse",
            category=CATEGORY,
            description="Computes an upscale model (ESRGAN and others of Load Upscale Model), BiRefNet, RT-DETR or Depth Anything "
            "3 by FuseStream's kernels where they serve, and says which layers those are and why others are not. What goes in "
            "stays as it is.",
            search_aliases=["upscale model kernels", "esrgan", "birefnet", "rt-detr", "depth anything", "fusestream"],
            inputs=[
                io.MatchType.Input(
                    "upscale_model",
                    template=kinds,
                    display_name="model",
                    tooltip="From Load Upscale Model, Load Background Removal Model, Load Diffusion Model (RT-DETR) or Load Depth "
                    "Anything 3.",
                ),
                choices.kernels(
                    "auto: each layer by FuseStream's kernel or torch's own, whichever is faster on your card. on: FuseStream's, "
                    "or an error. off: torch's.",
                ),
                choices.precision("fast lets convolutions add in FP16, for GeForce cards. turbo: as fast."),
            ],
            outputs=[
                io.MatchType.Output(
                    template=kinds,
                    display_name="model",
                    tooltip="A copy with these kernels, for the nodes that take the first.",
                ),
                io.String.Output(display_name="report", tooltip="What was replaced, what not, and why."),
            ],
        )

    @classmethod
    def execute(cls, upscale_model: Any, kernels: Mode = "auto", precision: Precision = "precise") -> io.NodeOutput:
        from .. import fusion  # noqa: PLC0415 - the server starts without it
        from ..fusion.networks import picture_nets  # noqa: PLC0415

        notices.attach()
        made, table = picture_nets.fused(upscale_model, fusion.KernelPolicy.of(kernels, precision=precision))
        return io.NodeOutput(made, str(table), ui=ui.PreviewText(str(table)))
