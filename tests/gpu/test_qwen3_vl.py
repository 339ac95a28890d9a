"""Stock's Qwen3-VL at the 4B's widths, a few layers of random weights, over our kernels: what it sees, reads and writes.

What is exact is an fp64 run of stock with the same weights, or for text its FP32 run. Needs a ComfyUI.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from gpu.support import error

from fusestream.kernels_cuda import LEDGER, OPS, KernelPolicy

pytestmark = pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI")

WORDS, LAYERS = 4096, 4
SIZES = {
    "4B": {"width": 2560, "ffn": 9728, "heads": 32, "key_heads": 8, "vision": 1024, "vision_ffn": 4096},
    "8B": {"width": 4096, "ffn": 12288, "heads": 32, "key_heads": 8, "vision": 1152, "vision_ffn": 4304},
    "2B": {"width": 2048, "ffn": 6144, "heads": 16, "key_heads": 8, "vision": 1024, "vision_ffn": 4096},
}


def build(size: str, dtype: torch.dtype = torch.float16) -> Any:
    """Stock's encoder around a Qwen3-VL of a few layers, two of them for its vision tower."""
    from fusestream.fusion.families.qwen3_vl.layout import Sizes
    from fusestream.fusion.families.qwen3_vl.sizes import SizedClipModel

    sizes = Sizes(
        layers=LAYERS, vocabulary=WORDS, own_words=False, blocks=3, places=2304, told_behind=(0, 1), **SIZES[size]
    )
    with torch.device("cuda"):
        model = SizedClipModel(device="cuda", dtype=dtype, sizes=sizes).requires_grad_(False)
    make = torch.Generator(device="cuda").manual_seed(5)
    for name, weight in model.transformer.named_parameters():
        if "norm" in name and name.endswith("weight"):
            weight.normal_(1, 0.1, generator=make)
        elif weight.ndim == 1:
            weight.normal_(std=0.05, generator=make)
        else:
            weight.normal_(std=0.1 if "embed" in name else weight[0].numel() ** -0.5, generator=make)
    model.set_clip_options({"execution_device": torch.device("cuda")})
    return model


def picture(height: int, width: int) -> dict[str, Any]:
    make = torch.Generator().manual_seed(height)
    return {"type": "image", "data": torch.rand(1, height, width, 3, generator=make), "original_type": "image"}


def fused(model: Any, policy: KernelPolicy) -> Any:
    from fusestream.fusion.text import stack
    from fusestream.fusion.text.vision import towers

    stack.fuse(model, policy)
    towers.fuse(model, policy)
    for module in model.modules():
        if "fusestream_policy" in module.__dict__:
            module.__dict__["fusestream_policy"] = policy
    return model


def chosen_anew() -> None:
    for op in OPS.values():
        op.forget()
    LEDGER.clear()


@torch.inference_mode()
@pytest.mark.parametrize("size", ["4B", "8B"])
@pytest.mark.parametrize("precision", ["precise", "fast"])
def test_it_sees_and_reads_as_stock(isa, size, precision):
    """A picture among words, by kernels alone: heads of 64 and of 72."""
    model = build(size)
    prompt = [[5, 9, picture(256, 384), 70, 3]]
    wanted = model(prompt)[0]
    chosen_anew()
    got = fused(model, KernelPolicy.of("on", isa=isa, precision=precision))(prompt)[0]
    print(f"{size} {precision}: {error(got, wanted):.3g}")
    assert error(got, wanted) < (2e-3 if precision == "precise" else 4e-3)
    assert not [refusal for refusal in LEDGER.refusals if refusal.op == "text encoder"]


def write(model: Any, *prompt: Any, **options: Any) -> list[int]:
    asked = {
        "do_sample": False, "max_length": 24, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0,
        "repetition_penalty": 1.0, "seed": 3,
    }  # fmt: skip
    tokens: list[int] = model.generate([[(part, 1.0) for part in prompt]], **{**asked, **options})
    return tokens


def stocks(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32) -> None:
    """Stock writes in FP32, where it would take bf16."""
    import comfy.model_management

    monkeypatch.setattr(comfy.model_management, "should_use_bf16", lambda *_, **__: dtype is torch.bfloat16)


def logits_of(model: Any, prompt: tuple[Any, ...], forced: list[int]) -> torch.Tensor:
    """Of each token, given those before."""
    net, found = model.transformer, []

    def sample(logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        found.append(logits.float().clone())
        return torch.tensor([[forced[len(found) - 1]]], device="cuda")

    net.sample_token = sample
    try:
        write(model, *prompt, max_length=len(forced))
    finally:
        del net.sample_token
    return torch.cat(found)


@torch.inference_mode()
@pytest.mark.parametrize("size", SIZES)
def test_it_writes_as_stock_in_fp32(isa, size, monkeypatch):
    """And its logits are nearer to FP32 than those of stock's bf16."""
    model = build(size)
    prompt = (5, 9, picture(256, 256), 70, 3)
    stocks(monkeypatch)
    wanted = write(model, *prompt)
    exact = logits_of(model, prompt, wanted)
    stocks(monkeypatch, torch.bfloat16)
    theirs = error(logits_of(model, prompt, wanted), exact)
    chosen_anew()
    fused(model, KernelPolicy.of("on", isa=isa))
    ours = error(logits_of(model, prompt, wanted), exact)
    print(f"{size}: logits {ours:.3g}, stock's in bf16 {theirs:.3g}")
    assert ours < min(theirs, 3e-3)
    assert write(model, *prompt) == wanted
    assert {choice.winner.split()[0] for choice in LEDGER.choices if choice.op in ("few_rows", "decode_attention")} == {
        "cuda"
    }


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_weights_of_every_type(dtype, monkeypatch):
    model = build("4B")
    for name, weight in model.transformer.model.layers.named_parameters():
        if weight.ndim == 2:
            owner, _, own = name.rpartition(".")
            module = model.transformer.model.layers.get_submodule(owner)
            module._parameters[own] = torch.nn.Parameter(weight.to(dtype), requires_grad=False)
    stocks(monkeypatch)
    prompt = (5, 9, 70, 3)
    wanted = write(model, *prompt)
    exact = logits_of(model, prompt, wanted)
    got = logits_of(fused(model, KernelPolicy.of("on")), prompt, wanted)
    assert error(got, exact) < 3e-3


@torch.inference_mode()
def test_a_large_picture_within_a_bound():
    """2048 x 2048: what computing takes beside the weights."""
    model = fused(build("4B"), KernelPolicy.of("auto"))
    write(model, 5, 9)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    write(model, 5, picture(2048, 2048), 9, max_length=3)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    print(f"2048 x 2048: {peak:.2f} GiB beside the weights")
    assert peak < 1.5


@pytest.mark.timed
@torch.inference_mode()
def test_faster_than_stock():
    """Milliseconds a token of these layers, weights on the card: stock's, ours."""
    took = {}
    for name in ("stock", "ours"):
        model = build("4B")
        if name == "ours":
            fused(model, KernelPolicy.of("auto"))
        write(model, 5, 9, 11, max_length=64)
        torch.cuda.synchronize()
        start = time.perf_counter()
        write(model, 5, 9, 11, max_length=64)
        torch.cuda.synchronize()
        took[name] = (time.perf_counter() - start) / 64 * 1e3
    print(f"{LAYERS} layers of the 4B, ms a token: {took}")
    assert took["ours"] < took["stock"]
