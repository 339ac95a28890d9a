"""Diffusion models and VAEs whose sizes stock has in its code: read from the file instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from .. import vaes
from ..options import Shapes
from ..pictures import ANIMA_HEAD
from ..wan import HEAD
from .replacing import Replace, constructed_with, replacing

Tensors = Mapping[str, Any]
Config = dict[str, Any]

GUIDANCE = "distilled_guidance_layer"

# Parts that stock makes at one size, by what it calls the network.
FIXED_PARTS = {"humo": ("audio_proj.",), "animate": ("motion_encoder.", "face_encoder.")}


def read_sizes(comfy: Any, replace: Replace) -> None:
    stock = comfy.model_detection.detect_unet_config

    def detect(state_dict: Tensors, key_prefix: str, metadata: Any = None) -> Any:
        config = stock(state_dict, key_prefix, metadata=metadata)
        return config if config is None else config | sizes(state_dict, key_prefix, config)

    replace(comfy.model_detection, "detect_unet_config", detect)


def sizes(tensors: Tensors, prefix: str, config: Config) -> Config:
    """What a file says beyond stock's `config` of it."""
    model = config.get("image_model")
    if model == "chroma":
        name = f"{prefix}{GUIDANCE}"
        return {
            "hidden_dim": tensors[f"{name}.in_proj.weight"].shape[0],
            "out_dim": tensors[f"{name}.out_proj.weight"].shape[0],
            "n_layers": sum(key.startswith(f"{name}.layers.") and key.endswith(".in_layer.weight") for key in tensors),
        }
    if model == "qwen_image":
        return {
            "num_attention_heads": tensors[f"{prefix}img_in.weight"].shape[0] // HEAD,
            "joint_attention_dim": tensors[f"{prefix}txt_norm.weight"].shape[0],
        }
    if model == "anima":
        return _anima_sizes(tensors, prefix)
    if model == "lumina2" and f"{prefix}cap_pad_token" in tensors:
        heads = config["dim"] // HEAD
        return {
            "n_heads": heads,
            "n_kv_heads": heads,
            "axes_dims": [32, 48, 48],
            "axes_lens": [1536, 512, 512],
            "rope_theta": 256.0,
            "ffn_dim_multiplier": 8.0 / 3.0,
            "z_image_modulation": True,
            "time_scale": 1000.0,
            "pad_tokens_multiple": 32,
        }
    parts = tuple(f"{prefix}{part}" for part in FIXED_PARTS.get(config.get("model_type", ""), ()))
    if parts:
        return {
            "made_to": {
                name.removeprefix(prefix): tuple(tensors[name].shape) for name in tensors if name.startswith(parts)
            }
        }
    return {}


def _anima_sizes(tensors: Tensors, prefix: str) -> Config:
    block, adapter = f"{prefix}blocks.0.", f"{prefix}llm_adapter."
    (text,) = tensors[f"{adapter}norm.weight"].shape
    rank, width = tensors[f"{block}adaln_modulation_mlp.1.weight"].shape
    return {
        "num_blocks": _layers(tensors, f"{prefix}blocks."),
        "num_heads": width // HEAD,
        "crossattn_emb_channels": text,
        "adaln_lora_dim": rank,
        "adapter": {
            **dict.fromkeys(("source_dim", "target_dim", "model_dim"), text),
            "num_heads": text // ANIMA_HEAD,
            "num_layers": _layers(tensors, f"{adapter}blocks."),
        },
    }


def _layers(tensors: Tensors, prefix: str) -> int:
    return len({name[len(prefix) :].split(".")[0] for name in tensors if name.startswith(prefix)})


def match_loosely(comfy: Any, replace: Replace) -> None:
    """Tell these models apart when widths do not."""
    models = comfy.supported_models
    net = {"use_linear_in_transformer": False, "adm_in_channels": None, "use_temporal_attention": False}
    for model, config in {
        models.SD15: net,
        models.SD20: net | {"use_linear_in_transformer": True},
        models.SDXL: net | {"use_linear_in_transformer": True, "adm_in_channels": 2816},
        models.ZImage: {"image_model": "lumina2", "z_image_modulation": True},
    }.items():
        replace(model, "unet_config", config)


def make_parts_to_measure(comfy: Any, replace: Replace) -> None:
    wan = comfy.ldm.wan
    for network in (wan.model.HumoWanModel, wan.model_animate.AnimateWanModel):
        replace(network, "__init__", _to_measure(network.__init__))


def _to_measure(stock: Callable[..., None]) -> Callable[..., None]:
    """A constructor that makes the parameters named in `made_to` anew, at these shapes."""

    def construct(self: Any, *args: Any, made_to: Mapping[str, tuple[int, ...]] | None = None, **options: Any) -> None:
        stock(self, *args, **options)
        for name, shape in (made_to or {}).items():
            path, _, own = name.rpartition(".")
            module = self.get_submodule(path)
            made = getattr(module, own, None)
            if made is None or tuple(made.shape) == shape:  # None: made as it is loaded, at whatever size it has
                continue
            made.data = made.data.new_empty(shape)
            if hasattr(module, "scale"):  # StyleGAN's layers keep the square root of their fan-in
                module.scale = 1 / math.sqrt(math.prod(shape[1:]))
        encoder = getattr(self, "face_encoder", None)
        if made_to and encoder is not None:
            for norm in (encoder.norm1, encoder.norm2, encoder.norm3):
                norm.normalized_shape = made_to["face_encoder.out_proj.weight"][1:]

    return construct


def make_adapter_to_measure(comfy: Any, replace: Replace) -> None:
    module = comfy.ldm.anima.model
    stock = module.Anima.__init__

    def construct(self: Any, *args: Any, adapter: Config | None = None, **options: Any) -> None:
        with replacing() as inside:
            inside(module, "LLMAdapter", partial(module.LLMAdapter, **(adapter or {})))
            stock(self, *args, **options)

    replace(module.Anima, "__init__", construct)


# --------------------------------------------------------------------------------------------- VAEs


def read_vae_sizes(comfy: Any, replace: Replace) -> None:
    """Of the VAEs whose sizes a file tells and stock does not ask."""
    stock = comfy.sd.VAE.__init__

    def construct(self: Any, sd: Any = None, *args: Any, **options: Any) -> None:
        shape = {name: tuple(tensor.shape) for name, tensor in (sd or {}).items()}
        with replacing() as inside:
            for mark, read in VAES.items():
                if mark in shape:
                    read(comfy.ldm, shape, inside)
            stock(self, sd, *args, **options)

    replace(comfy.sd.VAE, "__init__", construct)


def _read_kl(ldm: Any, shape: Shapes, replace: Replace) -> None:
    constructed_with(replace, ldm.modules.diffusionmodules.model.Encoder, ch=shape[KL_MARK][0])


def _read_minimax_video(ldm: Any, shape: Shapes, replace: Replace) -> None:
    stages = [shape[f"encoder.down.{stage}.block.0.conv1.weight"][0] for stage in range(6)]
    module = ldm.minimax.vae
    told = {"ch": 1, "ch_mult": stages}
    constructed_with(replace, module.MiniMaxH3VideoVAE, **told)
    layers = len({name.split(".")[2] for name in shape if name.startswith("decoder.transformer_blocks.")})
    heads = shape[VIDEO_MARK][0] // vaes.minimax.HEAD
    constructed_with(replace, module.ViT3DDecoder, num_layers=layers, heads=heads)


def _read_hunyuan(ldm: Any, shape: Shapes, replace: Replace) -> None:
    stages = [shape[f"encoder.down.{stage}.block.0.conv1.conv.weight"][0] for stage in range(5)]
    module = import_module(f"{ldm.__name__}.hunyuan_video.vae_refiner")  # which stock imports at its first use
    for half in (module.Encoder, module.Decoder):
        constructed_with(replace, half, block_out_channels=stages)


def _read_minimax_audio(ldm: Any, shape: Shapes, replace: Replace) -> None:
    constructed_with(
        replace,
        ldm.minimax.audio_vae.MiniMaxH3AudioVAE,
        encoder_dim=shape["encoder.block.0.weight"][0],
        latent_dim=shape["dec_in_proj.weight"][0],
        decoder_dim=shape["decoder.conv_pre.weight"][0],
    )


KL_MARK, VIDEO_MARK = "encoder.conv_in.weight", "decoder.transformer_blocks.0.scale1"
HUNYUAN_MARK = "decoder.up.0.upsample.conv.conv.weight"
VAES: Mapping[str, Callable[[Any, Shapes, Replace], None]] = {
    KL_MARK: _read_kl,
    VIDEO_MARK: _read_minimax_video,
    HUNYUAN_MARK: _read_hunyuan,
    "pre_block.attn.zero_k_bias": _read_minimax_audio,
}
