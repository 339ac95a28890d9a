"""The table of the kinds of files: where a file belongs, what is in it, how it is stored, and what
stands in its metadata.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from . import lora, pictures, spellings, spiece, tekken, text, vaes, video, wan
from .storage import CAST, PLAIN, KeptWide, Plain, Scaled, Storage
from .weights import Table

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """One sort of checkpoint file.

    folder    the one under ComfyUI's `models` where such a file belongs
    family    whose numbers it has: kinds of one family agree in the tensors that they share
    make      the function that makes its table, and `size`, what to give it
    narrow    whether stock loads it only while `narrow.opened(comfy)` is open
    finish    what becomes of the tensors before they are written
    """

    folder: str
    family: str
    make: Callable[[Any], Table]
    size: Any
    storages: Mapping[str, Storage] = field(default_factory=lambda: CAST)
    metadata: Mapping[str, str] = field(default_factory=dict)
    narrow: bool = False
    finish: Callable[[Tensors], Tensors] | None = None

    @cached_property
    def table(self) -> Table:
        """Name -> shape and numbers of every tensor."""
        return self.make(self.size)


def _in_wan_block(layer: str) -> bool:
    """Whether a layer is one of the blocks', which careful fp8 files shrink alone."""
    return layer.startswith(("blocks.", "vace_blocks."))


WAN_STORAGES: dict[str, Storage] = CAST | {
    # wan2.2_*_fp8_scaled.safetensors of Comfy-Org: every Linear, with scales for the inputs too. Of
    # these stock tells two kinds apart: it drops a scale of 1.
    "fp8_scaled": Scaled(marker=0, input_scale=lambda layer: 1 / 64 if _in_wan_block(layer) else 1.0),
    # *_fp8_e4m3fn_scaled_KJ.safetensors of Kijai: the blocks' Linears only, all else in fp32
    "fp8_scaled_blocks": Scaled(marker=2, shape=(1,), rest=torch.float32, chosen=_in_wan_block),
    # the Wan files Comfy-Org publishes since the notes exist: one Linear of each block stays wide
    "fp8_comfy_quant": Scaled(chosen=lambda layer: _in_wan_block(layer) and not layer.endswith("cross_attn.o")),
    # the same by the letter of ComfyUI's QUANTIZATION.md
    "fp8_metadata": Scaled(in_metadata=True, chosen=_in_wan_block),
}
# t5xxl_fp8_e4m3fn_scaled.safetensors and its like: embedding, norms and relative biases stay in
# fp16
T5_STORAGES: dict[str, Storage] = CAST | {"fp8_scaled": Scaled(marker=0)}
TEXT_STORAGES: dict[str, Storage] = T5_STORAGES | {"fp8_comfy_quant": Scaled()}
# Published files have both ends, the timestep and the angles in fp32, whatever the rest is in.
MINIMAX_WIDE = (
    *("video_patch_proj.", "audio_patch_proj.", "time_embedder.", "adaln_t_table", "rope."),
    *("final_layer.video_out.", "final_layer.audio_out."),
)
MINIMAX_STORAGES: dict[str, Storage] = {
    name: KeptWide(storage, MINIMAX_WIDE)
    for name, storage in (PLAIN | {"fp8_e4m3fn": Plain(torch.bfloat16, torch.float8_e4m3fn)}).items()
}

# Without a vision tower, and without a tokenizer inside.
DECODERS = {
    "qwen3": text.QWEN3,
    "qwen3_06b": text.QWEN3_06B,
    "qwen3_8b": text.QWEN3_8B,
    "qwen25": text.QWEN25,
    "llama3": text.LLAMA3,
}


def _with_tokenizer(special: Mapping[str, int], tensors: Tensors) -> Tensors:
    return tensors | {"spiece_model": spiece.spiece_tensor(**special)}


def _with_tekken(tensors: Tensors) -> Tensors:
    return tensors | {"tekken_model": tekken.tekken_tensor()}


def _catalogue() -> dict[str, Kind]:
    diffusion, encoder = partial(Kind, "diffusion_models"), partial(Kind, "text_encoders")
    kinds = {
        name: diffusion("wan", wan.table, size, WAN_STORAGES, wan.metadata(size)) for name, size in wan.SIZES.items()
    }
    few = {name: WAN_STORAGES[name] for name in ("fp16", "fp8_scaled_blocks")}
    kinds |= {name: diffusion("wan", wan.table, size, few, wan.metadata(size)) for name, size in wan.SPARSE.items()}
    for name, relative in wan.RELATIVES.items():
        narrow = name in ("wan_humo", "wan_animate")
        kinds[name] = diffusion("wan", wan.relative_table, relative, metadata=wan.metadata(relative), narrow=narrow)
    for name, ltx in video.LTX.items():
        kinds[name] = diffusion(name, video.ltx, ltx, metadata=video.ltx_metadata(ltx))
    for name, flux in pictures.FLUX.items():
        kinds[name] = diffusion(name, pictures.flux, flux, narrow=name == "chroma")
    kinds["z_image"] = diffusion("z_image", pictures.z_image, pictures.Z_IMAGE, narrow=True)
    kinds["qwen_image"] = diffusion("qwen_image", pictures.qwen_image, pictures.QWEN_IMAGE, narrow=True)
    kinds["krea2"] = diffusion("krea2", pictures.krea, pictures.KREA)
    kinds["anima"] = diffusion("anima", pictures.anima, pictures.ANIMA, narrow=True)
    kinds["hunyuan_video_15"] = diffusion("hunyuan_video_15", video.hunyuan_video, video.HUNYUAN_VIDEO)
    for name, minimax in video.MINIMAX.items():
        kinds[name] = diffusion(name, video.minimax, minimax, MINIMAX_STORAGES)
    kinds["sd3"] = diffusion("sd3", pictures.sd3, pictures.SD3)
    for name, unet in pictures.UNETS.items():
        kinds[name] = diffusion(name, pictures.unet, unet, narrow=name != "sd15_wide")

    kinds["umt5"] = encoder("umt5", text.umt5, text.UMT5, TEXT_STORAGES, finish=partial(_with_tokenizer, {}))
    for name, language in DECODERS.items():
        kinds[name] = encoder(name, text.llama, language, TEXT_STORAGES)
    gemma = partial(_with_tokenizer, spiece.GEMMA)
    for name, language in {"gemma2": text.GEMMA2, "gemma3_4b": text.GEMMA3_4B}.items():
        kinds[name] = encoder(name, text.llama, language, TEXT_STORAGES, finish=gemma)
    for name, language in {"mistral3": text.MISTRAL3, "ministral3": text.MINISTRAL3}.items():
        kinds[name] = encoder(name, text.llama, language, TEXT_STORAGES, narrow=True, finish=_with_tekken)
    kinds["qwen3_vl"] = encoder("qwen3_vl", text.qwen3_vl, text.QWEN3_VL, TEXT_STORAGES)
    kinds["krea2_te"] = encoder("krea2_te", text.qwen3_vl, text.KREA2_TE, TEXT_STORAGES, narrow=True)
    kinds["qwen25_vl"] = encoder("qwen25_vl", text.qwen25_vl, text.QWEN25_VL, TEXT_STORAGES, narrow=True)
    kinds["gemma3"] = encoder("gemma3", text.gemma3, text.GEMMA3, TEXT_STORAGES, narrow=True, finish=gemma)
    minimax_text = partial(encoder, "minimax_h3_te", text.minimax_h3_te, text.MINIMAX_H3_TE)
    kinds["minimax_h3_te"] = minimax_text(TEXT_STORAGES, narrow=True)
    kinds["clip_l"] = encoder("clip_l", text.clip, text.CLIP_WIDTH)
    clip_g = partial(text.clip, ffn=text.CLIP_G_FFN, layers=text.CLIP_G_LAYERS)
    kinds["clip_g"] = encoder("clip_g", clip_g, text.CLIP_WIDTH)
    kinds["t5xxl"] = encoder("t5xxl", text.t5xxl, text.T5XXL, T5_STORAGES)
    # The second file of two.
    kinds["byt5"] = encoder("byt5", text.t5xxl, text.BYT5, PLAIN)
    projection = partial(encoder, "ltx23_text_projection", video.ltx_text_projection)
    kinds["ltx23_text_projection"] = projection(video.LTX["ltx23"], PLAIN, narrow=True)
    kinds["ltx23_checkpoint"] = Kind(
        "checkpoints",
        "ltx23_checkpoint",
        video.ltx_checkpoint,
        video.LTX["ltx23"],
        metadata=video.ltx_checkpoint_metadata(video.LTX["ltx23"]),
        narrow=True,
    )
    kinds["ltx23_upsampler"] = Kind(
        "latent_upscale_models",
        "ltx23_upsampler",
        vaes.ltx_upsampler,
        vaes.LATENT_WIDTH,
        PLAIN,
        {"config": json.dumps(vaes.ltx_upsampler_config(vaes.LATENT_WIDTH))},
    )
    for name, finish in {"clip_vision": None, "clip_vision_open_clip": spellings.open_clip_vision}.items():
        kinds[name] = Kind("clip_vision", "clip_vision", text.clip_vision, text.CLIP_VISION, finish=finish)

    kinds["wan_vae"] = Kind("vae", "wan_vae", vaes.wan21_vae, vaes.WAN21)
    kinds["wan22_vae"] = Kind("vae", "wan22_vae", vaes.wan22_vae, vaes.WAN22)
    for name, vae in vaes.KL_VAES.items():
        kinds[name] = Kind("vae", name, vaes.kl_vae, vae, narrow=True)
    kinds["minimax_video_vae"] = Kind("vae", "minimax_video_vae", vaes.minimax_video, vaes.MINIMAX_VIDEO, narrow=True)
    kinds["minimax_audio_vae"] = Kind(
        "vae", "minimax_audio_vae", vaes.minimax_audio, vaes.MINIMAX_AUDIO, PLAIN, narrow=True
    )
    for name, one in lora.LORAS.items():
        kinds[name] = Kind("loras", name, lora.table_of, one, PLAIN)
    return kinds


KINDS: Mapping[str, Kind] = _catalogue()

# Stock takes two of Wan's files at one size only, whatever their header says. Hollow ones of that
# size load and run; what they compute is flat.
HOLLOW: Mapping[str, tuple[Callable[[Any], Table], Any]] = {
    "clip_vision": (text.clip_vision, text.CLIP_VISION_H),
    "wan22_vae": (vaes.wan22_vae, vaes.WAN22_PUBLISHED),
}
