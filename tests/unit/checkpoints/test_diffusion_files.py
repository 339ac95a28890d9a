"""Stock ComfyUI recognises, loads and samples every diffusion model's file in every storage format,
with nothing missing and nothing left over; every tensor of it and every prompt matters.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import comfy
import comfy.model_management
import comfy.quant_ops
import comfy.sd
import comfy.utils
import family_scenes
import pytest
import torch
from family_scenes import inputs, parts
from scenes import Scene, Studio, distance, sample

from bed.depth import is_thorough
from fusestream import checkpoints
from fusestream.checkpoints import vaes, video, wan

pytestmark = pytest.mark.usefixtures("one_thread")

# The class in supported_models, and the network that stock picks.
EXPECTED = {
    **dict.fromkeys(("wan_t2v", "wan22_i2v", "wan22_fun_control"), ("WAN21_T2V", "WanModel")),
    **dict.fromkeys(("wan_i2v", "wan_flf2v"), ("WAN21_I2V", "WanModel")),
    "wan_vace": ("WAN21_Vace", "VaceWanModel"),
    "wan_fun_control": ("WAN21_FunControl2V", "WanModel"),
    "wan22_5b": ("WAN22_T2V", "WanModel"),
    "wan_causal": ("WAN21_CausalAR_T2V", "CausalWanModel"),
    "wan_s2v": ("WAN22_S2V", "WanModel_S2V"),
    "wan_humo": ("WAN21_HuMo", "HumoWanModel"),
    "wan_animate": ("WAN22_Animate", "AnimateWanModel"),
    **dict.fromkeys(("ltx2", "ltx23"), ("LTXAV", "LTXAVModel")),
    "hunyuan_video_15": ("HunyuanVideo15", "HunyuanVideo"),
    **dict.fromkeys(("minimax_h3", "minimax_h3_pruned"), ("MiniMaxH3", "MiniMaxH3Model")),
    "flux1": ("Flux", "Flux"),
    "flux2": ("Flux2", "Flux"),
    "chroma": ("Chroma", "Chroma"),
    "z_image": ("ZImage", "NextDiT"),
    "qwen_image": ("QwenImage", "QwenImageTransformer2DModel"),
    "krea2": ("Krea2", "SingleStreamDiT"),
    "anima": ("Anima", "Anima"),
    "sd3": ("SD3", "OpenAISignatureMMDITWrapper"),
    **dict.fromkeys(("sd15", "sd15_wide"), ("SD15", "UNetModel")),
    "sdxl": ("SDXL", "UNetModel"),
}
KINDS = tuple(EXPECTED)
# Streaming is compared with stock in fp8 too (test_families_stream.py); of stock alone some kinds
# are enough.
OTHERS_IN_FP8 = family_scenes.KINDS if is_thorough() else ("flux1", "qwen_image", "minimax_h3", "sdxl", "wan_animate")
CASES = [
    *((kind, storage) for kind in wan.SIZES for storage in checkpoints.KINDS[kind].storages),
    *((kind, "fp16") for kind in family_scenes.KINDS),
    *((kind, "fp8_e4m3fn") for kind in OTHERS_IN_FP8),
    ("flux1", "bf16"),
    ("ltx2", "bf16"),
]
# How far the latents after two steps may be from those of the fp32 file, relative to their size. On
# a CPU, where stock computes in fp32, the measured distances are at most 0.0014, 0.011, 0 and 0.12.
TOLERANCE = {"fp16": 0.01, "bf16": 0.03, "fp32": 0.001}
FP8_TOLERANCE = 0.25

# What stock loads and never uses: the prompt's half of a last block, after which nothing reads it.
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
Exact = Callable[..., list[torch.Tensor]]


@pytest.fixture(scope="module")
def scene(studio: Studio, scenes: dict[str, Scene]) -> Callable[..., Scene]:
    """What a kind is asked to paint, with one of two prompts."""

    def found(kind: str, prompt: int = 0) -> Scene:
        if kind not in scenes:
            return inputs(kind, prompt)
        other = [[studio.cats[0][0], scenes[kind].positive[0][1]]]
        return scenes[kind]._replace(positive=other) if prompt else scenes[kind]

    return found


@pytest.fixture(scope="module")
def exact(families_folder: Path, scene: Callable[..., Scene], as_comfyui_runs: None) -> Exact:
    """What the fp32 file of a kind makes of one of two prompts."""

    @cache
    def made(kind: str, prompt: int = 0) -> list[torch.Tensor]:
        with checkpoints.narrow.opened(comfy):
            return parts(sample(load(families_folder, kind, "fp32"), scene(kind, prompt)))

    return made


def load(folder: Path, kind: str, storage: str) -> Any:
    return comfy.sd.load_diffusion_model(str(checkpoints.write(kind, folder, storage)))


@pytest.mark.deep
@pytest.mark.usefixtures("as_comfyui_runs", "small_ones_too")
@pytest.mark.parametrize(("kind", "storage"), CASES)
def test_loads_whole_and_samples(
    families_folder: Path,
    scene: Callable[..., Scene],
    exact: Exact,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    storage: str,
) -> None:
    caplog.set_level(logging.INFO)
    model = load(families_folder, kind, storage)
    net = model.model.diffusion_model
    assert (type(model.model.model_config).__name__, type(net).__name__) == EXPECTED[kind]
    # "unet missing", "unet unexpected", "Missing weight for layer", "left over keys"
    words = ("missing", "unexpected", "left over")
    assert [line for line in caplog.messages if any(word in line.lower() for word in words)] == []
    for latents, expected in zip(parts(sample(model, scene(kind))), exact(kind), strict=True):
        assert latents.isfinite().all()
        assert 0.5 < latents.std() < (10 if kind in wan.SIZES else math.inf)
        assert distance(latents, expected) <= TOLERANCE.get(storage, FP8_TOLERANCE)


@pytest.mark.every_other
@pytest.mark.parametrize("kind", KINDS)
def test_hears_the_prompt(exact: Exact, kind: str) -> None:
    for one, other in zip(exact(kind, 0), exact(kind, 1), strict=True):
        assert distance(one, other) > 0.05


@pytest.mark.deep
@pytest.mark.usefixtures("small_ones_too")
@pytest.mark.parametrize("kind", [*wan.SIZES, *family_scenes.KINDS[:: 1 if is_thorough() else 4]])
@torch.inference_mode(False)
def test_every_tensor_and_every_input_matters(
    families_folder: Path, scene: Callable[..., Scene], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every weight that stock uses at all moves the output, and so does all that a Wan is told."""
    model = load(families_folder, kind, "fp32")
    net = model.model.diffusion_model
    calls: list[Any] = []
    with torch.no_grad():
        hook = net.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
        sample(model, scene(kind))
        hook.remove()

    # stock's switch for operations that have gradients, but for one that forgot
    monkeypatch.setattr(comfy.model_management, "in_training", True)
    monkeypatch.setattr(comfy.quant_ops.ck, "rms_rope_split_half", rms_rope_split_half)
    net.float().requires_grad_(True)
    args, kwargs = calls[0]
    if kind in wan.SIZES:  # its inputs are all tensors; those of the scene were made in inference mode
        args = tuple(watched(it) for it in args)
        # the 5B's network is handed a mask and does not read it
        kwargs = {name: it if name == "denoise_mask" else watched(it) for name, it in kwargs.items()}
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        output = net(*args, **kwargs)
        outputs = [output] if isinstance(output, torch.Tensor) else list(output)
        if hasattr(net, "preprocess_text_embeds"):  # what stock does with a prompt once, before the first step
            prompt = torch.randn(1, *family_scenes.PROMPTS[kind])
            unprocessed = {"unprocessed": True} if kind in video.LTX else {}
            outputs.append(net.preprocess_text_embeds(prompt, **unprocessed))
        sum((out * torch.randn(out.shape)).sum() for out in outputs).backward()

    idle = IDLE.get(kind, ("-",))
    gradients = {name: it.grad for name, it in net.named_parameters() if not name.startswith(idle)}
    given = {**dict(enumerate(args)), **kwargs}
    gradients |= {f"given {name}": it.grad for name, it in given.items() if getattr(it, "requires_grad", False)}
    assert [name for name, grad in gradients.items() if grad is None or not grad.isfinite().all()] == []
    assert [name for name, grad in gradients.items() if grad.abs().max() < 1e-6] == []


def watched(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.clone().requires_grad_(True) if is_float else value


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


@pytest.mark.every_other
@pytest.mark.usefixtures("as_comfyui_runs")
@pytest.mark.parametrize("kind", [*family_scenes.KINDS, *vaes.KL_VAES])
def test_narrow_is_for_those_that_need_it(families_folder: Path, kind: str) -> None:
    path = checkpoints.write(kind, families_folder, "fp16")
    needs = kind in checkpoints.NARROW
    with pytest.raises((RuntimeError, TypeError, ValueError, AssertionError)) if needs else nullcontext():
        if kind in vaes.KL_VAES:
            comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(path)))
        else:
            comfy.sd.load_diffusion_model(str(path))


@pytest.mark.parametrize("kind", video.MINIMAX)
def test_both_ends_of_h3_stay_in_fp32(families_folder: Path, kind: str) -> None:
    tensors = comfy.utils.load_torch_file(str(checkpoints.write(kind, families_folder, "fp16")))
    wide = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert {"rope.inv_freq", "final_layer.video_out.weight", "video_patch_proj.bias"} <= wide
    assert not any(name.startswith(("blocks.", "token_refiner.")) for name in wide)
