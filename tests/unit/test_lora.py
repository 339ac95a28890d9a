"""Plain LoRA added in one pass: as near to the exact sum as stock's steps, for whatever is plain LoRA, and nothing else."""

from __future__ import annotations

from typing import Any

import comfy.lora
import pytest
import torch
from comfy.weight_adapter.lora import LoRAAdapter

from fusestream.fusion.stream import lora

pytestmark = pytest.mark.usefixtures("as_comfyui_runs")


def adapter(rank: int = 8, dtype: torch.dtype = torch.float16, alpha: float | None = None, size: float = 1.0) -> Any:
    source = torch.Generator().manual_seed(rank)
    up = torch.randn(48, rank, generator=source) * size * 0.02
    down = torch.randn(rank, 32, generator=source) * size
    return LoRAAdapter(set(), (up.to(dtype), down.to(dtype), alpha, None, None, None))


def patch(adapter: Any, strength: float = 1.0, **others: Any) -> tuple[Any, ...]:
    return (strength, adapter, others.get("of_model", 1.0), others.get("offset"), others.get("function"))


def weight() -> torch.Tensor:
    return torch.randn(48, 32, generator=torch.Generator().manual_seed(0)).mul_(0.1).half()


def one_pass(patches: list[Any], *, in_place: bool = True) -> torch.Tensor:
    found = lora.pairs_of(patches, weight())
    assert found is not None
    halves = [half for pair in found if (half := lora.halved(pair)) is not None]
    assert len(halves) == len(found)
    mine = weight()
    out = lora.added(mine, halves, in_place=in_place)
    assert (out.data_ptr() == mine.data_ptr()) == in_place and (in_place or torch.equal(mine, weight()))
    return out


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    "patches",
    [
        [patch(adapter())],
        [patch(adapter(alpha=2.0), -0.7)],
        [patch(adapter(), 0.0)],
        [patch(adapter(), 1.0), patch(adapter(16), -1.3), patch(adapter(4, alpha=1.0), 0.4)],
        [patch(adapter(dtype=torch.float32))],
        [patch(adapter(dtype=torch.bfloat16), 0.5)],
        [patch(adapter(dtype=torch.float32, size=1e-4), 1e7)],  # in fp16 little would be left of these factors
    ],
    ids=["one", "alpha, negative", "zero", "three", "fp32", "bf16", "small"],
)
def test_the_sum_is_as_near_to_the_exact_one_as_stocks(patches: list[Any], in_place: bool) -> None:
    got = one_pass(patches, in_place=in_place)
    stocks = comfy.lora.calculate_weight(patches, weight(), "key")
    exact = comfy.lora.calculate_weight(patches, weight().double(), "key", intermediate_dtype=torch.float64)
    size = float(exact.norm())
    error, theirs = (float((w.double() - exact).norm()) / size for w in (got, stocks))
    assert error <= 1.05 * theirs and error < 1e-3


@pytest.mark.parametrize(
    ("patches", "held"),
    [
        ([patch(adapter(), of_model=0.5)], weight()),
        ([patch(adapter(), offset=(0, 0, 24))], weight()),
        ([patch(adapter(), function=lambda w: w)], weight()),
        ([patch(("diff", (weight(),)))], weight()),
        ([patch(adapter()), patch(("diff", (weight(),)))], weight()),
        ([patch(adapter())], weight().T),  # another shape
        ([patch(adapter())], weight()[0]),
        ([patch(LoRAAdapter(set(), (*adapter().weights[:4], torch.ones(48, 1), None)))], weight()),
        ([patch(LoRAAdapter(set(), (*adapter().weights[:5], [64, 64])))], weight()),
    ],
    ids=["model's", "offset", "function", "diff", "with diff", "shape", "norm", "DoRA", "reshape"],
)  # fmt: skip
def test_all_else_is_stocks(patches: list[Any], held: torch.Tensor) -> None:
    assert lora.pairs_of(patches, held) is None


def test_factors_that_are_not_finite_are_stocks() -> None:
    up, down, *rest = adapter(dtype=torch.float32).weights
    up[3, 3] = torch.inf
    (pair,) = lora.pairs_of([patch(LoRAAdapter(set(), (up, down, *rest)))], weight()) or ()
    assert lora.halved(pair) is None
