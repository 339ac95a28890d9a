"""The style nodes: a network that gives pictures another look, and pictures through it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import folder_paths
from comfy_api.latest import io

from . import choices, files, notices
from .loaders import CATEGORY

if TYPE_CHECKING:
    from ..fusion import Mode, Precision

StyleType = io.Custom("FUSESTREAM_STYLE")
FOLDER = "style_models"
SUFFIXES = (".safetensors", ".pth", ".pt")
EXAMPLE = "ink and wash (example)"  # the file that the pack brings along
NONE = "none"


def listed() -> list[str]:
    return [name for name in folder_paths.get_filename_list(FOLDER) if name.lower().endswith(SUFFIXES)]


def path_of(name: str) -> str:
    """Where the file of this name is. Raises `FileNotFoundError` as stock does."""
    from ..fusion.networks.style import load  # noqa: PLC0415 - the server starts without it

    if name == EXAMPLE:
        return str(load.EXAMPLES / load.EXAMPLE)
    path: str = folder_paths.get_full_path_or_raise(FOLDER, name)
    return path


class LoadStyleModel(io.ComfyNode):
    """Of a transformer net, or an AdaIN decoder with its VGG."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        names = listed()
        return io.Schema(
            node_id="FuseStreamLoadStyleModel",
            display_name="FuseStream Load Style Model",
            category=CATEGORY,
            description="Loads a network that gives pictures another look in one pass: a transformer net, which has one look of "
            "its own, or an AdaIN net, which takes it from a picture. Not for Flux' style models: those are ComfyUI's.",
            search_aliases=["style transfer", "fast neural style", "adain", "johnson", "fusestream"],
            inputs=[
                io.Combo.Input(
                    "style_name",
                    options=[EXAMPLE, *names],
                    tooltip="From models/style_models: a net of PyTorch's fast_neural_style, or an AdaIN decoder, as .safetensors "
                    "or .pth, of which weights alone are read. The example comes with FuseStream.",
                ),
                io.Combo.Input(
                    "encoder_name",
                    options=[NONE, *names],
                    default=NONE,
                    optional=True,
                    tooltip="Of an AdaIN decoder: the VGG that it was trained with, vgg_normalised.pth. Transformer nets need "
                    "none.",
                ),
                choices.kernels(
                    "auto: each operation by FuseStream's kernel or torch's own, whichever is faster on your card. on: "
                    "FuseStream's, or an error: nets with taps of 9x9 need auto. off: torch's.",
                ),
                choices.precision("fast lets convolutions add in FP16, for GeForce cards. turbo: as fast."),
            ],
            outputs=[StyleType.Output(display_name="style", tooltip="The network, for FuseStream Apply Style.")],
        )

    @classmethod
    def fingerprint_inputs(cls, style_name: str, encoder_name: str = NONE, **_: Any) -> str:
        """Another one once a file was replaced."""
        names = [name for name in (style_name, encoder_name) if name not in (EXAMPLE, NONE)]
        found = (folder_paths.get_full_path(FOLDER, name) for name in names)
        return " ".join(files.state(path) for path in found if path is not None)

    @classmethod
    def execute(
        cls, style_name: str, encoder_name: str = NONE, kernels: Mode = "auto", precision: Precision = "precise"
    ) -> io.NodeOutput:
        from .. import fusion  # noqa: PLC0415
        from ..fusion.networks.style import load  # noqa: PLC0415

        notices.attach()
        encoder = None if encoder_name == NONE else path_of(encoder_name)
        policy = fusion.KernelPolicy.of(kernels, precision=precision)
        return io.NodeOutput(load.load(path_of(style_name), encoder, policy))


class ApplyStyle(io.ComfyNode):
    """Pictures in another look."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FuseStreamApplyStyle",
            display_name="FuseStream Apply Style",
            category=CATEGORY,
            description="Gives each picture of a batch another look: pictures, or the frames of a video. Pictures that are too "
            "large for the memory go in bands, with the same result.",
            search_aliases=["style transfer", "stylize", "fast neural style", "fusestream"],
            inputs=[
                StyleType.Input("style", tooltip="From FuseStream Load Style Model."),
                io.Image.Input(
                    "image", tooltip="The pictures, of 16 x 16 pixels or more; the frames of a video in order."
                ),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    optional=True,
                    tooltip="How much of the look. 0: the picture as it is. 1: all of it.",
                ),
                io.Boolean.Input(
                    "keep_colours",
                    default=False,
                    optional=True,
                    tooltip="Takes the look's light and shade, and leaves the picture its own colours.",
                ),
                io.Float.Input(
                    "smooth",
                    default=0.0,
                    min=0.0,
                    max=0.95,
                    step=0.05,
                    optional=True,
                    tooltip="For videos: how much a frame keeps of the one before, where nothing moves. Against flicker; 0: off.",
                ),
                io.Image.Input(
                    "style_image",
                    optional=True,
                    tooltip="For AdaIN nets: a picture of the look. Of several the look is the mean.",
                ),
                io.Int.Input(
                    "band_rows",
                    default=0,
                    min=0,
                    max=16384,
                    step=8,
                    optional=True,
                    advanced=True,
                    tooltip="Rows of a picture that are computed at a time, at least 32. 0: the whole picture where it fits, else "
                    "as many as fit. Fewer need less memory and some work twice.",
                ),
            ],
            outputs=[io.Image.Output(tooltip="The pictures in that look, of the same size.")],
        )

    @classmethod
    def execute(
        cls,
        style: Any,
        image: Any,
        strength: float = 1.0,
        keep_colours: bool = False,
        smooth: float = 0.0,
        style_image: Any = None,
        band_rows: int = 0,
    ) -> io.NodeOutput:
        from ..fusion.networks.style.apply import Settings, apply  # noqa: PLC0415

        settings = Settings(strength, keep_colours, smooth, band_rows or None)
        return io.NodeOutput(apply(style, image, style_image, settings))
