"""CLIP's text encoders over our ops, with the references on the CPU: what they make of prompts, beside stock's FP32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import comfy.model_patcher
import comfy.sd1_clip
import comfy.sdxl_clip
import pytest
import torch

from fusestream.checkpoints import text
from fusestream.fusion.families import family_of
from fusestream.fusion.families.clip import CLIP, encoder
from fusestream.fusion.identify.checkpoint_info import header_of
from fusestream.kernels_cuda import KernelPolicy, KernelRefused

WIDTH, LAYERS = 64, 4
PRECISIONS = ("precise", "fast", "turbo")
# Relative error of the encoding beside stock's, which computes the same fp16 weights in FP32.
ALLOWED = {"precise": 4e-4, "fast": 1.5e-3, "turbo": 1.5e-3}
SIZES = {"hidden_size": WIDTH, "intermediate_size": 160, "num_attention_heads": 2, "num_hidden_layers": LAYERS}
KINDS = {
    "clip_l": comfy.sd1_clip.SDClipModel,
    "clip_g": comfy.sdxl_clip.SDXLClipG,
    "masked": comfy.sdxl_clip.StableCascadeClipG,
}


@pytest.fixture(autouse=True)
def as_comfyui_runs() -> Iterator[None]:
    with torch.inference_mode():
        yield


def build(kind: str = "clip_l", dtype: torch.dtype = torch.float16, heads: int = 2) -> Any:
    """Stock's text encoder model, small, with seeded weights."""
    name = "clip_l" if kind == "clip_l" else "clip_g"
    model = KINDS[kind](dtype=dtype, model_options={f"{name}_model_config": {**SIZES, "num_attention_heads": heads}})
    generator = torch.Generator().manual_seed(5)
    for key, weight in model.transformer.named_parameters():
        fresh = torch.randn(weight.shape, generator=generator)
        if "norm" in key:
            fresh = (1 if key.endswith("weight") else 0) + 0.1 * fresh
        elif key.endswith("bias"):
            fresh *= 0.1
        elif "embedding" not in key:
            fresh *= weight.shape[1] ** -0.5
        weight.copy_(fresh)
    model.set_clip_options({"execution_device": torch.device("cpu")})
    return model


def prompts(*lengths: int) -> list[list[int]]:
    """Of so many words each, begun, ended and padded to 77 tokens."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randint(300, 40000, (words,), generator=generator).tolist() for words in lengths)
    return [[49406, *words, 49407, *[49407] * (75 - len(words))] for words in drawn]


def fused(model: Any, precision: str = "precise", **policy: Any) -> Any:
    assert encoder.fuse(model, KernelPolicy.of(precision=precision, **policy), on_cpu=True) == LAYERS
    return model


def close(got: torch.Tensor, wanted: torch.Tensor, allowed: float) -> None:
    assert got.dtype is wanted.dtype is torch.float32 and got.shape == wanted.shape
    assert not torch.equal(got, wanted), "otherwise nothing of ours computed it"
    assert (got - wanted).norm() <= allowed * wanted.norm()
    assert (got - wanted).abs().max() <= 5 * allowed * wanted.abs().max()


@pytest.mark.every_other
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(1,), (75,), (40, 3, 75)], ids=str)
def test_prompts_encode_as_stocks(kind: str, lengths: tuple[int, ...], precision: str) -> None:
    """The tokens, and the one that is pooled."""
    model = build(kind)
    wanted = model(prompts(*lengths))
    got = fused(model, precision)(prompts(*lengths))
    for ours, theirs in zip(got, wanted, strict=True):
        close(ours, theirs, ALLOWED[precision])


@pytest.mark.parametrize("layer", [-1, -2, -4, 0, 3, None, "all"])
def test_every_clip_skip(layer: Any) -> None:
    model = build()
    if layer == "all":
        model.layer = "all"
    else:
        model.set_clip_options({"layer": layer})
    wanted = model(prompts(5))
    got = fused(model)(prompts(5))
    for ours, theirs in zip(got, wanted, strict=True):
        close(ours, theirs, ALLOWED["precise"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_weights_of_every_type(dtype: torch.dtype) -> None:
    """What fp16 cannot hold of fp32 weights is lost; of the others it holds all."""
    model = build("clip_g", dtype)
    wanted = model(prompts(20))[0]
    close(fused(model)(prompts(20))[0], wanted, 1e-3 if dtype is torch.float32 else ALLOWED["precise"])


@pytest.mark.parametrize(("precision", "factor"), [("precise", 1.1), ("fast", 1.6), ("turbo", 1.6)])
@pytest.mark.parametrize("kind", ["clip_l", "clip_g"])
def test_the_error_is_that_of_fp16_weights(kind: str, precision: str, factor: float) -> None:
    """Against fp32 weights: stock's with the fp16 file, which computes in FP32, and ours with the same file."""
    given = prompts(70, 50, 30, 10)
    exact, half = build(kind, torch.float32)(given)[0], build(kind)
    theirs = float((half(given)[0] - exact).norm())
    ours = float((fused(half, precision)(given)[0] - exact).norm())
    print(f"{ours / theirs:.3f}")
    assert 0 < ours <= factor * theirs


def test_weights_in_prompts_and_textual_inversion() -> None:
    model = build()
    learnt = torch.randn(WIDTH, generator=torch.Generator().manual_seed(9))
    chunks = [[(token, 1.0) for token in chunk] for chunk in prompts(75, 20)]
    chunks[0][3] = (chunks[0][3][0], 1.4)
    chunks[1][2] = (learnt, 0.7)
    wanted = model.encode_token_weights(chunks)
    got = fused(model).encode_token_weights(chunks)
    assert wanted[0].shape == (1, 2 * 77, WIDTH)
    for ours, theirs in zip(got, wanted, strict=True):
        close(ours, theirs, 2 * ALLOWED["precise"])


def test_a_lora_counts() -> None:
    model = build()
    patcher = comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))
    before = model(prompts(9))[0]
    generator = torch.Generator().manual_seed(2)
    keys = [
        "transformer.text_model.encoder.layers.1.self_attn.q_proj.weight",
        "transformer.text_model.encoder.layers.2.mlp.fc1.weight",
        "transformer.text_model.encoder.layers.2.layer_norm1.weight",
    ]
    state = model.state_dict()
    patches = {key: ("diff", (0.1 * torch.randn(state[key].shape, generator=generator),)) for key in keys}
    assert set(patcher.add_patches(patches)) == set(keys)
    patcher.patch_model()
    wanted = model(prompts(9))[0]
    assert (wanted - before).norm() > 0.01 * before.norm()
    close(fused(model)(prompts(9))[0], wanted, ALLOWED["precise"])
    patcher.unpatch_model()
    close(model(prompts(9))[0], before, ALLOWED["precise"])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["clip_l", "clip_g"])
def test_no_kernel_refuses_what_it_is_handed(
    kind: str, precision: str, refused_by_kernels: list[tuple[str, str]]
) -> None:
    fused(build(kind, heads=1), precision)(prompts(5, 75))
    assert not refused_by_kernels


def test_each_op_can_be_switched_off() -> None:
    model = build("clip_g")
    whole = fused(model, "fast")(prompts(5))[0]
    for op in ("linear", "linear_", "norm_modulate", "attention"):
        without = fused(build("clip_g"), "fast", **{op: "off"})(prompts(5))[0]
        assert op in CLIP.ops and (without - whole).norm() < 0.01 * whole.norm(), op


def test_off_and_the_cpu_are_stocks() -> None:
    model = build()
    wanted = model(prompts(5))[0]
    assert encoder.fuse(model, KernelPolicy.of("off")) == 0 and not isinstance(model.transformer, encoder.FusedEncoder)
    assert encoder.fuse(model, KernelPolicy.of("auto")) == LAYERS
    assert torch.equal(model(prompts(5))[0], wanted)
    model = build()
    encoder.fuse(model, KernelPolicy.of("on"))
    with pytest.raises(KernelRefused, match=r"'on'.*the text encoder runs on the CPU.*'auto'"):
        model(prompts(5))


def test_what_another_node_changed_is_stocks() -> None:
    model = build()
    wanted = model(prompts(5))[0]
    layer = fused(model).transformer.text_model.encoder.layers[1]
    layer.mlp.fc1.forward = layer.mlp.fc1.forward
    assert torch.equal(model(prompts(5))[0], wanted)


def test_what_is_recognised() -> None:
    names = dict.fromkeys(text.clip(layers=1), torch.empty(0, device="meta"))
    assert family_of(header_of(names)) is CLIP
    vision = "vision_model.embeddings.class_embedding"
    assert family_of(header_of({**names, vision: torch.empty(0)})) is None
    assert family_of(header_of({f"clip.{name}": tensor for name, tensor in names.items()})) is None
