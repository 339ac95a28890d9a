"""The Plan node: will it fit, how long does it take, and what would change it, before anything is sampled."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

from .loaders import CATEGORY
from .report import as_image, shown, theme_input

if TYPE_CHECKING:
    from ..fusion.report.canvas import ThemeName


class Plan(io.ComfyNode):
    """Costs next to nothing: a loader reads no more than the file's header, and nothing is sampled."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FuseStreamPlan",
            display_name="FuseStream Plan",
            category=CATEGORY,
            description="Tells before sampling whether model and latent fit into the VRAM that is free, how long a step and all of "
            "them take on this card, and what would change it. Run this node alone: click it and press its play button.",
            search_aliases=["estimate", "will it fit", "how long", "eta", "vram calculator", "fusestream"],
            is_output_node=True,
            inputs=[
                io.Model.Input(
                    "model", tooltip="The MODEL that goes to the sampler, LoRAs and Kernels nodes included."
                ),
                io.Latent.Input("latent", tooltip="The LATENT that the sampler begins with: only its size counts."),
                io.Int.Input("steps", default=20, min=1, max=10000, tooltip="As many as the sampler computes."),
                io.Float.Input(
                    "guidance",
                    default=5.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    tooltip="The sampler's cfg. With 1 each step computes one prompt, else two.",
                ),
                theme_input(),
            ],
            outputs=[
                io.String.Output(display_name="text", tooltip="The plan as plain text, for Preview Any or a file."),
                io.Image.Output(display_name="picture", tooltip="The plan as it is shown, for Save Image."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, **_inputs: Any) -> float:  # what is free changes, the inputs do not
        return time.time()

    @classmethod
    def execute(
        cls, model: Any, latent: dict[str, Any], steps: int = 20, guidance: float = 5.0, theme: ThemeName = "dark"
    ) -> io.NodeOutput:
        from ..fusion.estimate.picture import draw  # noqa: PLC0415 - the server starts without it
        from ..fusion.estimate.plan import estimate  # noqa: PLC0415
        from ..fusion.estimate.words import as_text  # noqa: PLC0415

        samples = latent["samples"]
        if samples.is_nested:  # of several kinds, a film and its sound: the first says most
            samples = samples.unbind()[0]
        found = estimate(model, samples.shape, steps, guidance)
        picture, text = draw(found, theme), as_text(found)
        return io.NodeOutput(text, as_image(picture), ui=shown(picture, text, cls))
