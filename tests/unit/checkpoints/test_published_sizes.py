"""The tables of names and shapes are those of the real models: at published sizes they are stock's
networks, to the letter. Stock's are built on the meta device, so 14 billion weights take no memory.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy
import comfy.clip_model
import comfy.clip_vision
import comfy.ldm.models.autoencoder
import comfy.ldm.qwen_image.model
import comfy.ldm.wan.model
import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import comfy.model_detection
import comfy.ops
import comfy.sd
import comfy.text_encoders.flux
import comfy.text_encoders.llama
import comfy.text_encoders.lt
import comfy.text_encoders.minimax
import comfy.text_encoders.t5
import comfy.text_encoders.z_image
import pytest
import torch

from fusestream.checkpoints import narrow, text, vaes, video, wan
from fusestream.checkpoints.pictures import (
    AnimaSize,
    FluxSize,
    KreaSize,
    QwenImageSize,
    Sd3Size,
    UnetSize,
    ZImageSize,
    anima,
    flux,
    krea,
    qwen_image,
    sd3,
    unet,
    z_image,
)
from fusestream.checkpoints.text import ClipVisionSize, Gemma3Size, LlamaSize, Qwen3VLSize, Qwen25VLSize, Umt5Size
from fusestream.checkpoints.wan import Relative, WanSize
from fusestream.checkpoints.weights import Table

OPS = comfy.ops.disable_weight_init
HALF = torch.float16
ROOT = Path(comfy.sd.__file__).parent

SMALL = {"dim": 1536, "ffn": 8960, "layers": 30, "text": 4096}
BIG = {"dim": 5120, "ffn": 13824, "layers": 40, "text": 4096}
SPEECH = (0, 4, 8, 12, 16, 20, 24, 27, 30, 33, 36, 39)
WAN = {
    "Wan2.1-T2V-1.3B": WanSize(**SMALL),
    "Wan2.1-T2V-14B": WanSize(**BIG),
    "Wan2.1-I2V-14B": WanSize(**BIG, channels_in=36, image=True),
    "Wan2.1-FLF2V-14B": WanSize(**BIG, channels_in=36, image=True, image_positions=514),
    "Wan2.1-VACE-1.3B": WanSize(**SMALL, vace_layers=15),
    "Wan2.1-VACE-14B": WanSize(**BIG, vace_layers=8),
    "Wan2.1-Fun-V1.1-14B-Control": WanSize(**BIG, channels_in=48, image=True, reference_channels=16),
    "Wan2.2-I2V-A14B": WanSize(**BIG, channels_in=36),
    "Wan2.2-Fun-A14B-Control": WanSize(**BIG, channels_in=52, reference_channels=16),
    "Wan2.2-TI2V-5B": WanSize(3072, 14336, 30, 4096, channels_in=48, channels_out=48),
}
RELATIVES = {
    "Wan2.1-CausalForcing-1.3B": Relative(WanSize(**SMALL), causal=True),
    "Wan2.2-S2V-14B": Relative(WanSize(**BIG), speech=1024, hears=SPEECH),
    "HuMo-17B": Relative(WanSize(**BIG, channels_in=36), humo=1280),
    "Wan2.2-Animate-14B": Relative(WanSize(**BIG, channels_in=36, image=True), face=1024),
}
LTX = {
    "LTX-2": video.LtxSize(heads=32, layers=48, caption=3840),
    "LTX-2.3": video.LtxSize(heads=32, layers=48, caption=3840, connector_layers=8, gated=True),
}
SDXL = UnetSize(320, (1, 2, 4), (0, 2, 10), residuals=2, middle=10, context=2048, labels=2816, linear=True)
H3 = video.MiniMaxSize(dim=5376, heads=56, ffn=14336, layers=50, text=5120, between=5376, time=2688)
DIFFUSION: dict[str, tuple[Table, Any]] = {
    **{name: (wan.table(size), wan.metadata(size)) for name, size in WAN.items()},
    **{name: (wan.relative_table(size), wan.metadata(size)) for name, size in RELATIVES.items()},
    **{name: (video.ltx(size), video.ltx_metadata(size)) for name, size in LTX.items()},
    "HunyuanVideo-1.5": (video.hunyuan_video(video.HunyuanVideoSize(2048, 54, 3584)), None),
    "MiniMax-H3": (video.minimax(H3), None),
    "FLUX.1-dev": (flux(FluxSize(3072, 19, 38, text=4096, pooled=768, guidance=True)), None),
    "FLUX.2-klein-4B": (flux(FluxSize(3072, 5, 20, text=7680, patch=128, shared=True)), None),
    "FLUX.2-klein-9B": (flux(FluxSize(4096, 8, 24, text=12288, patch=128, shared=True)), None),
    "Chroma1-HD": (flux(FluxSize(3072, 19, 38, text=4096, guidance_layer=5120)), None),
    "Z-Image-Turbo": (z_image(ZImageSize(3840, 30, 2560)), None),
    "Qwen-Image": (qwen_image(QwenImageSize(3072, 60, 3584)), None),
    "Krea-2": (krea(KreaSize(6144, 28, 2560, 12)), None),
    "Anima": (anima(AnimaSize(2048, 28, 1024, 256, 6)), None),
    "SD3.5-medium": (sd3(Sd3Size(layers=24, twice=13, text=4096, places=384)), None),
    "SD3.5-large": (sd3(Sd3Size(layers=38, twice=0, text=4096, places=192)), None),
    "SD1.5": (unet(UnetSize(320, (1, 2, 4, 4), (1, 1, 1, 0), residuals=2, middle=1, context=768)), None),
    "SDXL": (unet(SDXL), None),
}


def shapes(table: Table) -> dict[str, tuple[int, ...]]:
    return {name: spec.shape for name, spec in table.items()}


def shapes_of(net: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}


def weightless(table: Table) -> dict[str, torch.Tensor]:
    return {name: torch.empty(spec.shape, device="meta") for name, spec in table.items()}


@pytest.mark.deep
@pytest.mark.parametrize("name", DIFFUSION)
def test_stock_builds_the_very_network(name: str) -> None:
    """Told nothing but names and shapes; and the same while small ones are taken, too."""
    table, metadata = DIFFUSION[name]
    config = comfy.model_detection.model_config_from_unet(weightless(table), "", metadata=metadata)
    with narrow.opened(comfy):
        opened = comfy.model_detection.model_config_from_unet(weightless(table), "", metadata=metadata)
    assert type(opened) is type(config)
    assert {key: opened.unet_config[key] for key in config.unet_config} == config.unet_config

    config.set_inference_dtype(HALF, None)
    stock = config.get_model({}, device="meta")
    renamed = config.process_unet_state_dict(weightless(table))
    assert {key: tuple(it.shape) for key, it in renamed.items()} == shapes_of(stock.diffusion_model)


@pytest.mark.parametrize("name", ["Chroma1-HD", "Z-Image-Turbo", "Qwen-Image"])
def test_narrow_gives_stocks_own_numbers(name: str) -> None:
    tensors = weightless(DIFFUSION[name][0])
    config = comfy.model_detection.detect_unet_config(tensors, "")
    defaults = inspect.signature(comfy.ldm.qwen_image.model.QwenImageTransformer2DModel).parameters
    for key, value in narrow.sizes(tensors, "", config).items():
        assert value == (config[key] if key in config else defaults[key].default), key


def read(name: str) -> Any:
    return json.loads((ROOT / name).read_text(encoding="utf-8"))


def t5(config: str) -> torch.nn.Module:
    return comfy.text_encoders.t5.T5(read(f"text_encoders/{config}"), HALF, "meta", OPS)


def clip_vision() -> torch.nn.Module:
    return comfy.clip_model.CLIPVisionModelProjection(read("clip_vision_config_h.json"), HALF, "meta", OPS)


QWEN3 = LlamaSize(2560, 9728, 32, 8, head_width=128, layers=36, vocabulary=151936)
QWEN3_06B = replace(QWEN3, width=1024, ffn=3072, heads=16, layers=28)
QWEN3_8B = replace(QWEN3, width=4096, ffn=12288, own_words=True)
QWEN3_32B = replace(QWEN3, width=5120, ffn=25600, heads=64, layers=50, final_norm=False)
QWEN25 = LlamaSize(2048, 11008, 16, 2, 128, layers=36, vocabulary=151936, qk_norm=False, biased=True)
QWEN25_7B = replace(QWEN25, width=3584, ffn=18944, heads=28, key_heads=4, layers=28, vocabulary=152064)
LLAMA3 = LlamaSize(4096, 14336, 32, 8, 128, layers=32, vocabulary=128320, qk_norm=False)
MISTRAL = LlamaSize(5120, 32768, 32, 8, 128, layers=30, vocabulary=131072, qk_norm=False, final_norm=False)
MINISTRAL = replace(MISTRAL, width=3072, ffn=9216, layers=26, final_norm=True)
GEMMA = LlamaSize(2304, 9216, 8, 4, 256, layers=26, vocabulary=256000, gemma=True, qk_norm=False)
GEMMA3_4B = replace(GEMMA, width=2560, ffn=10240, layers=34, vocabulary=262208, qk_norm=True)
GEMMA3_12B = replace(GEMMA3_4B, width=3840, ffn=15360, heads=16, key_heads=8, layers=48)
VISION = {"vision": 1152, "ffn": 4304, "blocks": 27}
CUT = {"num_hidden_layers": 30, "final_norm": False}  # as stock builds what it finds cut for Flux.2


def language(kind: str, **config: Any) -> torch.nn.Module:
    made: torch.nn.Module = getattr(comfy.text_encoders.llama, kind)(config, HALF, "meta", OPS)
    return made


TIMES = [False, True, True]
OTHERS: dict[str, tuple[Any, Any]] = {
    "Qwen3-0.6B": (text.llama(QWEN3_06B), lambda: language("Qwen3_06B")),
    "Qwen3-8B": (text.llama(QWEN3_8B), lambda: language("Qwen3_8B")),
    "Qwen2.5-3B": (text.llama(QWEN25), lambda: language("Qwen25_3B")),
    "Llama-3.1-8B": (text.llama(LLAMA3), lambda: language("Llama2")),
    "Mistral-Small-3-24B": (text.llama(MISTRAL), lambda: language("Mistral3Small24B", **CUT)),
    "Ministral-3-3B": (text.llama(MINISTRAL), lambda: language("Ministral3_3B")),
    "Gemma3-4B": (text.llama(GEMMA3_4B), lambda: language("Gemma3_4B")),
    "Gemma3-12B": (text.gemma3(Gemma3Size(GEMMA3_12B, **VISION, side=64)), lambda: language("Gemma3_12B")),
    "Qwen2.5-VL-7B": (
        text.qwen25_vl(Qwen25VLSize(QWEN25_7B, vision=1280, ffn=3420, blocks=32)),
        lambda: language("Qwen25_7BVLI"),
    ),
    "MiniMax-H3's Qwen3-VL-32B": (
        text.minimax_h3_te(Qwen3VLSize(QWEN3_32B, **VISION, places=2304)),
        lambda: comfy.text_encoders.minimax.MiniMaxQwen3VL({}, HALF, "meta", OPS),
    ),
    "ByT5-small": (
        text.t5xxl(Umt5Size(1472, 6, ffn=3584, layers=12, vocabulary=1510)),
        lambda: t5("byt5_config_small_glyph.json"),
    ),
    "UMT5-XXL": (text.umt5(Umt5Size(4096, 64, vocabulary=256384)), lambda: t5("umt5_config_xxl.json")),
    "T5-XXL": (text.t5xxl(Umt5Size(4096, 64, vocabulary=32128)), lambda: t5("t5_config_xxl.json")),
    "Qwen3-4B": (text.llama(QWEN3), lambda: comfy.text_encoders.llama.Qwen3_4B({}, HALF, "meta", OPS)),
    "Gemma2-2B": (text.llama(GEMMA), lambda: comfy.text_encoders.llama.Gemma2_2B({}, HALF, "meta", OPS)),
    "CLIP-L": (
        text.clip(768, 3072, 12),
        lambda: comfy.clip_model.CLIPTextModel(read("sd1_clip_config.json"), HALF, "meta", OPS),
    ),
    "CLIP-ViT-H": (text.clip_vision(ClipVisionSize(ffn=5120, layers=32, projection=1024)), clip_vision),
    "Wan2.1-VAE": (
        vaes.wan21_vae(vaes.VaeSize(96, 96)),
        lambda: comfy.ldm.wan.vae.WanVAE(dim=96, z_dim=16, temperal_downsample=TIMES),
    ),
    "Wan2.2-VAE": (
        vaes.wan22_vae(vaes.WAN22_PUBLISHED),
        lambda: comfy.ldm.wan.vae2_2.WanVAE(dim=160, dec_dim=256, z_dim=48, temperal_downsample=TIMES),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_encoders_and_video_vaes_are_the_real_ones(name: str) -> None:
    table, build = OTHERS[name]
    published = {
        name.replace("lm_head", "model.lm_head"): shape for name, shape in shapes(table).items()
    }  # as stock does
    with torch.device("meta"):
        assert published == shapes_of(build())


def built(table: Table) -> tuple[Any, Any]:
    """The encoder that stock builds for a file: shapes, and the numbers that its modules keep."""
    made: list[torch.nn.Module] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy.sd, "CLIP", lambda target, **_: made.append(target.clip(device="meta", dtype=HALF)))
        comfy.sd.load_text_encoder_state_dicts([weightless(table)])
    (net,) = made
    numbers = {
        f"{path}.{key}": value
        for path, module in net.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, int | float | list)
    }
    return shapes_of(net), numbers


@pytest.mark.parametrize("name", ["Gemma3-12B", "Qwen2.5-VL-7B", "MiniMax-H3's Qwen3-VL-32B"])
def test_narrow_gives_towers_stocks_own_sizes(name: str) -> None:
    wanted = built(OTHERS[name][0])
    with narrow.opened(comfy):
        assert built(OTHERS[name][0]) == wanted


@pytest.mark.parametrize("kind", narrow.encoders.READ_AT)
def test_narrow_reads_the_layers_that_stock_reads(kind: str) -> None:
    made = getattr(comfy.text_encoders.flux, kind)
    wanted = inspect.signature(made.__init__).parameters["layer"].default
    name, full, _ = narrow.encoders.READ_AT[kind]
    with narrow.opened(comfy), torch.device("meta"):
        for layers in (None, full, full + 10):
            options = (
                {} if layers is None else {"model_name": name, f"{name}_model_config": {"num_hidden_layers": layers}}
            )
            assert made(device="meta", dtype=HALF, model_options=options).layer == wanted


@pytest.mark.parametrize("kind", vaes.KL_VAES)
def test_kl_vaes_are_the_real_ones(kind: str) -> None:
    size = vaes.KL_VAES[kind]
    sizes = {"ch": 128, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "z_channels": size.latent, "double_z": True}
    sizes |= {"in_channels": 3, "out_ch": 3, "resolution": 256, "attn_resolutions": [], "dropout": 0.0}
    with torch.device("meta"):
        sizes["batch_norm_latent"] = size.folded
        net = comfy.ldm.models.autoencoder.AutoencoderKL(ddconfig=sizes, embed_dim=size.latent)
    wanted = {name: shape for name, shape in shapes_of(net).items() if size.quantised or "quant_conv" not in name}
    if size.folded:  # within its halves in the file; stock takes them out
        for part, half in (("post_quant_conv", "decoder"), ("quant_conv", "encoder")):
            wanted |= {f"{half}.{part}.{end}": wanted.pop(f"{part}.{end}") for end in ("weight", "bias")}
        wanted |= {f"bn.{name}": tuple(getattr(net.bn, name).shape) for name in ("running_mean", "running_var")}
        wanted.pop("bn.num_batches_tracked", None)
    assert shapes(vaes.kl_vae(vaes.KlSize(size.latent, size.quantised, size.folded, width=128))) == wanted


# Of VAEs that stock's loader builds: the table, the metadata of the file, and GiB of the decoder in 16 bits.
OTHER_VAES: dict[str, tuple[Table, dict[str, str], float]] = {
    "LTX-2.3": (
        vaes.ltx_video_vae(vaes.LTX_VIDEO_PUBLISHED),
        vaes.ltx_video_vae_metadata(vaes.LTX_VIDEO_PUBLISHED),
        0.76,
    ),
    "HunyuanVideo 1.5": (vaes.hunyuan_vae(vaes.HUNYUAN_VAE_PUBLISHED), {}, 1.62),
    "MiniMax H3": (vaes.minimax_video(vaes.MINIMAX_VIDEO_PUBLISHED), {}, 4.51),
}


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("name", OTHER_VAES)
def test_other_vaes_are_those_that_stocks_loader_builds(name: str, is_open: bool) -> None:
    """Also while small ones are taken."""
    table, metadata, gib = OTHER_VAES[name]
    with torch.device("meta"), narrow.opened(comfy) if is_open else contextlib.nullcontext():
        net = comfy.sd.VAE(sd=weightless(table), metadata=metadata).first_stage_model
    unread = ".temb_proj."  # stock's blocks have it, and no file
    assert shapes(table) == {name: shape for name, shape in shapes_of(net).items() if unread not in name}
    held = sum(math.prod(spec.shape) for name, spec in table.items() if name.startswith("decoder."))
    assert 2 * held / 2**30 == pytest.approx(gib, rel=0.01)


def test_a_projection_reads_all_layers_of_the_published_encoder() -> None:
    found = shapes(video.ltx_text_projection(LTX["LTX-2.3"], GEMMA3_12B))
    with torch.device("meta"):
        net = comfy.text_encoders.lt.DualLinearProjection(3840 * 49, 4096, 2048, operations=OPS)
    assert found == {f"text_embedding_projection.{name}": shape for name, shape in shapes_of(net).items()}
