"""SigLIP, the vision tower of Gemma 3, over our ops with the references on the CPU, beside stock's FP32: stock's classes with
heads of 72, in a few layers on a small picture."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import comfy.clip_model
import comfy.ops
import pytest
import torch
from comfy.text_encoders import llama
from text_models import close

from bed.depth import is_thorough
from fusestream.fusion.text.encoder import block as encoder_block
from fusestream.fusion.text.encoder import clip
from fusestream.fusion.text.vision import siglip, towers
from fusestream.kernels_cuda import LEDGER, KernelPolicy, KernelRefused

ALLOWED = {"precise": 6e-4, "fast": 2e-3, "turbo": 2e-3}
HEADS, LAYERS, SIDE = 2, 3, 14 * 8
CONFIG = {
    **llama.GEMMA3_VISION_CONFIG, "hidden_size": 72 * HEADS, "num_attention_heads": HEADS, "intermediate_size": 200,
    "num_hidden_layers": LAYERS, "image_size": SIDE,
}  # fmt: skip
SIZES = {
    "hidden_size": 48,
    "vision_config": CONFIG,
    "rms_norm_eps": 1e-6,
    "rms_norm_add": True,
    "mm_tokens_per_image": 4,
}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def as_comfyui_runs(one_thread: None) -> Iterator[None]:
    LEDGER.clear()
    with torch.inference_mode():
        yield


class Network(llama.Gemma3_4B_Vision):
    """Stock's class around a small tower, without the language model."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.nn.Module.__init__(self)
        given: Any = SimpleNamespace(**SIZES)
        self.multi_modal_projector = llama.Gemma3MultiModalProjector(given, dtype, CPU, comfy.ops.manual_cast)
        self.vision_model = comfy.clip_model.CLIPVision(CONFIG, dtype, CPU, comfy.ops.manual_cast)
        self.image_size = SIDE


def build(dtype: torch.dtype = torch.float16) -> Network:
    network, draw = Network(torch.float32).requires_grad_(False), torch.Generator().manual_seed(4)
    for name, weight in network.named_parameters():
        if weight.ndim > 1:
            weight.normal_(0, 0.5 if "position" in name else weight[0].numel() ** -0.5, generator=draw)
        else:
            weight.normal_(1 if "norm" in name and name.endswith("weight") else 0, 0.1, generator=draw)
        weight.data = weight.to(torch.float16 if dtype.itemsize == 1 and "encoder" not in name else dtype)
    return network


def picture(height: int, width: int, count: int = 1) -> dict[str, Any]:
    drawn = torch.rand(count, height, width, 3, generator=torch.Generator().manual_seed(height))
    return {"type": "image", "data": drawn, "original_type": "image"}


def both(network: Network, embed: dict[str, Any], precision: str = "precise", **policy: Any) -> Any:
    """What the language model gets: (ours, stock's)."""
    wanted = network.preprocess_embed(embed, CPU)[0]
    assert towers.fuse(network, KernelPolicy.of(precision=precision, **policy), on_cpu=True) == LAYERS
    return network.preprocess_embed(embed, CPU)[0], wanted


@pytest.mark.parametrize("precision", ALLOWED)
@pytest.mark.parametrize("size", [(112, 112, 1), (77, 203, 1), (300, 120, 3)], ids=str)
def test_pictures_of_every_size(size: tuple[int, int, int], precision: str) -> None:
    got, wanted = both(build(), picture(*size), precision)
    assert got.shape == (size[2], 4, 48)
    close(got, wanted, ALLOWED[precision])


@pytest.mark.parametrize("precision", ALLOWED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_weights_of_every_type(dtype: torch.dtype, precision: str) -> None:
    got, wanted = both(build(dtype), picture(90, 150), precision)
    close(got, wanted, max(ALLOWED[precision], 1e-3) if dtype is torch.float32 else ALLOWED[precision])


def test_all_patches_see_each_other_with_heads_of_96(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    attention = encoder_block.attention

    def seen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **options: Any) -> torch.Tensor:
        asked.append((tuple(q.shape), mask, options["causal"]))
        return attention(q, k, v, mask, **options)

    monkeypatch.setattr(encoder_block, "attention", seen)
    both(build(), picture(112, 112))
    assert asked == [((1, 64, HEADS, 96), None, False)] * LAYERS


def test_many_patches_pass_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clip, "PATCHES", 24)
    for precision, allowed in ALLOWED.items():
        got, wanted = both(build(), picture(80, 112, 2), precision)
        close(got, wanted, allowed)


@pytest.mark.parametrize("layer", [-1, -2, 0, "all"])
def test_outputs_of_middle_layers(layer: Any) -> None:
    network, pixels = build(), torch.randn(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    wanted = network.vision_model(pixels, intermediate_output=layer)
    towers.fuse(network, KernelPolicy(), on_cpu=True)
    got = network.vision_model(pixels, intermediate_output=layer)
    for ours, theirs in zip(got, wanted, strict=True):
        close(ours, theirs, ALLOWED["precise"])


@pytest.mark.parametrize("op", [*siglip.OPS, "to_half"])
def test_each_op_can_be_switched_off(op: str) -> None:
    for precision in ALLOWED if is_thorough() else ("precise", "fast"):
        got, wanted = both(build(torch.bfloat16), picture(112, 112), precision, **{op: "off"})
        close(got, wanted, 3e-3)


def test_all_off_and_the_cpu_are_stocks() -> None:
    network, embed = build(), picture(112, 112)
    wanted, plain = network.preprocess_embed(embed, CPU)[0], {type(module) for module in network.modules()}
    for policy in (KernelPolicy.of("off"), KernelPolicy.of(**dict.fromkeys(siglip.OPS, "off"))):
        assert towers.fuse(network, policy, on_cpu=True) == 0
    assert {type(module) for module in network.modules()} == plain
    assert towers.fuse(network) == LAYERS
    assert torch.equal(network.preprocess_embed(embed, CPU)[0], wanted)
    towers.fuse(network, KernelPolicy.of("on"))
    with pytest.raises(KernelRefused, match=r"'on' for this text encoder.*runs on the CPU.*'auto'"):
        network.preprocess_embed(embed, CPU)


def test_what_others_did_to_it_is_stocks() -> None:
    network, embed = build(), picture(112, 112)
    part = network.vision_model.encoder.layers[1].mlp.fc1
    plain = part.forward
    part.forward = lambda x: plain(x) * 1.5
    got, wanted = both(network, embed)
    assert torch.equal(got, wanted)
    towers.fuse(network, KernelPolicy.of("on"), on_cpu=True)
    with pytest.raises(KernelRefused, match="another node has changed how a Linear of the text encoder computes"):
        network.preprocess_embed(embed, CPU)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_no_kernel_refuses_what_it_is_handed(dtype: torch.dtype, refused_by_kernels: list[tuple[str, str]]) -> None:
    for precision in ALLOWED:
        both(build(dtype), picture(90, 150), precision)
    assert not refused_by_kernels
