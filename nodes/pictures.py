"""The nodes for networks that take pictures: Load Style Model, Apply Style, and Fuse for networks of other loaders."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import folder_paths
from comfy_api.latest import io, ui

from . import declare, files
from .declare import Node, declared
from .page import between_prompts

if TYPE_CHECKING:
    from ..fusion import Mode, Precision

StyleType = io.Custom("FUSESTREAM_STYLE")
Depth = io.Custom("DA3_MODEL")  # what stock calls Depth Anything 3's MODEL
NETWORK = io.MatchType.Template("network", [io.UpscaleModel, io.BackgroundRemoval, io.Model, Depth])
FOLDER = "style_models"
SUFFIXES = (".safetensors", ".pth", ".pt")
EXAMPLE = "ink and wash (example)"  # the file that the pack brings along
NONE = "none"
PRECISION = "fast lets convolutions add in FP16, for GeForce cards. turbo: as fast."


def attach() -> None:
    """What was captured of networks is given back after each prompt where ComfyUI would not ask for it. Called once."""
    between_prompts.always(_give_back)


def _give_back() -> None:
    giving_back = sys.modules.get(f"{(__package__ or '').rpartition('.')[0]}.fusion.networks.giving_back")
    if giving_back is not None:  # something was fused
        giving_back.after_prompt()


def listed() -> list[str]:
    """The style models that the user has."""
    return [name for name in folder_paths.get_filename_list(FOLDER) if name.lower().endswith(SUFFIXES)]


def path_of(name: str) -> str:
    """Where the style model of this name is. Raises `FileNotFoundError` as stock does."""
    from ..fusion.networks.style import load  # noqa: PLC0415 - the server starts without it

    if name == EXAMPLE:
        return str(load.EXAMPLES / load.EXAMPLE)
    path: str = folder_paths.get_full_path_or_raise(FOLDER, name)
    return path


class LoadStyleModel(Node):
    """Of a transformer net, or an AdaIN decoder with its VGG."""

    @dataclass(frozen=True)
    class Inputs:
        style_name: str = declared(
            io.Combo,
            options=lambda: [EXAMPLE, *listed()],
            tooltip="From models/style_models: a net of PyTorch's fast_neural_style, or an AdaIN decoder, as .safetensors "
            "or .pth, of which weights alone are read. The example comes with FuseStream.",
        )
        encoder_name: str = declared(
            io.Combo,
            options=lambda: [NONE, *listed()],
            default=NONE,
            optional=True,
            tooltip="Of an AdaIN decoder: the VGG that it was trained with, vgg_normalised.pth. Transformer nets need "
            "none.",
        )
        kernels: Mode = declare.kernels(
            "auto: each operation by FuseStream's kernel or torch's own, whichever is faster on your card. on: "
            "FuseStream's, or an error: nets with taps of 9x9 need auto. off: torch's.",
        )
        precision: Precision = declare.precision(PRECISION)

    @classmethod
    def define_schema(cls) -> io.Schema:
        return cls.schema(
            "Load Style Model",
            "Loads a network that gives pictures another look in one pass: a transformer net, which has one look of "
            "its own, or an AdaIN net, which takes it from a picture. Not for Flux' style models: those are ComfyUI's.",
            aliases=["style transfer", "fast neural style", "adain", "johnson"],
            outputs=[StyleType.Output(display_name="style", tooltip="The network, for FuseStream Apply Style.")],
        )

    @classmethod
    def fingerprint_inputs(cls, style_name: str, encoder_name: str = NONE, **_: Any) -> str:
        """Another one once a file was replaced."""
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

    @dataclass(frozen=True)
    class Inputs:
        style: Any = declared(StyleType, tooltip="From FuseStream Load Style Model.")
        image: Any = declared(
            io.Image, tooltip="The pictures, of 16 x 16 pixels or more; the frames of a video in order."
        )
        strength: float = declared(
            io.Float,
            default=1.0,
            min=0.0,
            max=1.0,
            step=0.05,
            optional=True,
            tooltip="How much of the look. 0: the picture as it is. 1: all of it.",
        )
        keep_colours: bool = declared(
            io.Boolean,
            default=False,
            optional=True,
            tooltip="Takes the look's light and shade, and leaves the picture its own colours.",
        )
        smooth: float = declared(
            io.Float,
            default=0.0,
            min=0.0,
            max=0.95,
            step=0.05,
            optional=True,
            tooltip="For videos: how much a frame keeps of the one before, where nothing moves. Against flicker; 0: off.",
        )
        style_image: Any = declared(
            io.Image,
            optional=True,
            tooltip="For AdaIN nets: a picture of the look. Of several the look is the mean.",
        )
        band_rows: int = declared(
            io.Int,
            default=0,
            min=0,
            max=16384,
            step=8,
            optional=True,
            advanced=True,
            tooltip="Rows of a picture that are computed at a time, at least 32. 0: the whole picture where it fits, else "
            "as many as fit. Fewer need less memory and some work twice.",
        )

    @classmethod
    def define_schema(cls) -> io.Schema:
        return cls.schema(
            "Apply Style",
            "Gives each picture of a batch another look: pictures, or the frames of a video. Pictures that are too "
            "large for the memory go in bands, with the same result.",
            aliases=["style transfer", "stylize", "fast neural style"],
            outputs=[io.Image.Output(tooltip="The pictures in that look, of the same size.")],
        )

    @classmethod
    def run(cls, inputs: Inputs) -> io.NodeOutput:
        from ..fusion.networks.style.apply import Settings, apply  # noqa: PLC0415

        settings = Settings(inputs.strength, inputs.keep_colours, inputs.smooth, inputs.band_rows or None)
        return io.NodeOutput(apply(inputs.style, inputs.image, inputs.style_image, settings))


class FuseNode(Node):
    """Of an upscale model, a background remover, a detector or a depth model: what goes in is what comes out."""

    @dataclass(frozen=True)
    class Inputs:
        upscale_model: Any = declared(
            io.MatchType,
            template=NETWORK,
            display_name="model",
            tooltip="From Load Upscale Model, Load Background Removal Model, Load Diffusion Model (RT-DETR) or Load Depth "
            "Anything 3.",
        )
        kernels: Mode = declare.kernels(
            "auto: each layer by FuseStream's kernel or torch's own, whichever is faster on your card. on: FuseStream's, "
            "or an error. off: torch's.",
        )
        precision: Precision = declare.precision(PRECISION)

    @classmethod
    def define_schema(cls) -> io.Schema:
        return cls.schema(
            "Fuse",
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

    @classmethod
    def run(cls, inputs: Inputs) -> io.NodeOutput:
        from ..fusion.networks import picture_nets  # noqa: PLC0415

        fused, table = picture_nets.fused(inputs.upscale_model, declare.policy_of(inputs))
        return io.NodeOutput(fused, str(table), ui=ui.PreviewText(str(table)))
