"""A tiny true network of each model class that ComfyUI knows, and what it is asked to paint.

    with opened(CASES["HunyuanVideo"]):
        path = write(CASES["HunyuanVideo"], folder)
        model = comfy.sd.load_diffusion_model(str(path))
    latents = once(model, CASES["HunyuanVideo"])

The networks are stock's own classes at small sizes with seeded weights. What stock fixes in its code although the file would tell
is narrowed while `opened` is open: the class is recognised by stock's own rules, and `Case.net` goes over the sizes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import comfy.model_detection
import comfy.nested_tensor
import comfy.sample
import comfy.sd
import comfy.supported_models
import family_scenes
import int8_files
import pytest
import torch
from safetensors.torch import save_file
from scenes import Scene
from torch import Tensor, nn

from fusestream import checkpoints

Tensors = dict[str, Tensor]
Extras = Callable[[], Mapping[str, Any]]

# Which tensors are a block's, whatever stock calls it.
IN_A_BLOCK = re.compile(r"(^|\.)\w*(blocks?|layers?|refiner|encoders|block\d+)\.\d+\.")

# What stock multiplies itself, or of too few numbers to be stored in eight bits: modulations, and where an expert is chosen.
NO_PRODUCT = re.compile(r"(?<!language_)mod|adaLN|(moe|ff_i)\.gate\.|embed")


class Case(NamedTuple):
    """A tiny model of a class.

    kind     of `checkpoints`, where there is one
    net      else the sizes of the network, as stock's constructor takes them
    latents  shapes: two of them where there is sound
    prompt   tokens and width
    extras   what goes with the prompt
    family   one of ours computes the network
    matched  what the class is recognised by where stock's own is too wide
    told     stock's detection needs a width that is too wide: all of `net` goes over what it finds
    parts    networks within this one, and what goes over the sizes that stock makes them at
    beside   tensors of the file beside the network, and their shapes
    prefix   of the network's names in the published files
    also     names of matrices outside of blocks that are much of a tiny model
    settings in the file's metadata
    alone    why there is no file of integers of it here
    """

    kind: str = ""
    net: Mapping[str, Any] = {}
    latents: tuple[tuple[int, ...], ...] = ((1, 16, 8, 8),)
    prompt: tuple[int, int] = (12, 256)
    extras: Extras = dict
    family: bool = False
    matched: Mapping[str, Any] = {}
    told: bool = False
    parts: Mapping[str, Mapping[str, Any]] = {}
    beside: Mapping[str, tuple[int, ...]] = {}
    prefix: str = ""
    also: str = ""
    settings: Mapping[str, Any] = {}
    alone: str = ""


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def masked(tokens: int = 12, **more: Any) -> Extras:
    return lambda: {"attention_mask": torch.ones(1, tokens, dtype=torch.long), **more}


def pooled(width: int, **more: Any) -> Extras:
    return lambda: {"pooled_output": noise(7, 1, width), **more}


def two_prompts() -> Mapping[str, Any]:
    mask = torch.ones(1, 12, dtype=torch.long)
    return {"attention_mask": mask, "conditioning_mt5xl": noise(8, 1, 12, 256), "attention_mask_mt5xl": mask}


# ------------------------------------------------------------------------------------------------------------- networks

VIDEO = ((1, 16, 2, 8, 8),)
ROPE_128 = [16, 56, 56]

MOCHI = {
    "depth": 2, "patch_size": 2, "num_heads": 2, "hidden_size_x": 256, "hidden_size_y": 256, "t5_feat_dim": 256,
    "t5_token_length": 12, "qk_norm": True, "qkv_bias": False, "out_bias": True, "in_channels": 12,
    "use_t5": True, "mlp_ratio_x": 48.0, "mlp_ratio_y": 4.0, "learn_sigma": False,
}  # fmt: skip
HUNYUAN_VIDEO = {
    "in_channels": 16, "out_channels": 16, "patch_size": [1, 2, 2], "vec_in_dim": 768, "context_in_dim": 256,
    "hidden_size": 256, "mlp_ratio": 4.0, "num_heads": 2, "depth": 2, "depth_single_blocks": 2, "axes_dim": ROPE_128,
    "theta": 256, "qkv_bias": True, "guidance_embed": True, "byt5": False, "meanflow": False,
    "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False,
}  # fmt: skip
HUNYUAN_IMAGE = HUNYUAN_VIDEO | {
    "in_channels": 64, "out_channels": 64, "patch_size": [1, 1], "vec_in_dim": None, "axes_dim": [64, 64],
    "guidance_embed": False, "byt5": False,
}  # fmt: skip
COSMOS = {
    "in_channels": 16, "out_channels": 16, "max_img_h": 240, "max_img_w": 240, "max_frames": 128, "patch_spatial": 2,
    "patch_temporal": 1, "model_channels": 256, "num_blocks": 2, "num_heads": 2, "crossattn_emb_channels": 256,
    "concat_padding_mask": True, "pos_emb_cls": "rope3d", "use_adaln_lora": True, "adaln_lora_dim": 64,
}  # fmt: skip
COSMOS_1 = COSMOS | {"affline_emb_norm": True, "extra_per_block_abs_pos_emb": True, "block_x_format": "THWBD",
                     "extra_per_block_abs_pos_emb_type": "learnable"}  # fmt: skip
COSMOS_2 = COSMOS | {"extra_per_block_abs_pos_emb": False, "pos_emb_learnable": True}
HIDREAM = {
    "attention_head_dim": 128, "axes_dims_rope": [64, 32, 32], "caption_channels": [256, 256], "max_resolution": [16, 16],
    "in_channels": 16, "llama_layers": [0, 1, 2, 3], "num_attention_heads": 2, "num_routed_experts": 4,
    "num_activated_experts": 2, "num_layers": 2, "num_single_layers": 2, "out_channels": 16, "patch_size": 2,
    "text_emb_dim": 256,
}  # fmt: skip
ACE = {
    "attention_head_dim": 128, "in_channels": 8, "inner_dim": 256, "max_height": 16, "max_position": 1024, "max_width": 1024,
    "mlp_ratio": 2.5, "num_attention_heads": 2, "num_layers": 3, "out_channels": 8, "patch_size": [16, 1],
    "rope_theta": 1000000.0, "speaker_embedding_dim": 512, "text_embedding_dim": 256, "ssl_encoder_depths": [1, 1],
    "ssl_latent_dims": [64, 64], "ssl_names": ["mert", "m-hubert"], "lyric_encoder_vocab_size": 64, "lyric_hidden_size": 256,
}  # fmt: skip
ACE_15 = {
    "hidden_size": 256, "text_hidden_dim": 256, "num_dit_layers": 2, "num_lyric_layers": 1, "num_timbre_layers": 1,
    "num_tokenizer_layers": 1, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 512, "fsq_dim": 256,
    "encoder_hidden_size": 256, "encoder_intermediate_size": 512, "encoder_num_heads": 2,
}  # fmt: skip
OMNIGEN = {
    "hidden_size": 240, "num_attention_heads": 2, "num_kv_heads": 1, "num_layers": 2, "num_refiner_layers": 1,
    "text_feat_dim": 256, "in_channels": 16, "axes_dim_rope": [40, 40, 40], "axes_lens": [256, 64, 64], "multiple_of": 256,
    "timestep_scale": 1000.0,
}  # fmt: skip
BOOGU = {
    "hidden_size": 240, "num_attention_heads": 2, "num_kv_heads": 1, "num_layers": 2, "num_refiner_layers": 1,
    "num_double_stream_layers": 2, "instruction_feat_dim": 256, "axes_lens": [256, 64, 64],
}  # fmt: skip
KANDINSKY = {
    "model_dim": 256, "time_dim": 64, "ff_dim": 512, "num_text_blocks": 1, "num_visual_blocks": 3, "axes_dims": (16, 24, 24),
    "in_text_dim": 256, "in_text_dim2": 256, "visual_embed_dim": 132,
}  # fmt: skip
LUMINA = {
    "dim": 192, "n_layers": 3, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 1, "cap_feat_dim": 256, "patch_size": 2,
    "in_channels": 16, "qk_norm": True, "axes_dims": [32, 32, 32], "axes_lens": [300, 512, 512], "rope_theta": 10000.0,
    "ffn_dim_multiplier": 4.0,
}  # fmt: skip
LTXV = {"num_layers": 3, "attention_head_dim": 8, "cross_attention_dim": 256, "caption_channels": 256}
AURA = {"dim": 256, "n_heads": 2, "n_layers": 4, "n_double_layers": 2, "global_conddim": 256, "max_seq": 64}
PIXART = {"hidden_size": 192, "num_heads": 3, "depth": 3, "caption_channels": 256, "in_channels": 4}
STABLE_AUDIO = {
    "embed_dim": 256, "depth": 3, "num_heads": 4, "io_channels": 64, "cond_token_dim": 768, "global_cond_dim": 1536,
    "project_cond_tokens": True,
}  # fmt: skip
SECONDS = {"embedder.embedding.0.weights": (128,), "embedder.embedding.1.weight": (768, 257),
           "embedder.embedding.1.bias": (768,)}  # fmt: skip
HUNYUAN_3D = {
    "in_channels": 64, "context_in_dim": 256, "hidden_size": 256, "num_heads": 4, "depth": 2, "depth_single_blocks": 2,
}  # fmt: skip
HUNYUAN_DIT = {
    "hidden_size": 256, "depth": 4, "num_heads": 4, "text_states_dim": 256, "text_states_dim_t5": 256, "text_len": 12,
    "text_len_t5": 12,
}  # fmt: skip
FLUX = {
    "in_channels": 16, "out_channels": 16, "vec_in_dim": 256, "context_in_dim": 256, "hidden_size": 256, "mlp_ratio": 4.0,
    "num_heads": 2, "depth": 2, "depth_single_blocks": 2, "axes_dim": ROPE_128, "theta": 10000, "patch_size": 2,
    "qkv_bias": True, "guidance_embed": True, "txt_ids_dims": [],
}  # fmt: skip
RADIANCE = {key: value for key, value in FLUX.items() if key != "guidance_embed"} | {
    "in_channels": 3, "out_channels": 3, "patch_size": 16, "vec_in_dim": None, "in_dim": 64, "out_dim": 256,
    "hidden_dim": 256, "n_layers": 2, "nerf_hidden_size": 64, "nerf_mlp_ratio": 4, "nerf_depth": 2, "nerf_max_freqs": 8,
    "nerf_tile_size": 512, "nerf_final_head_type": "conv", "nerf_embedder_dtype": torch.float32,
    "use_x0": False, "use_sequential_txt_ids": False,
}  # fmt: skip
PIXELDIT = {
    "num_groups": 2, "hidden_size": 192, "pixel_hidden_size": 16, "pixel_attn_hidden_size": 128, "pixel_num_groups": 2,
    "patch_depth": 4, "pixel_depth": 1, "txt_embed_dim": 256, "txt_max_length": 16,
}  # fmt: skip
COG = {
    "num_attention_heads": 4, "attention_head_dim": 64, "time_embed_dim": 64, "num_layers": 3, "text_embed_dim": 256,
    "in_channels": 16, "sample_width": 8, "sample_height": 8, "sample_frames": 5,
    "use_rotary_positional_embeddings": True, "ofs_embed_dim": None,
}  # fmt: skip
SEED = {
    "vid_dim": 64, "heads": 2, "head_dim": 64, "num_layers": 32, "norm_eps": 1e-5, "mlp_type": "swiglu", "rope_dim": 64,
    "vid_out_norm": True,
}  # fmt: skip
TRIPO = {
    "q_token_length": 64, "model_channels": 256, "cond_channels": 256, "num_blocks": 2, "num_refiner_blocks": 1,
}  # fmt: skip
PIXEL_Z = {
    "image_model": "zimage_pixel", "dim": 256, "n_layers": 3, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2,
    "cap_feat_dim": 256, "patch_size": 16, "in_channels": 3, "qk_norm": True, "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512], "rope_theta": 256.0, "ffn_dim_multiplier": 8.0 / 3.0, "z_image_modulation": True,
    "time_scale": 1000.0, "decoder_hidden_size": 64, "decoder_num_res_blocks": 2, "decoder_max_freqs": 8,
    "decoder_in_channels": 768,
}  # fmt: skip
LENS = {
    "in_channels": 128, "out_channels": 32, "num_layers": 3, "num_attention_heads": 3, "enc_hidden_dim": 256,
    "multi_layer_encoder_feature": False, "selected_layer_index": (0,),
}  # fmt: skip
JOY = {"hidden_size": 256, "num_attention_heads": 2, "text_dim": 256, "num_layers": 3, "in_channels": 16}
ERNIE = {
    "hidden_size": 256, "num_attention_heads": 2, "num_layers": 3, "ffn_hidden_size": 512, "text_in_dim": 192,
}  # fmt: skip
IDEOGRAM = {
    "num_attention_heads": 1, "attention_head_dim": 256, "num_layers": 3, "intermediate_size": 512, "adaln_dim": 64,
    "llm_features_dim": 256, "mrope_section": (24, 20, 20),
}  # fmt: skip
WAN = {"dim": 256, "ffn_dim": 512, "num_heads": 2, "num_layers": 2, "in_dim": 16, "out_dim": 16}
UNET = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 32, "num_res_blocks": [1, 1, 1],
    "channel_mult": [1, 2, 4], "transformer_depth": [0, 1, 1], "transformer_depth_middle": 1,
    "transformer_depth_output": [0, 0, 1, 1, 1, 1], "use_spatial_transformer": True, "legacy": False, "context_dim": 64,
    "use_linear_in_transformer": True, "num_heads": -1, "num_head_channels": 32,
}  # fmt: skip
OLD_UNET = UNET | {"use_linear_in_transformer": False, "num_heads": 4, "num_head_channels": -1}
VIDEO_UNET = UNET | {
    "in_channels": 8, "num_classes": "sequential", "extra_ff_mix_layer": True, "use_spatial_context": True,
    "merge_strategy": "learned_with_images", "merge_factor": 0.0, "video_kernel_size": [3, 1, 1],
    "use_temporal_resblock": True, "use_temporal_attention": True, "disable_temporal_crossattention": False,
}  # fmt: skip
MAGE = {"num_layers": 3, "num_attention_heads": 2}
HIDREAM_O1 = {
    "text_config_overrides": {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
                              "num_attention_heads": 2, "num_key_value_heads": 1},
    "vision_config_overrides": {"hidden_size": 64, "intermediate_size": 128, "depth": 1, "num_heads": 2},
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- cases

FLUX2 = ((1, 128, 4, 4),)
SAVED = "model.model."  # as stock saves a HunyuanVideo


def _cases() -> dict[str, Case]:
    found: dict[str, Case] = {
        "QwenImage": Case("qwen_image", family=True),
        "LTXAV": Case("ltx23", family=True),
        "MiniMaxH3": Case("minimax_h3", family=True),
        "HunyuanVideo15": Case("hunyuan_video_15", also=r"^(byt5_in|vision_in)\."),
        "SD3": Case("sd3"),
        "Flux": Case("flux1", family=True),
        "Flux2": Case("flux2", family=True),
        "Chroma": Case("chroma", family=True),
        "ZImage": Case("z_image", family=True),
        "SD15": Case("sd15", family=True),
        "SDXL": Case("sdxl", family=True),
        "WAN21_CausalAR_T2V": Case("wan_causal"),
        "WAN22_S2V": Case("wan_s2v", family=True),
        "WAN21_HuMo": Case(
            "wan_humo", alone="its audio_proj has one size in stock, and integers are not made to another"
        ),
        "WAN22_Animate": Case("wan_animate", family=True),
        "LTXV": Case(net=LTXV, latents=((1, 128, 2, 4, 4),), extras=masked()),
        "GenmoMochi": Case(net=MOCHI, latents=((1, 12, 2, 8, 8),), extras=masked()),
        "HunyuanVideo": Case(net=HUNYUAN_VIDEO, latents=VIDEO, extras=pooled(768, guidance=4.0), prefix=SAVED),
        "HunyuanVideoI2V": Case(
            net=HUNYUAN_VIDEO | {"in_channels": 33}, latents=VIDEO, extras=pooled(768, guidance=4.0), prefix=SAVED
        ),
        "HunyuanVideoSkyreelsI2V": Case(
            net=HUNYUAN_VIDEO | {"in_channels": 32}, latents=VIDEO, extras=pooled(768, guidance=4.0), prefix=SAVED
        ),
        "HunyuanImage21": Case(net=HUNYUAN_IMAGE, latents=((1, 64, 8, 8),), prefix=SAVED),
        "HunyuanImage21Refiner": Case(
            net=HUNYUAN_IMAGE | {"in_channels": 128, "patch_size": [1, 1, 1], "axes_dim": ROPE_128},
            latents=((1, 64, 2, 6, 6),),
            extras=lambda: {"concat_latent_image": noise(1, 1, 32, 3, 6, 6)},
            prefix=SAVED,
        ),
        "HunyuanVideo15_SR_Distilled": Case(
            net=HUNYUAN_VIDEO
            | {
                "in_channels": 98,
                "out_channels": 32,
                "patch_size": [1, 1, 1],
                "vision_in_dim": 1152,
                "vec_in_dim": None,
            }
            | {"meanflow_sum": True, "use_cond_type_embedding": True, "guidance_embed": False},
            latents=((1, 32, 2, 6, 6),),
            extras=pooled(768, guidance=4.0),
            prefix=SAVED,
            also=r"^(vision_in|txt_in)\.",
        ),
        "CosmosT2V": Case(net=COSMOS_1, latents=VIDEO),
        "CosmosI2V": Case(net=COSMOS_1 | {"in_channels": 17}, latents=VIDEO),
        "CosmosT2IPredict2": Case(net=COSMOS_2, latents=VIDEO),
        "CosmosI2VPredict2": Case(net=COSMOS_2 | {"in_channels": 17}, latents=VIDEO),
        "Anima": Case("anima"),
        "HiDream": Case(
            net=HIDREAM,
            extras=lambda: {"pooled_output": noise(7, 1, 256), "conditioning_llama3": noise(8, 1, 4, 12, 256)},
        ),
        "HiDreamO1": Case(
            net=HIDREAM_O1,
            latents=((1, 3, 128, 128),),
            extras=lambda: {"text_input_ids": torch.arange(12) + 100},
            also=r"^(x_embedder|final_layer2)\.",
        ),
        "ACEStep": Case(
            net=ACE,
            latents=((1, 8, 16, 24),),
            extras=lambda: {"conditioning_lyrics": torch.arange(8).view(1, 8)},
            parts={
                "comfy.ldm.ace.model.LyricEncoder": {"output_size": 256, "attention_heads": 2, "linear_units": 256}
                | {"num_blocks": 1}
            },
            also=r"^(lyric_proj|genre_embedder|final_layer)\b",
        ),
        "ACEStep15": Case(
            net=ACE_15, latents=((1, 64, 20),), extras=lambda: {"conditioning_lyrics": noise(8, 1, 8, 256)}
        ),
        "Omnigen2": Case(net=OMNIGEN, extras=masked()),
        "Boogu": Case(net=BOOGU, extras=masked()),
        "Kandinsky5": Case(net=KANDINSKY, latents=VIDEO, extras=pooled(256)),
        "Kandinsky5Image": Case(
            net=KANDINSKY | {"visual_embed_dim": 64},
            latents=((1, 16, 1, 8, 8),),
            extras=pooled(256),
            matched={"image_model": "kandinsky5", "model_dim": 256, "visual_embed_dim": 64},
        ),
        "Lumina2": Case(net=LUMINA, family=True, extras=masked()),
        "AuraFlow": Case(net=AURA | {"cond_seq_dim": 256}, latents=((1, 4, 8, 8),), matched={"cond_seq_dim": 256}),
        "PixArtAlpha": Case(net=PIXART, latents=((1, 4, 40, 40),), extras=lambda: {"width": 320, "height": 320}),
        "PixArtSigma": Case(net=PIXART | {"micro_condition": False}, latents=((1, 4, 40, 40),)),
        "StableAudio": Case(
            net=STABLE_AUDIO,
            latents=((1, 64, 24),),
            prompt=(12, 768),
            beside={
                f"conditioner.conditioners.{one}.{name}": shape
                for one in ("seconds_start", "seconds_total")
                for name, shape in SECONDS.items()
            },
        ),
        "StableAudio3": Case(
            net=STABLE_AUDIO
            | {"io_channels": 256, "global_cond_dim": 768, "local_add_cond_dim": 257, "global_cond_shared_embed": True}
            | {"global_cond_type": "adaLN", "timestep_features_type": "learned"},
            latents=((1, 256, 24),),
            prompt=(12, 768),
            beside={f"conditioner.conditioners.seconds_total.{name}": shape for name, shape in SECONDS.items()},
            also=r"^to_cond_embed|to_local_embed\.2|project_(in|out)\.",
        ),
        "HunyuanDiT": Case(net=HUNYUAN_DIT, latents=((1, 4, 8, 8),), extras=two_prompts, also=r"^mlp_t5\."),
        "HunyuanDiT1": Case(
            net=HUNYUAN_DIT | {"image_model": "hydit1", "size_cond": True, "use_style_cond": True},
            latents=((1, 4, 8, 8),),
            extras=two_prompts,
            also=r"^mlp_t5\.",
            told=True,
        ),
        "Hunyuan3Dv2": Case(net=HUNYUAN_3D, latents=((1, 64, 24),), prefix="model."),
        "Hunyuan3Dv2mini": Case(net=HUNYUAN_3D | {"depth": 8}, latents=((1, 64, 24),), prefix="model."),
        "Hunyuan3Dv2_1": Case(
            net={"hidden_size": 256, "num_heads": 4, "depth": 4, "context_dim": 256, "num_moe_layers": 1}
            | {"guidance_cond_proj_dim": None},
            latents=((1, 64, 24),),
        ),
        "TripoSplat": Case(net=TRIPO, latents=((1, 64, 16), (1, 1, 5))),
        "FluxInpaint": Case(net=FLUX | {"in_channels": 96}, family=True, extras=pooled(256)),
        "FluxSchnell": Case(net=FLUX | {"guidance_embed": False}, family=True, extras=pooled(256)),
        "LongCatImage": Case(
            net=FLUX | {"guidance_embed": False, "vec_in_dim": None, "context_in_dim": 3584, "txt_ids_dims": [1, 2]},
            prompt=(12, 3584),
            family=True,
        ),
        "ChromaRadiance": Case(net=RADIANCE, latents=((1, 3, 64, 64),), family=True),
        "SeedVR2": Case(
            net=SEED,
            latents=((1, 16, 2, 8, 8),),
            prompt=(12, 5120),
            extras=lambda: {"condition": noise(1, 1, 17, 2, 8, 8)},
        ),
        "PixelDiTT2I": Case(net=PIXELDIT, latents=((1, 3, 64, 64),), prefix="core.", also="pixel_blocks.*modulation"),
        "PiD": Case(
            net=PIXELDIT | {"lq_hidden_dim": 64, "lq_num_res_blocks": 1, "lq_latent_channels": 16},
            latents=((1, 3, 128, 128),),
            extras=lambda: {"lq_latent": noise(1, 1, 16, 4, 4), "degrade_sigma": torch.tensor([0.3])},
            also="pixel_blocks.*modulation",
        ),
        "MageFlow": Case(net=MAGE, latents=FLUX2, prompt=(12, 2560), also=r"^txt_in\."),
        "JoyImage": Case(net=JOY, latents=((1, 16, 1, 8, 8),)),
        "Ideogram4": Case(net=IDEOGRAM, latents=FLUX2),
        "Krea2": Case("krea2"),
        "Lens": Case(net=LENS, latents=FLUX2),
        "ErnieImage": Case(net=ERNIE, latents=FLUX2, prompt=(12, 192)),
        "CogVideoX_T2V": Case(net=COG, latents=VIDEO),
        "CogVideoX_I2V": Case(net=COG | {"in_channels": 32}, latents=VIDEO),
        "CogVideoX_Inpaint": Case(net=COG | {"in_channels": 48}, latents=VIDEO),
        "ZImagePixelSpace": Case(
            net=PIXEL_Z,
            latents=((1, 3, 64, 64),),
            extras=masked(),
            family=True,
            told=True,
        ),
    }
    return found | _wans() | _unets()


def _wans() -> dict[str, Case]:
    def wan(extras: Extras = dict, latents: tuple[tuple[int, ...], ...] = VIDEO, **net: Any) -> Case:
        return Case(net=WAN | net, latents=latents, prompt=(12, 4096), extras=extras, family=True)

    def controlled() -> Mapping[str, Any]:
        return {"vace_frames": [noise(1, 1, 32, 2, 8, 8)], "vace_mask": [torch.ones(1, 64, 2, 8, 8)]}

    def moved() -> Mapping[str, Any]:
        return {"camera_conditions": noise(1, 1, 24, 2, 64, 64)}

    def referred() -> Mapping[str, Any]:
        return {"reference_latents": [noise(1, 1, 16, 1, 8, 8)], "pose_video_latent": noise(3, 1, 16, 2, 4, 4)}

    def seen() -> Mapping[str, Any]:
        return {"clip_vision_output": SimpleNamespace(penultimate_hidden_states=noise(2, 1, 257, 1280))}

    return {
        "WAN21_T2V": wan(),
        "WAN22_T2V": wan(in_dim=48, out_dim=48, latents=((1, 48, 2, 8, 8),)),
        "WAN21_I2V": wan(seen, model_type="i2v", in_dim=36),
        "WAN21_FunControl2V": wan(seen, model_type="i2v", in_dim=48),
        "WAN21_Vace": wan(controlled, model_type="vace", vace_layers=1, vace_in_dim=96),
        "WAN21_Camera": wan(lambda: {**seen(), **moved()}, model_type="camera", in_dim=32),
        "WAN22_Camera": wan(moved, model_type="camera_2.2", in_dim=36),
        "WAN21_FlowRVS": wan(model_type="flow_rvs", in_dim=16)._replace(
            settings={"config": '{"transformer": {"model_type": "flow_rvs"}}'}
        ),
        "WAN21_SCAIL": wan(referred, model_type="scail", in_dim=20),
        "WAN21_SCAIL2": wan(referred, model_type="scail2", in_dim=20),
        "WAN22_WanDancer": wan(seen, model_type="wandancer", in_dim=36),
    }


def _unets() -> dict[str, Case]:
    def unet(name: str, sizes: Mapping[str, Any] = UNET, extras: Extras = dict, **more: Any) -> Case:
        kind = getattr(comfy.supported_models, name, comfy.supported_models.SDXL).unet_config
        labels = kind.get("adm_in_channels")
        net = {**sizes, **({"num_classes": "sequential", "adm_in_channels": labels} if labels else {}), **more}
        narrow = {key: net[key] for key in ("model_channels", "context_dim", "transformer_depth") if key in kind}
        frames = 2 if net.get("use_temporal_attention") else 1
        return Case(
            net=net,
            latents=((frames, 4, 8, 8),),
            prompt=(12, net["context_dim"]),
            extras=extras,
            family=frames == 1,
            matched=kind | narrow,
        )

    pool = pooled(1280)
    return {
        "LotusD": unet("LotusD"),
        "Stable_Zero123": unet("Stable_Zero123", OLD_UNET, in_channels=8, context_dim=768)._replace(
            prompt=(1, 772), beside={"cc_projection.weight": (768, 772), "cc_projection.bias": (768,)}
        ),
        "SD15_instructpix2pix": unet("SD15_instructpix2pix", OLD_UNET, in_channels=8),
        "SD20": unet("SD20"),
        "SD21UnclipL": unet("SD21UnclipL"),
        "SD21UnclipH": unet("SD21UnclipH"),
        "SDXL_instructpix2pix": unet("SDXL_instructpix2pix", extras=pool, in_channels=8),
        "SDXLRefiner": unet("SDXLRefiner", extras=pool),
        "SSD1B": unet("SSD1B", extras=pool),
        "KOALA_700M": unet("KOALA_700M", extras=pool),
        "KOALA_1B": unet("KOALA_1B", extras=pool),
        "Segmind_Vega": unet("Segmind_Vega", extras=pool),
        "SD_X4Upscaler": unet(
            "SD_X4Upscaler", in_channels=7, num_classes=1000, disable_self_attentions=[True, False, False]
        ),
        "SV3D_u": unet("SV3D_u", VIDEO_UNET),
        "SV3D_p": unet("SV3D_p", VIDEO_UNET),
        "SVD_img2vid": unet("SVD_img2vid", VIDEO_UNET),
    }


KNOWN = {kind.__name__ for kind in comfy.supported_models.models}  # to this ComfyUI
CASES = {name: case for name, case in _cases().items() if name in KNOWN}

# Classes of which there is no tiny network here, and why.
NO_SAMPLER = "it sees and does not paint: its nodes call the network themselves, and no sampler does"
NO_BLOCKS = "its blocks are no transformer's, so that it does not stream: it loads as stock loads it"
WITHOUT: dict[str, str] = {
    **dict.fromkeys(("RT_DETR_v4", "SAM3", "SAM31", "DepthAnything3"), NO_SAMPLER),
    **dict.fromkeys(("Stable_Cascade_C", "Stable_Cascade_B"), NO_BLOCKS),
}


# ---------------------------------------------------------------------------------------------------------------- files


@contextlib.contextmanager
def opened(name: str) -> Iterator[None]:
    """While open, stock takes the sizes of the case from it."""
    case = CASES[name]
    if case.kind:
        with checkpoints.narrow.opened(comfy):
            yield
        return
    kind = getattr(comfy.supported_models, name)
    own = dict(case.matched or kind.unet_config)
    stock = comfy.model_detection.detect_unet_config

    def detect(state_dict: Any, key_prefix: str, metadata: Any = None) -> Any:
        config = stock(state_dict, key_prefix, metadata=metadata)
        sizes = {key: value for key, value in case.net.items() if case.told or key not in own}
        return config if config is None else config | sizes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy.model_detection, "detect_unet_config", detect)
        patch.setattr(kind, "unet_config", own)
        # Stock puts these over all that it finds.
        fixed = {key: case.net.get(key, value) for key, value in kind.unet_extra_config.items()}
        patch.setattr(kind, "unet_extra_config", fixed)
        for place, given in case.parts.items():
            patch.setattr(place, functools.partial(_attribute(place), **given))
        yield


def _attribute(place: str) -> Any:
    module, _, name = place.rpartition(".")
    return getattr(importlib.import_module(module), name)


def write(name: str, folder: Path) -> Path:
    """The file of a class, in bf16. To be called while `opened(name)` is open."""
    case = CASES[name]
    if case.kind:
        return checkpoints.write(case.kind, folder, "bf16")
    path = folder / f"{name}{case.prefix}.safetensors"
    if not path.exists():
        kind = getattr(comfy.supported_models, name)
        beside = {key: _drawn(key, torch.empty(shape)) for key, shape in case.beside.items()}
        # Whatever stock reads off a file and the constructor leaves open is the file's.
        first = _network(kind, {**kind.unet_config, **case.net}, beside)
        named = {f"{case.prefix}{key}": tensor for key, tensor in first.state_dict().items()}
        whole = comfy.model_detection.unet_prefix_from_state_dict(named)
        prefix = whole if case.prefix.startswith(whole) else ""
        config = comfy.model_detection.detect_unet_config({**named, **beside}, prefix, case.settings or None)
        assert config is not None, "stock does not know this file"
        net = _network(kind, config, beside)
        tensors = {key: _drawn(key, tensor) for key, tensor in net.state_dict().items()}
        stored = {
            f"{case.prefix}{key}": (tensor.bfloat16() if tensor.is_floating_point() else tensor).contiguous()
            for key, tensor in tensors.items()
        }
        save_file({**stored, **beside}, path, dict(case.settings) or None)
    return path


def _network(kind: Any, config: Mapping[str, Any], beside: Tensors) -> nn.Module:
    made = kind(dict(config))
    made.set_inference_dtype(torch.float32, None)
    net: nn.Module = made.get_model(dict(beside), "").diffusion_model
    return net


def _drawn(name: str, like: Tensor) -> Tensor:
    if name.endswith(("inv_freq", "rope.freqs")):
        return 10000 ** (-torch.arange(len(like)) / len(like))
    made = torch.randn(like.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if like.ndim > 1:
        return made / math.sqrt(max(math.prod(like.shape[1:]), 1))
    return made * 0.05 if "bias" in name else 1 + made * 0.1


def in_integers(name: str, source: Path, folder: Path) -> tuple[Path, Path]:
    """A file with its blocks' matrices in 8 bits, and the same with what those stand for in fp16."""
    of_int8, of_halves = (folder / f"{source.stem} {form}.safetensors" for form in ("int8", "halves"))
    if not of_int8.exists():
        tensors, metadata = int8_files.read(source)

        def chosen(key: str, tensor: Tensor) -> bool:
            return tensor.shape[1] % 4 == 0 and _is_chosen(key, CASES[name])

        stored, halves = int8_files.in_integers(tensors, "convrot", chosen)
        int8_files.save(halves, of_halves, metadata)
        int8_files.save(stored, of_int8, metadata)
    return of_int8, of_halves


def in_format(name: str, source: Path, folder: Path, kind: str) -> Path:
    """The same matrices in one of stock's formats. With `_awq` behind its name inputs have scales of their own, as text encoders of
    ComfyUI's templates have them."""
    path = folder / f"{source.stem} {kind}.safetensors"
    tensors, metadata = int8_files.read(source)
    for key, tensor in list(tensors.items()):
        if tensor.ndim == 2 and not (tensor.shape[1] % 64 or tensor.shape[0] % 16) and _is_chosen(key, CASES[name]):
            layer = key.removesuffix(".weight")
            more = {"pre_quant_scale": 1 + 0.3 * _drawn(layer, tensor[0])} if kind.endswith("_awq") else {}
            tensors |= int8_files.in_format(tensor.half(), kind.removesuffix("_awq"), layer, **more)
    int8_files.save(tensors, path, metadata)
    return path


def _is_chosen(name: str, case: Case) -> bool:
    inner = name.removeprefix(case.prefix)
    if not inner.endswith(".weight"):
        return False
    if case.also and re.search(case.also, inner):
        return True
    return bool(IN_A_BLOCK.search(inner)) and not NO_PRODUCT.search(inner)


# --------------------------------------------------------------------------------------------------------------- calls


def scene(name: str) -> Scene:
    """What a sampler takes beside the model."""
    case = CASES[name]
    if case.kind in family_scenes.KINDS:
        return family_scenes.inputs(case.kind)
    latents = [torch.zeros(shape) for shape in case.latents]
    samples = latents[0] if len(latents) == 1 else comfy.nested_tensor.NestedTensor(latents)
    prompt = [[noise(101, 1, *case.prompt), dict(case.extras())]]
    return Scene(prompt, prompt, {"samples": samples})


def once(model: Any, name: str) -> Tensor:
    """What one call of the network makes of noise; of picture and sound, both in a row."""
    made = scene(name)
    latent = made.latent["samples"]
    run = ("euler", "simple", made.positive, made.negative, latent)
    found = comfy.sample.sample(model, comfy.sample.prepare_noise(latent, 1), 1, 1.0, *run, disable_pbar=True, seed=1)
    parts = family_scenes.parts(found)
    return torch.cat([part.flatten() for part in parts])
