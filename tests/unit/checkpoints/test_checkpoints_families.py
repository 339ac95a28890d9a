"""Stock ComfyUI recognises, loads and runs every checkpoint of the other families, and the tables are those of the real models."""

from __future__ import annotations

import inspect
import json
import logging
import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import comfy
import comfy.clip_model
import comfy.ldm.models.autoencoder
import comfy.ldm.qwen_image.model
import comfy.model_detection
import comfy.model_management
import comfy.ops
import comfy.quant_ops
import comfy.sd
import comfy.text_encoders.flux
import comfy.text_encoders.llama
import comfy.text_encoders.t5
import comfy.utils
import family_scenes
import pytest
import torch
from family_scenes import inputs, parts
from scenes import distance, sample

from bed.depth import is_thorough
from fusestream import checkpoints
from fusestream.checkpoints import (
    clip_l,
    flux,
    hunyuan_video,
    kl_vae,
    llama,
    ltx,
    minimax,
    narrow,
    qwen_image,
    sd3,
    t5xxl,
    umt5,
    unet,
    wan_more,
    z_image,
)
from fusestream.checkpoints.wan import WanSize
from fusestream.checkpoints.weights import Table

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = family_scenes.KINDS

# The class in supported_models, the model around the network, and the network that stock picks.
EXPECTED = {
    "flux1": ("Flux", "Flux", "Flux"),
    "flux2": ("Flux2", "Flux2", "Flux"),
    "chroma": ("Chroma", "Chroma", "Chroma"),
    "z_image": ("ZImage", "Lumina2", "NextDiT"),
    "qwen_image": ("QwenImage", "QwenImage", "QwenImageTransformer2DModel"),
    "hunyuan_video_15": ("HunyuanVideo15", "HunyuanVideo15", "HunyuanVideo"),
    "ltx2": ("LTXAV", "LTXAV", "LTXAVModel"),
    "ltx23": ("LTXAV", "LTXAV", "LTXAVModel"),
    "minimax_h3": ("MiniMaxH3", "MiniMaxH3", "MiniMaxH3Model"),
    "minimax_h3_pruned": ("MiniMaxH3", "MiniMaxH3", "MiniMaxH3Model"),
    "sd3": ("SD3", "SD3", "OpenAISignatureMMDITWrapper"),
    "sd15": ("SD15", "BaseModel", "UNetModel"),
    "sd15_wide": ("SD15", "BaseModel", "UNetModel"),
    "sdxl": ("SDXL", "SDXL", "UNetModel"),
    "wan_causal": ("WAN21_CausalAR_T2V", "WAN21_CausalAR", "CausalWanModel"),
    "wan_s2v": ("WAN22_S2V", "WAN22_S2V", "WanModel_S2V"),
    "wan_humo": ("WAN21_HuMo", "WAN21_HuMo", "HumoWanModel"),
    "wan_animate": ("WAN22_Animate", "WAN22_Animate", "AnimateWanModel"),
}

# How far the latents after two steps may be from those of the fp32 file, relative to their size. On a CPU, where stock computes
# in fp32, the measured distances are at most 0.0014, 0.011 and 0.12.
TOLERANCE = {"fp16": 0.01, "bf16": 0.03, "fp8_e4m3fn": 0.25}
# What streams is compared with stock's in fp8 too (test_families_stream.py); of stock alone some kinds are enough.
IN_FP8 = KINDS if is_thorough() else ("flux1", "qwen_image", "minimax_h3", "sdxl", "wan_animate")
CASES = [
    *((kind, "fp16") for kind in KINDS),
    *((kind, "fp8_e4m3fn") for kind in IN_FP8),
    ("flux1", "bf16"),
    ("ltx2", "bf16"),
]

# What stock loads and never uses: the prompt's half of a last block, after which nothing reads the prompt.
IDLE = {
    "sd3": ("joint_blocks.3.context_block.attn.ln_q.",),
    "qwen_image": tuple(
        f"transformer_blocks.3.{part}."
        for part in ("txt_mlp", "attn.to_add_out", "attn.norm_added_q", "attn.add_q_proj")
    ),
    "hunyuan_video_15": tuple(
        f"double_blocks.2.{part}." for part in ("txt_mlp", "txt_attn.proj", "txt_attn.norm.query_norm")
    ),
}


@pytest.fixture(scope="module")
def exact(families_folder: Path, as_comfyui_runs: None) -> dict[str, list[list[torch.Tensor]]]:
    """What the fp32 file of each kind makes of two prompts."""
    with narrow.opened(comfy):
        models = ((kind, load(families_folder, kind, "fp32")) for kind in KINDS)
        return {kind: [parts(sample(model, inputs(kind, prompt))) for prompt in (0, 1)] for kind, model in models}


def load(families_folder: Path, kind: str, storage: str) -> Any:
    return comfy.sd.load_diffusion_model(str(checkpoints.write(kind, families_folder, storage)))


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """ "unet missing", "clip missing", "Missing VAE keys", "unexpected", "left over", "Leftover" """
    words = ("missing", "unexpected", "left over", "leftover")
    return [line for line in caplog.messages if any(word in line.lower() for word in words)]


@pytest.mark.usefixtures("as_comfyui_runs", "small_ones_too")
@pytest.mark.parametrize(("kind", "storage"), CASES)
def test_loads_whole_and_samples(
    families_folder: Path,
    exact: dict[str, list[list[torch.Tensor]]],
    caplog: pytest.LogCaptureFixture,
    kind: str,
    storage: str,
) -> None:
    caplog.set_level(logging.INFO)
    model = load(families_folder, kind, storage)
    one = model.model
    assert tuple(type(it).__name__ for it in (one.model_config, one, one.diffusion_model)) == EXPECTED[kind]
    assert complaints(caplog) == []
    for latents, expected in zip(parts(sample(model, inputs(kind))), exact[kind][0], strict=True):
        assert latents.isfinite().all()
        assert latents.std() > 0.5
        assert distance(latents, expected) <= TOLERANCE[storage]


@pytest.mark.parametrize("kind", KINDS)
def test_hears_the_prompt(exact: dict[str, list[list[torch.Tensor]]], kind: str) -> None:
    for one, other in zip(*exact[kind], strict=True):
        assert distance(one, other) > 0.05


@pytest.mark.usefixtures("small_ones_too")
@pytest.mark.parametrize("kind", KINDS if is_thorough() else KINDS[::4])
@torch.inference_mode(False)
def test_every_tensor_matters(families_folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight that stock uses at all moves the output."""
    model = load(families_folder, kind, "fp32")
    net = model.model.diffusion_model
    calls: list[Any] = []
    with torch.no_grad():
        hook = net.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
        sample(model, inputs(kind))
        hook.remove()

    # stock's switch for operations that have gradients, but for one that forgot
    monkeypatch.setattr(comfy.model_management, "in_training", True)
    monkeypatch.setattr(comfy.quant_ops.ck, "rms_rope_split_half", rms_rope_split_half)
    net.requires_grad_(True)
    args, kwargs = calls[0]
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        outputs = list(parts_of(net(*args, **kwargs)))
        if hasattr(net, "preprocess_text_embeds"):  # what stock does with a prompt once, before the first step
            prompt = torch.randn(1, *family_scenes.PROMPTS[kind])
            unprocessed = {"unprocessed": True} if kind in ltx.SIZES else {}
            outputs.append(net.preprocess_text_embeds(prompt, **unprocessed))
        sum((out * torch.randn(out.shape)).sum() for out in outputs).backward()

    gradients = {name: it.grad for name, it in net.named_parameters() if not name.startswith(IDLE.get(kind, ("-",)))}
    assert [name for name, grad in gradients.items() if grad is None or not grad.isfinite().all()] == []
    assert [name for name, grad in gradients.items() if grad.abs().max() < 1e-6] == []


def parts_of(output: Any) -> list[torch.Tensor]:
    return [output] if isinstance(output, torch.Tensor) else list(output)


def rms_rope_split_half(
    q: torch.Tensor, k: torch.Tensor, turns: torch.Tensor, *gains: torch.Tensor, epsilon: float, rot_dim: int
) -> tuple[torch.Tensor, ...]:
    """What stock's operation of this name does, in operations that have gradients."""

    def one(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.rms_norm(x, x.shape[-1:], gain, epsilon)
        halves = torch.stack(x[..., :rot_dim].chunk(2, dim=-1), dim=-1)
        turned = (turns @ halves.unsqueeze(-1)).squeeze(-1)
        return torch.cat([*turned.unbind(-1), x[..., rot_dim:]], dim=-1)

    return one(q, gains[0]), one(k, gains[1])


@pytest.mark.usefixtures("as_comfyui_runs")
@pytest.mark.parametrize("kind", [*KINDS, *kl_vae.SIZES])
def test_narrow_is_for_those_that_need_it(families_folder: Path, kind: str) -> None:
    path = checkpoints.write(kind, families_folder, "fp16")
    needs = kind in checkpoints.NARROW
    with pytest.raises((RuntimeError, TypeError, ValueError, AssertionError)) if needs else nullcontext():
        if kind in kl_vae.SIZES:
            comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(path)))
        else:
            comfy.sd.load_diffusion_model(str(path))


# ------------------------------------------------------------------------------------------- the tables, at published sizes

BIG = {"dim": 5120, "ffn": 13824, "layers": 40, "text": 4096}
WAN_SPEECH = (0, 4, 8, 12, 16, 20, 24, 27, 30, 33, 36, 39)
WAN_MORE = {
    "Wan2.1-CausalForcing-1.3B": wan_more.More(WanSize(dim=1536, ffn=8960, layers=30, text=4096), causal=True),
    "Wan2.2-S2V-14B": wan_more.More(WanSize(**BIG), speech=1024, hears=WAN_SPEECH),
    "HuMo-17B": wan_more.More(WanSize(**BIG, channels_in=36), humo=1280),
    "Wan2.2-Animate-14B": wan_more.More(WanSize(**BIG, channels_in=36, image=True), face=1024),
}
LTX = {
    "LTX-2": ltx.LtxSize(heads=32, layers=48, caption=3840),
    "LTX-2.3": ltx.LtxSize(heads=32, layers=48, caption=3840, connector_layers=8, gated=True),
}
H3 = minimax.MiniMaxSize(dim=5376, heads=56, ffn=14336, layers=50, text=5120, between=5376, time=2688)
PUBLISHED: dict[str, tuple[Table, Any]] = {
    "FLUX.1-dev": (flux.table(flux.FluxSize(3072, 19, 38, text=4096, pooled=768, guidance=True)), None),
    "FLUX.2-klein-4B": (flux.table(flux.FluxSize(3072, 5, 20, text=7680, patch=128, shared=True)), None),
    "FLUX.2-klein-9B": (flux.table(flux.FluxSize(4096, 8, 24, text=12288, patch=128, shared=True)), None),
    "Chroma1-HD": (flux.table(flux.FluxSize(3072, 19, 38, text=4096, guidance_layer=5120)), None),
    "Z-Image-Turbo": (z_image.table(z_image.ZImageSize(3840, 30, 2560)), None),
    "Qwen-Image": (qwen_image.table(qwen_image.QwenImageSize(3072, 60, 3584)), None),
    "HunyuanVideo-1.5": (hunyuan_video.table(hunyuan_video.HunyuanVideoSize(2048, 54, 3584)), None),
    **{name: (ltx.table(size), ltx.metadata(size)) for name, size in LTX.items()},
    "MiniMax-H3": (minimax.table(H3), None),
    "SD3.5-medium": (sd3.table(sd3.Sd3Size(layers=24, twice=13, text=4096, places=384)), None),
    "SD3.5-large": (sd3.table(sd3.Sd3Size(layers=38, twice=0, text=4096, places=192)), None),
    "SD1.5": (unet.table(unet.UnetSize(320, (1, 2, 4, 4), (1, 1, 1, 0), residuals=2, middle=1, context=768)), None),
    "SDXL": (
        unet.table(
            unet.UnetSize(320, (1, 2, 4), (0, 2, 10), residuals=2, middle=10, context=2048, labels=2816, linear=True)
        ),
        None,
    ),
    **{name: (wan_more.table(size), wan_more.metadata(size)) for name, size in WAN_MORE.items()},
}


def shapes(table: Table) -> dict[str, tuple[int, ...]]:
    return {name: spec.shape for name, spec in table.items()}


def shapes_of(net: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}


def weightless(table: Table) -> dict[str, torch.Tensor]:
    return {name: torch.empty(spec.shape, device="meta") for name, spec in table.items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_tables_are_the_real_models(name: str) -> None:
    """Stock, told nothing but names and shapes, builds the very network."""
    table, metadata = PUBLISHED[name]
    config = comfy.model_detection.model_config_from_unet(weightless(table), "", metadata=metadata)
    with narrow.opened(comfy):
        opened = comfy.model_detection.model_config_from_unet(weightless(table), "", metadata=metadata)
    assert type(opened) is type(config)
    assert {key: value for key, value in opened.unet_config.items() if key in config.unet_config} == config.unet_config

    config.set_inference_dtype(torch.float16, None)
    stock = config.get_model({}, device="meta")
    renamed = config.process_unet_state_dict(weightless(table))
    assert {key: tuple(it.shape) for key, it in renamed.items()} == shapes_of(stock.diffusion_model)


@pytest.mark.parametrize("name", ["Chroma1-HD", "Z-Image-Turbo", "Qwen-Image"])
def test_narrow_gives_stocks_own_numbers(name: str) -> None:
    tensors = weightless(PUBLISHED[name][0])
    config = comfy.model_detection.detect_unet_config(tensors, "")
    defaults = inspect.signature(comfy.ldm.qwen_image.model.QwenImageTransformer2DModel).parameters
    for key, value in narrow.sizes(tensors, "", config).items():
        assert value == (config[key] if key in config else defaults[key].default), key


OPS = comfy.ops.disable_weight_init


def test_encoder_tables_are_the_real_models() -> None:
    root = Path(comfy.sd.__file__).parent
    qwen = llama.LlamaSize(2560, 9728, heads=32, key_heads=8, head_width=128, layers=36, vocabulary=151936)
    stock = comfy.text_encoders.llama.Qwen3_4B({}, torch.float16, "meta", OPS)
    assert shapes(llama.table(qwen)) == shapes_of(stock)
    gemma = llama.LlamaSize(2304, 9216, 8, 4, head_width=256, layers=26, vocabulary=256000, gemma=True)
    stock = comfy.text_encoders.llama.Gemma2_2B({}, torch.float16, "meta", OPS)
    assert shapes(llama.table(gemma)) == shapes_of(stock)
    config = json.loads((root / "sd1_clip_config.json").read_text())
    stock = comfy.clip_model.CLIPTextModel(config, torch.float16, "meta", OPS)
    assert shapes(clip_l.table(768, 3072, 12)) == shapes_of(stock)
    config = json.loads((root / "text_encoders" / "t5_config_xxl.json").read_text())
    stock = comfy.text_encoders.t5.T5(config, torch.float16, "meta", OPS)
    assert shapes(t5xxl.table(umt5.Umt5Size(width=4096, heads=64, vocabulary=32128))) == shapes_of(stock)


@pytest.mark.parametrize("kind", kl_vae.SIZES)
def test_vae_tables_are_the_real_models(kind: str) -> None:
    size = kl_vae.SIZES[kind]
    sizes = {"ch": 128, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "z_channels": size.latent, "double_z": True}
    sizes |= {"in_channels": 3, "out_ch": 3, "resolution": 256, "attn_resolutions": [], "dropout": 0.0}
    with torch.device("meta"):
        sizes["batch_norm_latent"] = size.folded
        net = comfy.ldm.models.autoencoder.AutoencoderKL(ddconfig=sizes, embed_dim=size.latent)
    wanted = {name: shape for name, shape in shapes_of(net).items() if size.quantised or "quant_conv" not in name}
    if size.folded:  # within its halves in the file; stock takes them out
        inside = {"quant_conv": "encoder.quant_conv", "post_quant_conv": "decoder.post_quant_conv"}
        wanted = {
            ".".join((inside.get(part, part), *rest)): s
            for name, s in wanted.items()
            for part, *rest in [name.split(".")]
        }
        wanted |= {f"bn.{name}": tuple(getattr(net.bn, name).shape) for name in ("running_mean", "running_var")}
        wanted.pop("bn.num_batches_tracked", None)
    full = kl_vae.KlSize(size.latent, size.quantised, size.folded, width=128)
    assert shapes(kl_vae.table(full)) == {name: tuple(shape) for name, shape in wanted.items()}


# --------------------------------------------------------------------------------------------------- text encoders and VAEs

T = comfy.sd.CLIPType
FOX, CAT = "a red fox runs through the snow", "a red cat runs through the snow"


def ids(*tokens: int) -> dict[str, Any]:
    return {"qwen3_4b": [[(token, 1.0) for token in tokens]]}


def klein(path: Path) -> dict[str, Any]:
    """klein's three layers, out of the four that there are."""
    model = partial(comfy.text_encoders.flux.Qwen3_4BModel, layer=[1, 2, 3])
    return {**llama.model_options(path), "qwen3_4b_class": model}


def both(clip: Path, t5: Path) -> dict[str, Any]:
    return clip_l.model_options(clip) | t5xxl.model_options(t5)


# The files, for what, stock's class, two prompts, and the width of the encoding and of the pooled output.
ENCODERS: dict[str, tuple[Any, ...]] = {
    "clip_l": (["clip_l"], T.STABLE_DIFFUSION, clip_l.model_options, "SD1ClipModel", (FOX, CAT), 64, 64),
    "t5xxl": (["t5xxl"], T.CHROMA, t5xxl.model_options, "PixArtTEModel_", (FOX, CAT), 16, None),
    "flux": (["clip_l", "t5xxl"], T.FLUX, both, "FluxClipModel_", (FOX, CAT), 16, 64),
    "qwen3": (["qwen3"], T.LUMINA2, llama.model_options, "ZImageTEModel_", (ids(5, 7, 9), ids(5, 8, 9)), 2560, None),
    "klein": (["qwen3"], T.FLUX2, klein, "Flux2TEModel_", (ids(5, 7, 9), ids(5, 8, 9)), 7680, None),
    "gemma2": (["gemma2"], T.LUMINA2, llama.model_options, "LuminaTEModel_", (FOX, CAT), 64, None),
}
# At most 0.0012, 0.26 (as with UMT5, T5's largest weights are small), 0.12 and 0.055.
ENCODER_TOLERANCE = {"fp16": 0.01, "fp8_e4m3fn": 0.5, "fp8_scaled": 0.25, "fp8_comfy_quant": 0.15}


def load_encoder(families_folder: Path, name: str, storage: str) -> Any:
    files, kind, options, *_ = ENCODERS[name]
    paths = [checkpoints.write(file, families_folder, storage) for file in files]
    return comfy.sd.load_clip([str(path) for path in paths], clip_type=kind, model_options=options(*paths))


def encode(clip: Any, prompt: Any) -> Any:
    """Encoding and pooled output."""
    return clip.encode_from_tokens(clip.tokenize(prompt) if isinstance(prompt, str) else prompt, return_pooled=True)


@pytest.mark.usefixtures("as_comfyui_runs")
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_loads_whole_and_reads(families_folder: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    files, _, _, model, prompts, width, pooled_width = ENCODERS[name]
    caplog.set_level(logging.DEBUG)
    clip = load_encoder(families_folder, name, "fp32")
    (fox, fox_pooled), (cat, cat_pooled) = (encode(clip, prompt) for prompt in prompts)
    assert type(clip.cond_stage_model).__name__ == model
    assert complaints(caplog) == (["clip unexpected: ['spiece_model']"] if name == "gemma2" else [])
    assert fox.shape[-1] == width
    assert fox.isfinite().all()
    assert 0.3 < fox.std() < 3
    words = min(fox.shape[1], cat.shape[1])
    assert distance(fox[:, :words], cat[:, :words]) > 0.05
    if pooled_width:
        assert fox_pooled.shape == (1, pooled_width)
        assert distance(fox_pooled, cat_pooled) > 0.05
    caplog.set_level(logging.INFO)
    storages = checkpoints.KINDS[name].storages if name in files else ()  # `flux` and `klein` are of the same files
    for storage in (it for it in ENCODER_TOLERANCE if it in storages):
        again, _ = encode(load_encoder(families_folder, name, storage), prompts[0])
        assert distance(again, fox) <= ENCODER_TOLERANCE[storage], storage


@pytest.mark.usefixtures("as_comfyui_runs", "small_ones_too")
@pytest.mark.parametrize("kind", kl_vae.SIZES)
def test_vae_loads_whole_and_paints(families_folder: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    caplog.set_level(logging.DEBUG)
    pixels = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(0))
    made: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for storage in ("fp32", "fp16", "bf16", "fp8_e4m3fn"):
        path = checkpoints.write(kind, families_folder, storage)
        vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(path)))
        assert complaints(caplog) == []
        made[storage] = latents, picture = vae.encode(pixels), vae.decode(vae.encode(pixels))
        size = kl_vae.SIZES[kind]
        folded = (1, kl_vae.FOLDED * size.latent, 4, 4)
        assert latents.shape == (folded if size.folded else (1, size.latent, 8, 8)) and picture.shape == pixels.shape
        for one, other in zip(made[storage], made["fp32"], strict=True):
            assert one.isfinite().all()
            assert distance(one, other) <= TOLERANCE.get(storage, 0)
    latents, picture = made["fp32"]
    assert 0.3 < latents.std() < 3
    assert picture.std() > 0.05
    assert ((picture <= 0) | (picture >= 1)).float().mean() < 0.2


# ---------------------------------------------------------------------------------------------------------------- the files


def test_files_are_small() -> None:
    new = {*KINDS, *kl_vae.SIZES, "qwen3", "gemma2", "clip_l", "t5xxl"}
    sizes = {kind: 2 * sum(math.prod(spec.shape) for spec in checkpoints.KINDS[kind].table.values()) for kind in new}
    assert {kind: size for kind, size in sizes.items() if size > 60e6} == {}
    assert set(checkpoints.NARROW) <= new


@pytest.mark.parametrize("kind", minimax.SIZES)
def test_both_ends_of_h3_stay_in_fp32(families_folder: Path, kind: str) -> None:
    tensors = comfy.utils.load_torch_file(str(checkpoints.write(kind, families_folder, "fp16")))
    wide = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert wide == {name for name in tensors if name.startswith(minimax.WIDE)}
    assert {"rope.inv_freq", "final_layer.video_out.weight"} <= wide < set(tensors)
