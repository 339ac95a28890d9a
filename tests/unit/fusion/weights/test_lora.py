"""Plain LoRA added in one pass: as near to the exact sum as stock's steps, for whatever is plain LoRA, and nothing else."""

from __future__ import annotations

from typing import Any

import comfy.lora
import comfy.ops
import pytest
import torch
from comfy.weight_adapter.lora import LoRAAdapter
from plain_device import PlainDevice

from fusestream.fusion.stream.blocks import Block
from fusestream.fusion.stream.lora_factors import Factors, Pairs, PatchRoute
from fusestream.fusion.weights import lora
from fusestream.fusion.weights.paged import Paged
from fusestream.memory import Ledger, Parcels, RamBudget

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


# -------------------------------------------------------------------------------------------------- factors of a block


def block_of(*dtypes: torch.dtype) -> Block:
    """One whose operations hold these types."""
    paged = []
    for number, dtype in enumerate(dtypes):
        operation = comfy.ops.manual_cast.Linear(32, 48, bias=False, dtype=torch.float16)
        stand_in = torch.nn.Parameter(torch.empty(48, 32, dtype=dtype, device="meta"), requires_grad=False)
        paged.append(Paged(f"{number}.weight", f"block.{number}.weight", operation, "weight", stand_in))
    return Block("block", torch.nn.Module(), tuple(paged))


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("held", "route", "on_the_way"),
    [
        (torch.float16, PatchRoute(one_pass=True), False),
        (torch.float16, PatchRoute(one_pass=False), None),
        (FP8, PatchRoute(one_pass=True), True),  # cast for each product anyway
        (FP8, PatchRoute(one_pass=True, streams=False), True),
        (FP8, PatchRoute(one_pass=False), None),  # in stock's steps
        (torch.float32, PatchRoute(one_pass=True), None),
    ],
)
def test_which_weights_have_their_lora_added_in_one_pass(held: torch.dtype, route: PatchRoute, on_the_way: Any) -> None:
    """on_the_way None: by stock's functions."""
    factors = Factors([block_of(held, held)])
    patches = {"block.1.weight": (patch(adapter()),)}
    found = factors.take(0, patches, route)
    assert found.keys() == patches.keys(), "of the others nothing changes"
    value = found["block.1.weight"]
    assert isinstance(value, Pairs) is (on_the_way is not None)
    assert on_the_way is None or value.on_the_way is on_the_way
    assert on_the_way is not None or comfy.lora.calculate_weight(value, weight(), "key").equal(
        comfy.lora.calculate_weight(patches["block.1.weight"], weight(), "key")
    )


def test_a_lora_of_which_a_factor_is_not_finite_is_stocks_as_a_whole() -> None:
    up, down, *rest = adapter(dtype=torch.float32).weights
    up[3, 3] = torch.inf
    bad = patch(LoRAAdapter(set(), (up, down, *rest)))
    factors = Factors([block_of(torch.float16)])
    found = factors.take(0, {"block.0.weight": (patch(adapter()), bad)}, PatchRoute(one_pass=True))
    assert not isinstance(found["block.0.weight"], Pairs) and len(found["block.0.weight"]) == 2


def test_a_block_is_formed_once_until_its_route_or_its_patches_change() -> None:
    factors = Factors([block_of(torch.float16)] * 2)
    in_one_pass, as_stock = (PatchRoute(one_pass) for one_pass in (True, False))
    patches, others = ({"block.0.weight": (patch(adapter(rank)),)} for rank in (4, 8))
    first = factors.take(0, patches, in_one_pass)["block.0.weight"]
    assert factors.take(0, others, in_one_pass)["block.0.weight"][0].up is first[0].up, (
        "who changes them drops the block"
    )
    factors.drop([1])
    assert factors.take(0, others, in_one_pass)["block.0.weight"][0].up is first[0].up
    factors.drop([0])
    assert factors.take(0, others, in_one_pass)["block.0.weight"][0].up.shape == (48, 8)
    assert not isinstance(factors.take(0, patches, as_stock)["block.0.weight"], Pairs), "another route"


@pytest.mark.parametrize(("share", "packed"), [(0.49, True), (0.51, False)])
def test_what_is_as_large_as_a_model_stays_in_ordinary_ram(share: float, packed: bool) -> None:
    """On a GPU a block's factors lie in pinned RAM, and come with its copy; not where they are half as large as the block."""
    device, ram = PlainDevice(), RamBudget(1 << 20)
    factors = Factors([block_of(torch.float16)])
    factors.parcels = Parcels(device, ram, Ledger())
    route, whole = PatchRoute(one_pass=False), 48 * 32 * 2
    difference = torch.randn(round(share * whole / 4))
    patches = {"block.0.weight": (patch(("diff", (difference,))),)}
    along = factors.along(0, patches, route)
    assert (along is not None) is packed and (ram.taken > 0) is packed
    if along is not None:
        along.done.set()  # the copy that should have brought it has failed
    with factors.of(0, patches, route) as found:
        assert torch.equal(found["block.0.weight"][0][1][1][0], difference)
    assert (ram.taken > 0) is packed
    factors.drop([0])
    factors.ask(0, patches, route)
    assert factors.along(0, patches, route) is None, "what was asked for is on its way already"
    factors.close()
    assert not ram.taken and factors.along(0, patches, route) is None
    device.stop()


def test_factors_become_fp16_by_powers_of_two_alone() -> None:
    """So that a number which fp16 holds in another magnitude is not rounded at all; and zeros are zeros."""
    numbers = torch.arange(-1024, 1024).float()
    for shift in (-60, -20, 0, 9, 40):
        factor = (numbers * 2.0**shift).view(64, 32)
        half, power = lora._halved(factor)
        assert half.dtype is torch.float16 and torch.equal(half.double() * power, factor.double())
        assert 1.0 <= float(half.abs().amax()) < 2.0, "near one: nothing of it is lost at either end"
    nothing, power = lora._halved(torch.zeros(4, 4))
    assert power == 1.0 and not nothing.any()
    empty, power = lora._halved(torch.zeros(0, 4))
    assert power == 1.0 and empty.shape == (0, 4)
    own = torch.ones(2, 2, dtype=torch.float16)
    assert lora._halved(own)[0] is own


def test_one_pass_is_for_gpus() -> None:
    """The CPU adds as stock does there, in fp32."""
    assert lora.serves(torch.device("cuda", 0)) and not lora.serves(torch.device("cpu"))
