"""An FP32 stream whose products have fewer bits: as near FP32 as FP16 is, whatever the range, and each row by itself."""

from __future__ import annotations

from typing import Any

import comfy.ops
import int8_files
import pytest
import torch
from scenes import distance
from torch import nn

from fusestream.fusion.weights import fp32_products
from fusestream.fusion.weights.fp32_products import attention_of_fp32, narrows_on, product_of_fp32, scaled
from fusestream.kernels_cuda import KernelPolicy, attention

AUTO, PRECISE = KernelPolicy.of(precision="auto"), KernelPolicy.of()


def linear(k: int = 256, n: int = 64, *, kind: torch.dtype = torch.bfloat16, bias: bool = True) -> Any:
    made = comfy.ops.manual_cast.Linear(k, n, bias=bias, dtype=kind, device="cpu")
    made.weight.data = torch.randn(n, k).mul_(k**-0.5).to(kind)
    if bias:
        made.bias.data = torch.randn(n).to(kind)
    return made.requires_grad_(False)


def exact(x: torch.Tensor, module: Any) -> torch.Tensor:
    bias = None if module.bias is None else module.bias.double()
    return nn.functional.linear(x.double(), module.weight.double(), bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e5, 1e20, 1e37])
def test_products_of_any_size_are_as_near_as_halves(size: float, bias: bool) -> None:
    x, module = torch.randn(2, 7, 256).clamp_(-1, 1) * size, linear(bias=bias)
    found = product_of_fp32(x, module, AUTO)
    assert found.dtype is torch.float32 and found.isfinite().all()
    halves = 2e-3 if size < 1e-3 else 5e-4  # the smallest halves have fewer bits
    assert distance(found.double(), exact(x, module)) < (0.1 if size < 1e-5 and not bias else halves)


def test_each_row_has_its_own_factor() -> None:
    x = torch.randn(4, 256)
    x[1] *= 1e30
    module = linear()
    found, wanted = product_of_fp32(x, module, AUTO), exact(x, module)
    assert all(distance(found[i].double(), wanted[i]) < 5e-4 for i in range(4))
    x[2, 5], x[3, 7] = torch.inf, torch.nan
    damaged = product_of_fp32(x, module, AUTO)
    assert torch.equal(damaged[:2], found[:2]) and not damaged[2].isfinite().any() and damaged[3].isnan().all()


def test_nothing_and_one_number() -> None:
    module = linear()
    assert product_of_fp32(torch.empty(0, 256), module, AUTO).shape == (0, 64)
    assert product_of_fp32(torch.zeros(256), module, AUTO).allclose(module.bias.float())
    numbers, factor = scaled(torch.tensor([[65504.0, 1.0], [32752.0, -3.0]]))
    assert factor.tolist() == [[2.0], [1.0]] and (numbers.float() * factor).tolist() == [[65504, 1], [32752, -3]]


def test_a_files_integers_are_multiplied_as_they_are() -> None:
    module = linear()
    weight = int8_files.quantised(torch.randn(64, 256).bfloat16(), int8_files.KINDS["convrot"])
    module.weight, module.layout_type = nn.Parameter(weight, requires_grad=False), int8_files.LAYOUT
    x = torch.randn(3, 256) * 1e6
    wanted = nn.functional.linear(x, int8_files.numbers(weight).float(), module.bias.float())
    in_bytes, in_halves = (product_of_fp32(x, module, policy) for policy in (AUTO, PRECISE))
    assert in_bytes.dtype is torch.float32 and 1e-3 < distance(in_bytes, wanted) < 0.02
    assert distance(in_halves, wanted) < 1e-3


def test_functions_on_weight_and_bias_are_applied() -> None:
    module, x = linear(), torch.randn(5, 256)
    module.weight_function, module.bias_function = [lambda weight: weight * 2], [lambda bias: bias + 1]
    wanted = nn.functional.linear(x, module.weight.float() * 2, module.bias.float() + 1)
    assert distance(product_of_fp32(x, module, AUTO), wanted) < 1e-3


@pytest.mark.parametrize("masked", [None, torch.bool, torch.float32])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_of_values_of_any_size(key_heads: int, masked: torch.dtype | None) -> None:
    q, k, v = torch.randn(2, 9, 4, 32), torch.randn(2, 11, key_heads, 32), torch.randn(2, 11, key_heads, 32)
    v[:, :, 1] *= 1e7
    mask = None
    if masked is not None:
        mask = torch.rand(2, 1, 9, 11) > 0.3
        mask = mask.logical_or(torch.arange(11) < 1)
        mask = mask if masked is torch.bool else (~mask).float() * torch.finfo(torch.float32).min
    found = attention_of_fp32(lambda *all_: attention(*all_, policy=AUTO), q, k, v, mask)
    across = (one.transpose(1, 2).double() for one in (q, k, v))
    told = mask if mask is None or masked is torch.bool else mask.double()
    wanted = nn.functional.scaled_dot_product_attention(*across, attn_mask=told, enable_gqa=True).transpose(1, 2)
    assert found.dtype is torch.float32
    for head in range(4):
        assert distance(found[:, :, head].double(), wanted[:, :, head]) < 2e-3


@pytest.mark.parametrize("of_each_head", [False, True], ids=["one mask", "a mask for each head"])
@pytest.mark.parametrize("key_heads", [6, 3, 1])
def test_attention_of_some_heads_at_a_time(key_heads: int, of_each_head: bool) -> None:
    """The halves of q, k, v and of the result take no more than they may, or those of one head of keys."""
    q, k, v = torch.randn(2, 9, 6, 32), torch.randn(2, 11, key_heads, 32), torch.randn(2, 11, key_heads, 32)
    mask = torch.rand(2, 6 if of_each_head else 1, 9, 11) > 0.3
    mask = mask.logical_or(torch.arange(11) < 1)
    asked: list[int] = []

    def attend(*given: torch.Tensor) -> torch.Tensor:
        asked.append(2 * sum(one.numel() for one in (*given[:3], given[0])))
        return attention(*given, policy=AUTO)

    whole = attention_of_fp32(attend, q, k, v, mask)
    (at_once,) = asked
    for most in (at_once, at_once - 1, at_once // 2, 1):
        asked.clear()
        assert distance(attention_of_fp32(attend, q, k, v, mask, most), whole) < 1e-3
        together = max(1, most // (at_once // key_heads))
        assert len(asked) == -(-key_heads // together) and (max(asked) <= most or together == 1)


def test_which_networks_are_narrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP32 on a card without BF16, unless a user asked for FP32."""
    card = torch.device("cuda", 0)
    monkeypatch.setattr(fp32_products, "_is_ours_without_bf16", lambda _device: True)
    assert narrows_on(card, torch.float32)
    assert not narrows_on(card, torch.bfloat16) and not narrows_on("cpu", torch.float32)
    monkeypatch.setattr(fp32_products.args, "fp32_unet", True)
    assert not narrows_on(card, torch.float32)
    monkeypatch.setattr(fp32_products.args, "fp32_unet", False)
    monkeypatch.setattr(fp32_products, "_is_ours_without_bf16", lambda _device: False)
    assert not narrows_on(card, torch.float32)


@pytest.mark.parametrize(
    ("fp16", "bf16", "ours"),
    [(True, False, True), (False, False, False), (True, True, False)],
    ids=["RTX 20", "GTX 16", "30"],
)
def test_which_cards_narrow(fp16: bool, bf16: bool, ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    management = fp32_products.comfy.model_management
    monkeypatch.setattr(fp32_products, "obstacle", lambda _device: None)
    monkeypatch.setattr(management, "should_use_fp16", lambda _device: fp16)
    monkeypatch.setattr(management, "should_use_bf16", lambda _device: bf16)
    assert fp32_products._is_ours_without_bf16.__wrapped__(torch.device("cuda", 0)) is ours
