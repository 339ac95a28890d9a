"""The nodes for networks over pictures: Load Style Model, Apply Style, and Fuse."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import folder_paths
from comfy_api.latest import io, ui

from . import declare, files
from .declare import About, Node, linked, widget
from .page import between_prompts

if TYPE_CHECKING:
    from ..fusion import Mode, Precision

StyleType = io.Custom("FUSESTREAM_STYLE")
Depth = io.Custom("DA3_MODEL")  # stock's type of Depth Anything 3's MODEL
NETWORK = io.MatchType.Template("network", [io.UpscaleModel, io.BackgroundRemoval, io.Model, Depth])
FOLDER = "style_models"
SUFFIXES = (".safetensors", ".pth", ".pt")
EXAMPLE = "ink and wash (example)"  # a file that comes with the pack
NONE = "none"
PRECISION = "fast lets convolutions add in FP16, for GeForce cards. turbo: as fast."


def attach() -> None:
    """Give captures back after each prompt, because ComfyUI would not ask for them. Called once."""
    between_prompts.always(_give_back)


def _give_back() -> None:
    giving_back = sys.modules.get(f"{(__package__ or '').rpartition('.')[0]}.fusion.networks.giving_back")
    if giving_back is not None:  # something was fused
        giving_back.after_prompt()


def listed() -> list[str]:
    """The style models that the user has."""
    return [name for name in folder_paths.get_filename_list(FOLDER) if name.lower().endswith(SUFFIXES)]


def path_of(name: str) -> str:
    """The path of the style model with this name. Raises `FileNotFoundError` as stock does."""
    from ..fusion.networks.style import load  # noqa: PLC0415 - the server starts without it

    if name == EXAMPLE:
        return str(load.EXAMPLES / load.EXAMPLE)
    path: str = folder_paths.get_full_path_or_raise(FOLDER, name)
    return path


class LoadStyleModel(Node):
    """A transformer net, or an AdaIN decoder with its VGG."""

    about = About(
        "Load Style Model",
        declare.LOADERS,
        "Loads a network that gives pictures another look in one pass: a transformer net, which has one look of "
        "its own, or an AdaIN net, which takes it from a picture. Not for Flux' style models: those are ComfyUI's.",
        aliases=["style transfer", "fast neural style", "adain", "johnson"],
        outputs=[StyleType.Output(display_name="style", tooltip="The network, for FuseStream Apply Style.")],
    )

    @dataclass(frozen=True)
    class Inputs:
        style_name: str = widget(
            "From models/style_models: a net of fast_neural_style, or an AdaIN decoder. The example comes with FuseStream.",
            options=lambda: [EXAMPLE, *listed()],
        )
        encoder_name: str = widget(
            "Of an AdaIN decoder: the VGG that it was trained with, vgg_normalised.pth. Transformer nets need none.",
            default=NONE,
            options=lambda: [NONE, *listed()],
        )
        kernels: Mode = declare.kernels(
            "auto: FuseStream's kernels or torch's, the faster. on: FuseStream's, or an error (9x9 taps need auto). off: torch's.",
        )
        precision: Precision = declare.precision(PRECISION)

    @classmethod
    def fingerprint_inputs(cls, style_name: str, encoder_name: str = NONE, **_: Any) -> str:
        """A mark that changes when a file is replaced."""
        names = [name for name in (style_name, encoder_name) if name not in (EXAMPLE, NONE)]
        found = (folder_paths.get_full_path(FOLDER, name) for name in names)
        return " ".join(files.state(path) for path in found if path is not None)

    @classmethod
    def run(cls, inputs: Inputs) -> io.NodeOutput:
        from ..fusion.networks.style import load  # noqa: PLC0415

        encoder = None if inputs.encoder_name == NONE else path_of(inputs.encoder_name)
        return io.NodeOutput(load.load(path_of(inputs.style_name), encoder, declare.policy_of(inputs)))


class ApplyStyle(Node):
    """Pictures in another look."""

    about = About(
        "Apply Style",
        declare.IMAGE,
        "Gives each picture of a batch another look: pictures, or the frames of a video. Pictures that are too "
        "large for the memory go in bands, with the same result.",
        aliases=["style transfer", "stylize", "fast neural style"],
        outputs=[io.Image.Output(tooltip="The pictures in that look, of the same size.")],
    )

    @dataclass(frozen=True)
    class Inputs:
        style: Any = linked(StyleType, "From FuseStream Load Style Model.")
        image: Any = linked(io.Image, "The pictures, of 16 x 16 pixels or more; the frames of a video in order.")
        strength: float = widget(
            "How much of the look. 0: the picture as it is. 1: all of it.", default=1.0, between=(0.0, 1.0, 0.05)
        )
        keep_colours: bool = widget(
            "Takes the look's light and shade, and leaves the picture its own colours.", default=False
        )
        smooth: float = widget(
            "For videos: how much a frame keeps of the one before, where nothing moves. Against flicker; 0: off.",
            default=0.0,
            between=(0.0, 0.95, 0.05),
        )
        style_image: Any = linked(
            io.Image, "For AdaIN nets: a picture of the look. Of several the look is the mean.", optional=True
        )
        band_rows: int = widget(
            "Rows of a picture computed at a time, at least 32. 0: as many as fit. Fewer need less memory and more work.",
            default=0,
            between=(0, 16384, 8),
            is_advanced=True,
        )

    @classmethod
    def run(cls, inputs: Inputs) -> io.NodeOutput:
        from ..fusion.networks.style.apply import Settings, apply  # noqa: PLC0415

        settings = Settings(inputs.strength, inputs.keep_colours, inputs.smooth, inputs.band_rows or None)
        return io.NodeOutput(apply(inputs.style, inputs.image, inputs.style_image, settings))


class FuseNode(Node):
    """The Fuse node, for an upscale model, a background remover, a detector or a depth model."""

    about = About(
        "Fuse",
        declare.IMAGE,
        "Computes an upscale model (ESRGAN and others of Load Upscale Model), BiRefNet, RT-DETR or Depth Anything "
        "3 by FuseStream's kernels where they serve, and says which layers those are and why others are not. What goes in "
        "stays as it is.",
        aliases=["upscale model kernels", "esrgan", "birefnet", "rt-detr", "depth anything"],
        outputs=[
            io.MatchType.Output(
                template=NETWORK,
                display_name="model",
                tooltip="A copy with these kernels, for the nodes that take the first.",
            ),
            io.String.Output(display_name="report", tooltip="What was replaced, what not, and why."),
        ],
    )

    @dataclass(frozen=True)
    class Inputs:
        upscale_model: Any = linked(
            io.MatchType,
            "From Load Upscale Model, Load Background Removal Model, Load Diffusion Model (RT-DETR) or Load Depth "
            "Anything 3.",
            template=NETWORK,
            display_name="model",
        )
        kernels: Mode = declare.kernels(
            "auto: FuseStream's kernels or torch's, whichever is faster on your card. on: FuseStream's, or an error. off: torch's.",
        )
        precision: Precision = declare.precision(PRECISION)

    @classmethod
    def run(cls, inputs: Inputs) -> io.NodeOutput:
        from ..fusion.networks import picture_nets  # noqa: PLC0415

        fused, table = picture_nets.fused(inputs.upscale_model, declare.policy_of(inputs))
        return io.NodeOutput(fused, str(table), ui=ui.PreviewText(str(table)))
