"""The loaders. Each takes the place of a stock loader and hands out the same stock object.

Workflows store a node's widgets by position: inputs are appended, never reordered.

`fusion` is imported by the first node that runs: the server starts without waiting for the kernels' ops to be registered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import folder_paths
from comfy_api.latest import io

from ..fusion.base.family import Role
from ..fusion.base.vram_budget import AUTO
from . import (
    choices,
    files,
    gains,
    meter,
    moving_preview,
    notices,
    progress_text,
    small_vaes,
    step_times,
    user_settings,
)

if TYPE_CHECKING:
    from ..fusion import Mode, Precision

CATEGORY = "FuseStream"
QUALITY = (
    "auto computes as the file is stored: INT8 files multiply in INT8, as ComfyUI does, where the card gains by it, and attention "
    "adds in FP32; every other file as Exact, fp8 as the card allows. Exact and Balanced unpack INT8 files. "
    "Exact adds in FP32, Balanced in FP16, which GeForce cards do twice as fast, Fastest also multiplies in 8 bits. Error of one "
    f"model call beside FP32 (Exact is precise, Balanced fast, Fastest turbo): {gains.ERRORS}. Predicted, not measured, times as "
    f"fast as Exact with Balanced and Fastest, for {gains.WORK}: {'; '.join(map(str, gains.TIERS))}. FuseStream Plan reckons it "
    "for your card. by precision: what the input precision says. A FuseStream Kernels node behind this loader wins."
)


class DiffusionModelLoader(io.ComfyNode):
    """Load Diffusion Model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FuseStreamDiffusionModelLoader",
            display_name="FuseStream Diffusion Model Loader",
            category=CATEGORY,
            description="Loads a diffusion model whose weights stream: "
            f"{choices.fused(Role.DIFFUSION)} with fused kernels, every other that ComfyUI knows with ComfyUI's operations. "
            "Use it in place of Load Diffusion Model; everything after it stays as it is.",
            search_aliases=["wan", "flux", "unet loader", "load diffusion model", "fusestream"],
            hidden=[io.Hidden.unique_id],  # where the live meter is drawn
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=files.listed(Role.DIFFUSION),
                    tooltip="A model from models/diffusion_models, for example wan2.1_t2v_1.3B_fp16.safetensors (2.8 GB). GGUF "
                    "files too, those in the folders of packs for them as well; of a model in several the first.",
                ),
                choices.kernels(
                    "auto: each operation by FuseStream's kernel or torch's own, whichever is faster on your card; "
                    "found out while it computes. on: FuseStream's, or an error. off: as without FuseStream.",
                    is_advanced=True,
                ),
                choices.precision(
                    "Asked where quality is 'by precision'. "
                    "fast lets FuseStream's attention and products add in FP16, which GeForce cards do twice as fast: by "
                    f"prediction attention {gains.FAST} as fast as with precise on an {gains.PREDICTED_FOR}. The video changes a "
                    f"little. turbo also multiplies in 8 bits: attention's queries by keys, {gains.TURBO} as fast, and "
                    "all matrices. For long or large videos, which change more. precise adds in FP32. Error of one model call "
                    f"beside FP32: {gains.ERRORS}.",
                    is_advanced=True,
                ),
                choices.vram_budget(
                    "-1: this model's blocks stream from the file through the VRAM that is free beside the video, and "
                    "FuseStream computes them (H200, 8 GiB free: 1.36 times as fast as stock for 14B at 480p, and 720p runs). "
                    "Or so many GiB (1.5 do for 14B in fp16; more is faster). 0: ComfyUI's own memory management, and only the "
                    "attention is FuseStream's; not for GGUF files, which it does not read.",
                ),
                choices.quality(QUALITY),
            ],
            outputs=[io.Model.Output(tooltip="A stock MODEL, for LoRA loaders, model patches and samplers.")],
        )

    @classmethod
    def execute(
        cls,
        model_name: str,
        kernels: Mode = "auto",
        precision: Precision = "precise",
        vram_budget: float = AUTO,
        quality: str = choices.BY_PRECISION,
    ) -> io.NodeOutput:
        from .. import fusion  # noqa: PLC0415

        notices.attach()
        path = files.path_of(Role.DIFFUSION, model_name)
        policy = fusion.KernelPolicy.of(kernels, precision=choices.precision_of(quality, precision))
        user_settings.apply()
        model = fusion.load_diffusion_model(path, policy, vram_budget)
        step_times.read()
        meter.watch(model, cls.hidden)
        progress_text.watch(model, cls.hidden)
        moving_preview.watch(model)
        return io.NodeOutput(model)

    @classmethod
    def fingerprint_inputs(cls, model_name: str | None = None, **_others: Any) -> str:
        return files.fingerprint(Role.DIFFUSION, model_name)

    @classmethod
    async def validate_inputs(cls, model_name: str | None = None) -> bool | str:
        node = cls.hidden.unique_id
        fault = choices.odd_budget(node, model_name) or await files.fault(Role.DIFFUSION, "model_name", model_name)
        return fault or await files.wrong_vae(node, "model_name", model_name) or True


class TextEncoderLoader(io.ComfyNode):
    """Load CLIP."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FuseStreamTextEncoderLoader",
            display_name="FuseStream Text Encoder Loader",
            category=CATEGORY,
            description="Loads a text encoder whose weights stream: "
            f"{choices.fused(Role.TEXT)} with fused kernels, every other that ComfyUI knows with ComfyUI's operations. "
            "Use it in place of Load CLIP.",
            search_aliases=["umt5", "t5", "qwen", "clip loader", "load clip", "fusestream"],
            hidden=[io.Hidden.unique_id],
            inputs=[
                io.Combo.Input(
                    "text_encoder_name",
                    options=files.listed(Role.TEXT),
                    tooltip="A file from models/text_encoders, for example umt5_xxl_fp8_e4m3fn_scaled.safetensors (6.7 GB) or "
                    "umt5_xxl_fp16.safetensors (11.4 GB) for Wan, qwen_3_4b.safetensors (8 GB) for Flux.2 klein 4B and Z-Image. "
                    "GGUF files too: T5, UMT5, Qwen2.5 and Qwen3 as llama.cpp has them.",
                ),
                choices.kernels(
                    "auto: for an encoder that streams or is all on the card, FP16 products around FP32 sums, each by "
                    "FuseStream's kernel or torch's, whichever is faster; found out while it computes. on: "
                    "FuseStream's, or an error. off: as without FuseStream, which computes in FP32.",
                    is_advanced=True,
                ),
                choices.precision(
                    "Asked where quality is 'by precision'. precise: the error beside an FP32 file is 1.04 times ComfyUI's own "
                    "with the same FP16 file. fast: about 1.25 times, with half the arithmetic. An encoder mostly waits for its "
                    "weights: fast gains little. turbo: as fast.",
                    is_advanced=True,
                ),
                choices.vram_budget(
                    "-1: the encoder's blocks stream from the file through the VRAM that is free; RAM need not hold "
                    "the file. Or so many GiB (0.75 do for UMT5-XXL in fp16; more is faster). 0: ComfyUI's own memory "
                    "management, with the same result; not for GGUF files, which it does not read.",
                ),
                choices.text_encoder_type(
                    "Which model the prompts are for, as in Load CLIP. auto: what the file tells. Where one file serves several "
                    "models, such as T5-XXL or Qwen3 4B (flux2 for klein, lumina2 for Z-Image), an error names the types to choose "
                    "from.",
                ),
                choices.quality(
                    "auto is Exact here: ComfyUI, too, unpacks text encoders for their products, whatever the file is. "
                    "Exact keeps what rounding to FP16 would lose; Balanced and Fastest do not, for half the arithmetic. by "
                    "precision: what the input precision says.",
                ),
            ],
            outputs=[io.Clip.Output(tooltip="A stock CLIP, for CLIP Text Encode and LoRA loaders.")],
        )

    @classmethod
    def execute(
        cls,
        text_encoder_name: str,
        kernels: Mode = "auto",
        precision: Precision = "precise",
        vram_budget: float = AUTO,
        type: str = choices.ANY,
        quality: str = choices.BY_PRECISION,
    ) -> io.NodeOutput:
        from .. import fusion  # noqa: PLC0415

        notices.attach()
        path = files.path_of(Role.TEXT, text_encoder_name)
        policy = fusion.KernelPolicy.of(kernels, precision=choices.precision_of(quality, precision))
        folders = folder_paths.get_folder_paths("embeddings")
        others = choices.text_encoder_paths()
        user_settings.apply()
        clip = fusion.load_text_encoder(path, folders, policy, vram_budget, type, others=others)
        meter.watch(clip.patcher, cls.hidden)
        return io.NodeOutput(clip)

    @classmethod
    def fingerprint_inputs(cls, text_encoder_name: str | None = None, **_others: Any) -> str:
        return files.fingerprint(Role.TEXT, text_encoder_name)

    @classmethod
    async def validate_inputs(cls, text_encoder_name: str | None = None) -> bool | str:
        fault = choices.odd_budget(cls.hidden.unique_id, text_encoder_name)
        return fault or await files.fault(Role.TEXT, "text_encoder_name", text_encoder_name) or True


class VAELoader(io.ComfyNode):
    """Load VAE."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FuseStreamVAELoader",
            display_name="FuseStream VAE Loader",
            category=CATEGORY,
            description=f"Loads a VAE: {choices.fused(Role.VAE)}'s with fused kernels, every other as ComfyUI does. "
            "Use it in place of Load VAE.",
            search_aliases=["wan vae", "load vae", "fusestream"],
            inputs=[
                io.Combo.Input(
                    "vae_name",
                    options=files.listed(Role.VAE),
                    tooltip="A VAE from models/vae: wan_2.1_vae.safetensors (0.25 GB) for Wan 2.1 and the Wan 2.2 14B pair, "
                    "wan2.2_vae.safetensors (1.4 GB) for Wan 2.2 5B, flux2-vae.safetensors for Flux.2, ae.safetensors for Flux.1 "
                    "and Z-Image (0.34 GB each). taesd, taef1 and the like: out of models/vae_approx.",
                ),
                choices.kernels(
                    "Who computes. auto: FuseStream's kernels or torch's, whichever is faster on your card (found out "
                    "while it computes), in fp16, planned for 3 GiB of VRAM with no tiles. On an H200, 832x480x81: decoding 1.9 "
                    "times as fast as stock, encoding 1.7 times. on: FuseStream's, or an error. off: as without FuseStream.",
                    is_advanced=True,
                ),
                choices.precision(
                    "Asked where quality is 'by precision'. fast lets FuseStream's kernels add in FP16, which GeForce cards "
                    "do twice as fast. The video changes a little. turbo: as fast. precise adds in FP32.",
                    is_advanced=True,
                ),
                choices.quality(
                    "auto and Exact add in FP32. Balanced and Fastest add in FP16, which GeForce cards do twice as fast; the "
                    "video changes a little. by precision: what the input precision says.",
                ),
            ],
            outputs=[
                io.Vae.Output(tooltip="A stock VAE, for VAE Encode, VAE Decode and the Wan image-to-video nodes.")
            ],
        )

    @classmethod
    def execute(
        cls,
        vae_name: str,
        kernels: Mode = "auto",
        precision: Precision = "precise",
        quality: str = choices.BY_PRECISION,
    ) -> io.NodeOutput:
        from .. import fusion  # noqa: PLC0415

        notices.attach()
        policy = fusion.KernelPolicy.of(kernels, precision=choices.precision_of(quality, precision))
        if files.halves_of(Role.VAE, vae_name) is not None:
            return io.NodeOutput(fusion.load_vae_in_parts(vae_name, *small_vaes.read(vae_name), policy))
        path = folder_paths.get_full_path_or_raise("vae", vae_name)
        return io.NodeOutput(fusion.load_vae(path, policy))

    @classmethod
    def fingerprint_inputs(cls, vae_name: str | None = None, **_others: Any) -> str:
        return files.fingerprint(Role.VAE, vae_name)

    @classmethod
    async def validate_inputs(cls, vae_name: str | None = None) -> bool | str:
        return await files.fault(Role.VAE, "vae_name", vae_name) or True


class CheckpointLoader(io.ComfyNode):
    """Load Checkpoint."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FuseStreamCheckpointLoader",
            display_name="FuseStream Checkpoint Loader",
            category=CATEGORY,
            description="Loads a checkpoint, a diffusion model with its text encoder and its VAE in one file: weights stream, and "
            "what the other FuseStream loaders know has fused kernels. Use it in place of Load Checkpoint.",
            search_aliases=["sd15", "sdxl", "stable diffusion", "load checkpoint", "checkpoint loader", "fusestream"],
            hidden=[io.Hidden.unique_id],
            inputs=[
                io.Combo.Input(
                    "ckpt_name",
                    options=files.listed(Role.CHECKPOINT),
                    tooltip="A file from models/checkpoints, for example v1-5-pruned-emaonly-fp16.safetensors (2.1 GB) or "
                    "sd_xl_base_1.0.safetensors (6.9 GB). Only .safetensors files stream; others load as in ComfyUI.",
                ),
                choices.kernels(
                    "Of all three parts. auto: each operation by FuseStream's kernel or torch's own, whichever is faster on your "
                    "card; found out while it computes. on: FuseStream's, or an error. off: as without FuseStream.",
                    is_advanced=True,
                ),
                choices.precision(
                    "Asked where quality is 'by precision'. fast lets FuseStream's attention and products add in FP16, which "
                    "GeForce cards do twice as fast; the picture changes a little. turbo also multiplies the diffusion model's "
                    "matrices in 8 bits, for large pictures, which "
                    "change more. precise adds in FP32.",
                    is_advanced=True,
                ),
                choices.vram_budget(
                    "-1: the blocks of the diffusion model and of the text encoder stream from the file through the VRAM that is "
                    "free. Or so many GiB for each of the two; more is faster. 0: ComfyUI's own memory management; of the "
                    "diffusion model only the attention is FuseStream's then.",
                ),
                choices.quality(QUALITY),
            ],
            outputs=[
                io.Model.Output(tooltip="A stock MODEL, for LoRA loaders, model patches and samplers."),
                io.Clip.Output(tooltip="A stock CLIP, for CLIP Text Encode and LoRA loaders."),
                io.Vae.Output(tooltip="A stock VAE, for VAE Encode and VAE Decode."),
            ],
        )

    @classmethod
    def execute(
        cls,
        ckpt_name: str,
        kernels: Mode = "auto",
        precision: Precision = "precise",
        vram_budget: float = AUTO,
        quality: str = choices.BY_PRECISION,
    ) -> io.NodeOutput:
        from .. import fusion  # noqa: PLC0415

        notices.attach()
        path = files.path_of(Role.CHECKPOINT, ckpt_name)
        policy = fusion.KernelPolicy.of(kernels, precision=choices.precision_of(quality, precision))
        folders = folder_paths.get_folder_paths("embeddings")
        user_settings.apply()
        parts = fusion.load_checkpoint(path, folders, policy, vram_budget)
        step_times.read()
        progress_text.watch(parts.model, cls.hidden)
        moving_preview.watch(parts.model)
        for patcher in (parts.model, getattr(parts.clip, "patcher", None)):
            meter.watch(patcher, cls.hidden)
        return io.NodeOutput(*parts)

    @classmethod
    def fingerprint_inputs(cls, ckpt_name: str | None = None, **_others: Any) -> str:
        return files.fingerprint(Role.CHECKPOINT, ckpt_name)

    @classmethod
    async def validate_inputs(cls, ckpt_name: str | None = None) -> bool | str:
        node = cls.hidden.unique_id
        fault = choices.odd_budget(node, ckpt_name) or await files.fault(Role.CHECKPOINT, "ckpt_name", ckpt_name)
        fault = fault or await files.missing_part(node, "ckpt_name", ckpt_name)
        return fault or await files.wrong_vae(node, "ckpt_name", ckpt_name, Role.CHECKPOINT) or True
