"""The Fuse node: an upscale model in, the same out over FuseStream's kernels, and what was replaced in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from comfy_api.latest import io, ui

from . import choices, notices
from .loaders import CATEGORY

if TYPE_CHECKING:
    from ..fusion import Mode, Precision


class FuseNode(io.ComfyNode):
    """Of an upscale model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FuseStreamFuse",
            display_name="FuseStream Fuse",
            category=CATEGORY,
            description="Computes an upscale model (ESRGAN and others of Load Upscale Model) in FP16 and by FuseStream's kernels "
            "where they serve, and says which layers those are and why others are not. What goes in stays as it is.",
            search_aliases=["upscale model kernels", "esrgan", "fusestream"],
            inputs=[
                io.UpscaleModel.Input("upscale_model", tooltip="From Load Upscale Model."),
                choices.kernels(
                    "auto: each layer by FuseStream's kernel or torch's own, whichever is faster on your card. on: FuseStream's, "
                    "or an error. off: torch's, in FP16.",
                ),
                choices.precision("fast lets convolutions add in FP16, for GeForce cards. turbo: as fast."),
            ],
            outputs=[
                io.UpscaleModel.Output(tooltip="A copy with these kernels, for Upscale Image (using Model)."),
                io.String.Output(display_name="report", tooltip="What was replaced, what not, and why."),
            ],
        )

    @classmethod
    def execute(cls, upscale_model: Any, kernels: Mode = "auto", precision: Precision = "precise") -> io.NodeOutput:
        from .. import fusion  # noqa: PLC0415 - the server starts without it
        from ..fusion import upscaler  # noqa: PLC0415

        notices.attach()
        made, table = upscaler.fused(upscale_model, fusion.KernelPolicy.of(kernels, precision=precision))
        return io.NodeOutput(made, str(table), ui=ui.PreviewText(str(table)))
