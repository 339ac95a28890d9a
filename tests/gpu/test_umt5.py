"""Stock's T5 encoders at UMT5-XXL's widths, with random weights, over our kernels. Needs a ComfyUI.

What is exact is an fp64 run of stock with FP32 weights. Stock's own error is that of the FP16 weights of the same file, with
which it computes in FP32. Printed beside it: the same modules in FP16 throughout, where they do not overflow, and our error
beside an exact run with the same FP16 weights, which stock makes none of.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from gpu.support import compared, in_turns, ratio
from torch import nn

from fusestream.kernels_cuda import LEDGER, OPS, KernelPolicy

pytestmark = pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI")

WIDTH, HEADS, HEAD, FFN, LAYERS = 4096, 64, 64, 10240, 6
TOKENS = 512


class Owner(nn.Module):
    """What has an encoder, as stock's text encoder models have: it zeroes what is masked."""

    zero_out_masked = True

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.transformer = net


def build(kind: str = "umt5", layers: int = LAYERS, dtype: torch.dtype = torch.float16) -> Any:
    """Stock's module, its weights spread as T5 starts them: the same numbers, rounded to the type."""
    import comfy.ops
    import comfy.text_encoders.t5 as stock

    config = {
        "num_layers": layers, "d_model": WIDTH, "d_kv": HEAD, "num_heads": HEADS, "d_ff": FFN, "vocab_size": 64,
        "dense_act_fn": "gelu_pytorch_tanh", "is_gated_act": True, "model_type": kind,
    }  # fmt: skip
    net = stock.T5(config, torch.float32, "cuda", comfy.ops.manual_cast).eval().requires_grad_(False)
    generator = torch.Generator(device="cuda").manual_seed(5)
    for name, weight in net.named_parameters():
        if name.endswith("norm.weight"):
            weight.normal_(1, 0.1, generator=generator)
        elif "relative" in name:
            weight.normal_(generator=generator)
        else:
            small = HEAD**-0.5 if name.endswith(".q.weight") else 1.0
            weight.normal_(std=small * weight.shape[1] ** -0.5, generator=generator)
    return net.to(dtype)


@pytest.fixture(scope="module")
def nets() -> dict[str, Any]:
    with torch.inference_mode():
        return {
            f"{kind} {dtype}": build(kind, dtype=dtype)
            for kind in ("umt5", "t5")
            for dtype in (torch.float16, torch.float32)
        }


def stock_of(net: Any, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Stock's computation, in the type of x, of an encoder that may be fused."""
    import comfy.text_encoders.t5 as stock

    found: torch.Tensor = stock.T5Stack.forward(net.encoder, x.clone(), attention_mask=mask)[0]
    return found


def ours_of(net: Any, policy: KernelPolicy, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    from fusestream.fusion.families.t5 import encoder as t5

    t5.fuse(Owner(net), policy)
    found: torch.Tensor = net.encoder(x, attention_mask=mask)[0]
    return found


def prompt(words: int, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings [batch, 512, width] and the mask of prompts of so many tokens, each next a third as long."""
    x = torch.randn(batch, TOKENS, WIDTH, device="cuda")
    mask = torch.zeros(batch, TOKENS, dtype=torch.long, device="cuda")
    for row in range(batch):
        mask[row, : max(1, words // 3**row)] = 1
    return x, mask


def error(got: torch.Tensor, exact: torch.Tensor, mask: torch.Tensor) -> float:
    seen = mask.bool()
    assert got[seen].isfinite().all()
    return float((got[seen].double() - exact[seen]).norm() / exact[seen].norm())


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["umt5", "t5"])
@pytest.mark.parametrize("precision", ["precise", "fast"])
def test_as_near_as_fp16_gets(nets, isa, kind, precision):
    net, wide = nets[f"{kind} {torch.float16}"], nets[f"{kind} {torch.float32}"]
    x, mask = prompt(200, 2)
    exact, of_half = stock_of(wide, x.double(), mask), stock_of(net, x.double(), mask)
    theirs = error(stock_of(net, x, mask), exact, mask)
    in_half = error(stock_of(net, x.half(), mask), exact, mask)
    for op in OPS.values():
        op.forget()  # or nothing is chosen, and nothing noted
    LEDGER.clear()
    got = ours_of(net, KernelPolicy.of("on", isa=isa, precision=precision), x, mask)
    ours = error(got, exact, mask)
    print(
        f"{kind} {isa or 'native'} {precision}: error {ours:.3g}, {ours / theirs:.3f} of stock's with the same file, "
        f"{theirs:.3g}; all in fp16 {in_half:.3g}; beside the same weights {error(got, of_half, mask):.3g}"
    )
    assert got.dtype is torch.float32
    assert {choice.winner.split()[0] for choice in LEDGER.choices} == {"cuda"}
    assert not [refusal for refusal in LEDGER.refusals if refusal.candidate == "cuda"]
    assert ours <= theirs * (1.1 if precision == "precise" else 1.5)


@torch.inference_mode()
@pytest.mark.parametrize("precision", ["precise", "fast"])
def test_outliers_pass(isa, precision):
    """A stream with numbers of a hundred thousand, and feed-forwards that add as much: fp16 cannot hold either."""
    net = build(layers=2)
    net.encoder.block[0].layer[1].DenseReluDense.wo.weight[:4].mul_(50000.0).clamp_(-65504, 65504)
    x, mask = prompt(77)
    x[:, ::5, 11] = 1e5
    x[:, 3] *= 3e4
    exact = stock_of(net, x.double(), mask)
    assert not stock_of(net, x.half(), mask)[mask.bool()].isfinite().all(), "nothing would overflow"
    ours = error(ours_of(net, KernelPolicy.of("on", isa=isa, precision=precision), x, mask), exact, mask)
    auto = error(ours_of(net, KernelPolicy.of("auto", isa=isa, precision=precision), x, mask), exact, mask)
    print(f"outliers {isa or 'native'} {precision}: error {ours:.3g}, auto {auto:.3g}")
    assert max(ours, auto) < (2e-3 if precision == "precise" else 4e-3)


@torch.inference_mode()
def test_scattered_and_missing_masks(nets):
    net = nets[f"umt5 {torch.float16}"]
    x, mask = prompt(130)
    mask[:, 5:60:3] = 0
    for given in (mask, None):
        seen = torch.ones_like(mask) if given is None else given
        exact = stock_of(net, x.double(), given)
        assert error(ours_of(net, KernelPolicy.of("on"), x, given), exact, seen) < 2e-3


# Of stock's time. A short prompt's is the host's, which whatever runs beside this takes from both, but not alike.
MOST = {60: 1.15, TOKENS: 1.0}


@pytest.mark.timed
@torch.inference_mode()
def test_faster_than_stock(nets):
    """Milliseconds a block of the encoder alone, its weights on the card: stock's, ours, for a short prompt and a full one."""
    from fusestream.fusion.families.t5 import encoder as t5

    net = nets[f"umt5 {torch.float16}"]
    t5.fuse(Owner(net), KernelPolicy.of("auto"))
    for words, most in MOST.items():
        x, mask = prompt(words)
        found = in_turns(
            stock=lambda x=x, mask=mask: stock_of(net, x, mask),
            ours=lambda x=x, mask=mask: net.encoder(x, attention_mask=mask),
        )
        print(f"{words} tokens of {TOKENS}, {LAYERS} blocks of 24, ms a block: {compared(found, LAYERS)}")
        assert ratio(found) < most
