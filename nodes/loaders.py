"""The loaders. Each replaces a stock loader and returns the same stock object."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import folder_paths
from comfy_api.latest import io

from ..fusion.base import file_formats
from ..fusion.base.family import Role
from ..fusion.base.vram_budget import refusal
from . import declare, encoder_files, files
from .declare import About, Node, widget
from .graph import queued
from .page import meter, moving_preview, user_files

if TYPE_CHECKING:
    from ..fusion import Mode, Precision

# For loaders, which show their quality first.
kernels, precision = (partial(one, is_advanced=True) for one in (declare.kernels, declare.precision))
ANY_TYPE = "auto"  # of a text encoder: by the file
FOUND_BY = ("gguf", "low vram", "8gb", "turing", "fast", "int8")  # every loader, before other nodes
KERNELS = "auto: FuseStream's kernels or torch's, whichever is faster on your card. on: FuseStream's, or an error. off: ComfyUI's."
PRECISION = (
    "With quality 'by precision': precise is Exact, fast is Balanced, turbo is Fastest. Otherwise without effect."
)
BUDGET = "GiB of VRAM that weights may have; more is faster. -1: automatic, what is free. 0: ComfyUI's own memory management."
QUALITY = "auto: as stored. Exact: FP32 sums. Balanced, Fastest: faster, less exact. Draft: a first look. by precision: that input."


def file_of(role: Role, tooltip: str) -> Any:
    """The input that names the file, the first one of each loader."""
    return widget(tooltip, options=lambda: files.listed(role))


def further_file(name: str, tooltip: str, *, is_advanced: bool = False) -> Any:
    """An input that names a file which makes one text encoder with the first."""
    listed = partial(encoder_files.listed, name)
    return widget(tooltip, default=encoder_files.NONE, options=listed, is_advanced=is_advanced)


def types() -> list[str]:
    """The types of a text encoder: the choice by the file, and stock's own for one file and for
    two. Those for more are among them."""
    stocks = importlib.import_module("nodes")
    loaders = (stocks.CLIPLoader, stocks.DualCLIPLoader)
    return list(
        dict.fromkeys([ANY_TYPE, *(kind for one in loaders for kind in one.INPUT_TYPES()["required"]["type"][0])])
    )


class Loader(Node):
    """A node that loads a file, which its first input names."""

    ROLE: ClassVar[Role]

    @classmethod
    def fingerprint_inputs(cls, **named: Any) -> str:
        return files.fingerprint(cls.ROLE, named.get(cls.names()[0]))

    @classmethod
    async def checked(cls, name: str | None) -> bool | str:
        """The answer of `validate_inputs`, whose arguments name the inputs that it checks.

        name: of the file; None: it comes from a link.
        """
        node, first = getattr(cls.hidden, "unique_id", None), cls.names()[0]
        fault = odd_budget(node, name) or await cls.fault(node, name)
        if cls.ROLE is Role.CHECKPOINT:
            fault = fault or await files.missing_part(node, first, name)
        if cls.ROLE in (Role.DIFFUSION, Role.CHECKPOINT):
            fault = fault or await files.wrong_vae(node, first, name, cls.ROLE)
        if cls.ROLE is Role.VAE:
            fault = fault or await files.wrong_model(node, name)
        return fault or True

    @classmethod
    async def fault(cls, _node: str | None, name: str | None) -> str | None:
        """The fault of the queued file, in a sentence. name: as in `checked`."""
        return await files.fault(cls.ROLE, name)

    @classmethod
    def watch(cls, model: Any) -> None:
        """Show the progress of samplings with this MODEL on this node and on the page."""
        user_files.read_step_times()
        meter.watch(model, cls.hidden)
        meter.watch_sampling(model, cls.hidden)
        moving_preview.watch(model)


def odd_budget(node: str | None, name: str | None) -> str | None:
    """Why this node's queued vram_budget is no budget, or not one for the file of this name and
    those beside it.

    ComfyUI's own check lets -0.5 and NaN pass.
    """
    budget = queued.value(node, "vram_budget")
    if not isinstance(budget, (int, float)):  # it comes from a link, or there is none
        return None
    names = [] if name is None else [name, *encoder_files.chosen(node).values()]
    refused = (f"{one} {reason}" for one in names if (reason := file_formats.refusal(one, budget)) is not None)
    return refusal(budget) or next(refused, None)


class DiffusionModelLoader(Loader):
    """Load Diffusion Model."""

    ROLE = Role.DIFFUSION
    about = About(
        "Diffusion Model Loader",
        declare.LOADERS,
        "Loads a diffusion model whose weights stream: "
        f"{declare.fused(Role.DIFFUSION)} with fused kernels, every other that ComfyUI knows with ComfyUI's operations. "
        "Use it in place of Load Diffusion Model; everything after it stays as it is.",
        aliases=["wan", "flux", "unet loader", "load diffusion model", *FOUND_BY],
        hidden=[io.Hidden.unique_id],  # where the live meter is drawn
        outputs=[io.Model.Output(tooltip="A stock MODEL, for LoRA loaders, model patches and samplers.")],
    )

    @dataclass(frozen=True)
    class Inputs:
        model_name: str = file_of(
            Role.DIFFUSION,
            "From models/diffusion_models; GGUF too. On 8 GB begin with wan2.1_t2v_1.3B_fp16.safetensors (2.8 GB).",
        )
        kernels: Mode = kernels(KERNELS)
        precision: Precision = precision(PRECISION)
        vram_budget: float = declare.vram_budget(BUDGET)
        quality: str = declare.quality(QUALITY, of_models=True)

    @classmethod
    def run(cls, inputs: Inputs) -> io.NodeOutput:
        from .. import fusion  # noqa: PLC0415 - the server starts without it

        path, policy = files.path_of(Role.DIFFUSION, inputs.model_name), declare.policy_of(inputs)
        user_files.apply()
        model = fusion.load_diffusion_model(path, policy, inputs.vram_budget)
        cls.watch(model)
        return io.NodeOutput(fusion.at_quality(model, inputs.quality))

    @classmethod
    async def validate_inputs(cls, model_name: str | None = None) -> bool | str:
        return await cls.checked(model_name)


class TextEncoderLoader(Loader):
    """Load CLIP."""

    ROLE = Role.TEXT
    about = About(
        "Text Encoder Loader",
        declare.LOADERS,
        "Loads a text encoder, of one file or of up to four, whose weights stream: "
        f"{declare.fused(Role.TEXT)} with fused kernels, every other that ComfyUI knows with ComfyUI's operations. "
        "Use it in place of Load CLIP, and of its relatives for several files.",
        aliases=[
            "umt5",
            "t5",
            "qwen",
            "clip loader",
            "load clip",
            "dualcliploader",
            "gemma",
            "ltx text encoder",
            *FOUND_BY,
        ],
        hidden=[io.Hidden.unique_id],
        outputs=[io.Clip.Output(tooltip="A stock CLIP, for CLIP Text Encode and LoRA loaders.")],
    )

    @dataclass(frozen=True)
    class Inputs:
        text_encoder_name: str = file_of(
            Role.TEXT,
            "From models/text_encoders; GGUF too. For Wan umt5_xxl_fp8_e4m3fn_scaled.safetensors (6.7 GB). Of several any one.",
        )
        kernels: Mode = kernels(KERNELS)
        precision: Precision = precision(PRECISION)
        vram_budget: float = declare.vram_budget(BUDGET)
        type: str = widget(
            "Which model the prompts are for. auto: what the files tell; where they serve several, an error names the choices.",
            default=ANY_TYPE,
            options=types,
        )
        quality: str = declare.quality(
            "auto is Exact here. Balanced and Fastest round more, for half the arithmetic. by precision: what that input says."
        )
        second_file: str = further_file(
            "second_file",
            "For models that read two or more: CLIP-L beside T5-XXL for Flux.1, LTX-2's checkpoint beside Gemma 3. none: none.",
        )
        third_file: str = further_file(
            "third_file",
            "A third text encoder: SD 3.5 reads CLIP-L, CLIP-G and T5-XXL. none: there is no third.",
            is_advanced=True,
        )
        fourth_file: str = further_file(
            "fourth_file",
            "A fourth text encoder: HiDream reads CLIP-L, CLIP-G, T5-XXL and Llama 3.1. none: there is no fourth.",
            is_advanced=True,
        )

    @classmethod
    def run(cls, inputs: Inputs) -> io.NodeOutput:
        from .. import fusion  # noqa: PLC0415

        path, policy = files.path_of(Role.TEXT, inputs.text_encoder_name), declare.policy_of(inputs)
        folders, others = folder_paths.get_folder_paths("embeddings"), files.text_encoder_paths()
        further = encoder_files.paths_of((inputs.second_file, inputs.third_file, inputs.fourth_file))
        user_files.apply()
        clip = fusion.load_text_encoder(
            path, folders, policy, inputs.vram_budget, inputs.type, others=others, further=further
        )
        meter.watch(clip.patcher, cls.hidden)
        return io.NodeOutput(clip)

    @classmethod
    def fingerprint_inputs(cls, **named: Any) -> str:
        return super().fingerprint_inputs(**named) + encoder_files.fingerprint(named)

    @classmethod
    async def fault(cls, node: str | None, name: str | None) -> str | None:
        path = files.where(cls.ROLE, name)
        if path is None or not encoder_files.chosen(node):
            return await super().fault(node, name)
        return files.not_in_list(cls.ROLE, str(name)) or await encoder_files.fault(node, path)

    @classmethod
    async def validate_inputs(cls, text_encoder_name: str | None = None) -> bool | str:
        return await cls.checked(text_encoder_name)


class VAELoader(Loader):
    """Load VAE."""

    ROLE = Role.VAE
    about = About(
        "VAE Loader",
        declare.LOADERS,
        f"Loads a VAE: {declare.fused(Role.VAE)}'s with fused kernels, every other as ComfyUI does. "
        "Use it in place of Load VAE.",
        aliases=["wan vae", "load vae", *FOUND_BY],
        hidden=[io.Hidden.unique_id],  # by which it finds the models of its graph
        outputs=[io.Vae.Output(tooltip="A stock VAE, for VAE Encode, VAE Decode and the Wan image-to-video nodes.")],
    )

    @dataclass(frozen=True)
    class Inputs:
        vae_name: str = file_of(
            Role.VAE,
            "From models/vae, for example wan_2.1_vae.safetensors for Wan 2.1 and Wan 2.2 14B; taesd and the like from vae_approx.",
        )
        kernels: Mode = kernels(KERNELS)
        precision: Precision = precision(PRECISION)
        quality: str = declare.quality(
            "auto and Exact add in FP32; Balanced and Fastest in FP16, faster on GeForce cards. by precision: what that input says."
        )

    @classmethod
    def run(cls, inputs: Inputs) -> io.NodeOutput:
        from .. import fusion  # noqa: PLC0415

        name, policy = inputs.vae_name, declare.policy_of(inputs)
        if files.halves_of(Role.VAE, name) is not None:
            return io.NodeOutput(fusion.load_vae_in_parts(name, *files.read_halves(name), policy))
        return io.NodeOutput(fusion.load_vae(folder_paths.get_full_path_or_raise("vae", name), policy))

    @classmethod
    async def validate_inputs(cls, vae_name: str | None = None) -> bool | str:
        return await cls.checked(vae_name)


class CheckpointLoader(Loader):
    """Load Checkpoint."""

    ROLE = Role.CHECKPOINT
    about = About(
        "Checkpoint Loader",
        declare.LOADERS,
        "Loads a checkpoint, a diffusion model with its text encoder and its VAE in one file: weights stream, and "
        "what the other FuseStream loaders know has fused kernels. Use it in place of Load Checkpoint.",
        aliases=["sd15", "sdxl", "stable diffusion", "load checkpoint", "checkpoint loader", *FOUND_BY],
        hidden=[io.Hidden.unique_id],
        outputs=[
            io.Model.Output(tooltip="A stock MODEL, for LoRA loaders, model patches and samplers."),
            io.Clip.Output(tooltip="A stock CLIP, for CLIP Text Encode and LoRA loaders."),
            io.Vae.Output(tooltip="A stock VAE, for VAE Encode and VAE Decode."),
        ],
    )

    @dataclass(frozen=True)
    class Inputs:
        ckpt_name: str = file_of(
            Role.CHECKPOINT,
            "From models/checkpoints, for example sd_xl_base_1.0.safetensors (6.9 GB). Only .safetensors files stream.",
        )
        kernels: Mode = kernels(KERNELS)
        precision: Precision = precision(PRECISION)
        vram_budget: float = declare.vram_budget(BUDGET)
        quality: str = declare.quality(QUALITY, of_models=True)

    @classmethod
    def run(cls, inputs: Inputs) -> io.NodeOutput:
        from .. import fusion  # noqa: PLC0415

        path, policy = files.path_of(Role.CHECKPOINT, inputs.ckpt_name), declare.policy_of(inputs)
        folders = folder_paths.get_folder_paths("embeddings")
        user_files.apply()
        parts = fusion.load_checkpoint(path, folders, policy, inputs.vram_budget)
        cls.watch(parts.model)
        meter.watch(getattr(parts.clip, "patcher", None), cls.hidden)
        return io.NodeOutput(*parts._replace(model=fusion.at_quality(parts.model, inputs.quality)))

    @classmethod
    async def validate_inputs(cls, ckpt_name: str | None = None) -> bool | str:
        return await cls.checked(ckpt_name)
