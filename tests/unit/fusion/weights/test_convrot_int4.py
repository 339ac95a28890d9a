"""Files of `convrot_w4a4`: weights of 4 bits as stock's loader makes them, multiplied as such where the tier permits it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.ops
import comfy.quant_ops
import in_halves
import pytest
import torch
from scenes import Studio, distance, sample
from torch import Tensor, nn

from fusestream import checkpoints
from fusestream.checkpoints.quantise import quantise
from fusestream.fusion.fused import block
from fusestream.fusion.weights import storage
from fusestream.fusion.weights.integer_weights import IntegerWeights, integer_operands
from fusestream.fusion.weights.lora import Added, Pair
from fusestream.fusion.weights.operands import Weights, operands
from fusestream.fusion.weights.products import Part, gated_feed_forward, product, product_in_parts, products
from fusestream.fusion.weights.storage import INT4_LAYOUT, ConvRotInt4, product_bits, storage_of
from fusestream.kernels_cuda import (
    IntegerMatrix,
    KernelPolicy,
    linear_int4,
    linear_int4_pair,
    linear_int8,
    multiplies_integers,
    multiply,
    multiply_pair,
    rows_for,
    rows_to_int8,
    silu_mul,
)
from fusestream.kernels_cuda.ops.matmul import integer_rule
from fusestream.kernels_cuda.ops.quant.integer_rows import unpacked

pytestmark = pytest.mark.usefixtures("as_comfyui_runs")
HALF = torch.float16
PRECISE, AUTO, TURBO = (KernelPolicy.of(precision=tier) for tier in ("precise", "auto", "turbo"))
K, N, GROUP = 512, 48, 256
OPS: Any = comfy.ops.mixed_precision_ops({}, HALF)


@pytest.fixture(autouse=True)
def known() -> None:
    if "convrot_w4a4" not in comfy.quant_ops.QUANT_ALGOS:
        pytest.skip("this ComfyUI has no convrot_w4a4")


def half(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def tensors(n: int = N, seed: int = 1, group: int = GROUP, **note: Any) -> dict[str, Tensor]:
    """What a file has of a Linear, by stock's own function."""
    weight = half(n, K, seed=seed) / K**0.5
    stored = comfy.quant_ops.QuantizedTensor.from_float(weight, INT4_LAYOUT, convrot_groupsize=group)
    told = json.dumps({"format": "convrot_w4a4", "convrot_groupsize": group, **note})
    return stored.state_dict("weight") | {
        "bias": half(n, seed=seed + 1),
        "comfy_quant": torch.tensor(list(told.encode()), dtype=torch.uint8),
    }


def of_file(n: int = N, seed: int = 1, group: int = GROUP, *, bias: bool = True, **note: Any) -> Any:
    """Stock's Linear as its loader makes it of a file."""
    made = OPS.Linear(K, n, bias=bias, device="cpu", dtype=HALF)
    found = tensors(n, seed, group, **note)
    made.load_state_dict(found if bias else {name: one for name, one in found.items() if name != "bias"})
    return made


def matrix_of(module: Any) -> IntegerMatrix:
    found = storage_of(module.weight).integers()
    assert found is not None
    return found


def taken(x: Tensor, module: Any, policy: KernelPolicy = AUTO) -> Any:
    with integer_operands(x, policy, module) as [found]:
        return found


def test_a_file_is_read_as_4_bits_that_are_not_copied() -> None:
    one = of_file()
    storage, matrix = storage_of(one.weight), matrix_of(one)
    assert isinstance(storage, ConvRotInt4) and storage.is_writable and not storage.is_own_layout
    assert matrix.numbers.data_ptr() == one.weight._qdata.data_ptr() and matrix.numbers.shape == (N, K // 2)
    assert matrix.shape == (N, K) and (matrix.rotation, matrix.bits) == (GROUP, 4) and matrix.scales.shape == (N,)
    assert storage.few_rows() is None and storage.rows(torch.tensor([0])) is None


@pytest.mark.parametrize("group", [16, 64, 256])
def test_halves_are_what_stock_unpacks(group: int) -> None:
    one = of_file(group=group)
    wanted = one.weight.dequantize().float()
    storage = storage_of(one.weight)
    for found in (storage.matrix(PRECISE).float(), storage.wide(PRECISE)):
        assert (found - wanted).abs().max() <= 2**-10 * wanted.abs().max()


@pytest.mark.parametrize("policy", [AUTO, TURBO], ids=["auto", "turbo"])
def test_it_is_multiplied_in_4_bits(policy: KernelPolicy) -> None:
    one, x, residual, gate = of_file(), half(2, 7, K), half(2, 7, N, seed=4), half(N, seed=5)
    own, matrix = taken(x, one, policy), matrix_of(one)
    assert isinstance(own, IntegerWeights) and own.matrix.bits == 4
    more: Any = {"activation": "gelu_tanh", "residual": residual, "gate": gate}
    wanted = linear_int4(x, matrix.numbers, matrix.scales, one.bias, rotation=GROUP, **more)
    assert torch.equal(product(x, one, policy, **more), wanted)
    assert torch.equal(product(x, one, policy, **more, out=torch.empty_like(residual)), wanted)


def test_it_is_as_far_from_its_halves_as_stocks_product() -> None:
    one, x = of_file(), half(64, K)
    exact = x.float() @ one.weight.dequantize().float().t() + one.bias.float()
    ours, stocks = (found.float() - exact for found in (product(x, one, AUTO), one(x)))
    assert 0 < ours.norm() < 1.1 * stocks.norm()
    precise = product(x, one, PRECISE).float() - exact
    assert precise.norm() < 0.01 * stocks.norm()


@pytest.mark.parametrize("op", ["linear", "linear_", "linear_int4", "linear_int4_"])
def test_switched_off_it_is_one_of_halves(op: str) -> None:
    one, x = of_file(), half(7, K)
    assert isinstance(taken(x, one, KernelPolicy.of(precision="auto", **{op: "off"})), Weights)


def test_the_switch_of_8_bits_leaves_4_bits_alone() -> None:
    found = taken(half(7, K), of_file(), KernelPolicy.of(precision="auto", linear_int8="off"))
    assert isinstance(found, IntegerWeights)


def test_a_file_that_asks_for_inputs_of_8_bits_gets_them() -> None:
    one, other, x = of_file(linear_dtype="int8"), of_file(), half(7, K)
    own, matrix = taken(x, one), matrix_of(other)
    assert isinstance(own, IntegerWeights) and own.matrix.bits == product_bits(one) == 8 and product_bits(other) == 4
    wanted = linear_int8(x, unpacked(matrix.numbers), matrix.scales, one.bias, rotation=GROUP)
    assert torch.equal(product(x, one, AUTO), wanted)
    exact = product(x, one, PRECISE).float()
    off = [(found.float() - exact).norm() for found in (wanted, one(x), product(x, other, AUTO))]
    assert off[0] < 1.1 * off[1] and off[0] < 0.2 * off[2]


def test_a_card_without_products_of_4_bits_rounds_inputs_to_8(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ComfyUI does there: the products are as fast, and what is left of the error is a twentieth."""
    other, x = of_file(), half(7, K)
    monkeypatch.setattr(storage, "_multiplies_4_bits", lambda _device: False)
    own = taken(x, other)
    assert isinstance(own, IntegerWeights) and own.matrix.bits == product_bits(other) == 8
    exact = product(x, other, PRECISE).float()
    assert (product(x, other, AUTO).float() - exact).norm() < 0.2 * (other(x).float() - exact).norm()


def test_a_file_that_asks_for_full_precision_gets_halves() -> None:
    one, x = of_file(full_precision_matrix_mult=True), half(7, K)
    assert isinstance(taken(x, one), Weights)
    assert torch.equal(product(x, one, AUTO), product(x, one, PRECISE))


def test_sizes_count_numbers_and_not_bytes() -> None:
    x = half(4, 48)
    assert multiplies_integers(x, (16, 48), AUTO, rounds=False, is_stored=True, bits=8)
    assert not multiplies_integers(x, (16, 48), AUTO, rounds=False, is_stored=True, bits=4)
    assert not multiplies_integers(half(4, 64), (16, 64), PRECISE, rounds=False, is_stored=True, bits=4)


def test_x_is_rounded_for_each_size_of_integers() -> None:
    """4 and 8 bits beside each other, turned alike: each as it would alone."""
    four, x = of_file(), half(2, 7, K)
    eight = OPS.Linear(K, N, bias=True, device="cpu", dtype=HALF)
    eight.weight = nn.Parameter(
        comfy.quant_ops.QuantizedTensor.from_float(
            half(N, K, seed=9) / K**0.5, "TensorWiseINT8Layout", per_channel=True, convrot=True, convrot_groupsize=GROUP
        ),
        requires_grad=False,
    )
    eight.bias = nn.Parameter(half(N), requires_grad=False)
    found = products(x, [four, eight, four], AUTO)
    assert all(torch.equal(a, product(x, b, AUTO)) for a, b in zip(found, (four, eight, four), strict=True))


def test_parts_and_pairs() -> None:
    one, x = of_file(96), half(1, 7, K)
    matrix = matrix_of(one)
    gated, rest = x.new_empty(1, 7, 32), x.new_empty(1, 7, 32)
    product_in_parts(x, one, AUTO, [Part(gated, gated=True), Part(rest)])
    first, up = ((matrix.numbers[at : at + 32], matrix.scales[at : at + 32]) for at in (0, 32))
    assert torch.equal(gated, linear_int4_pair(x, *first, *up, rotation=GROUP, saturate=True))
    assert torch.equal(rest, product(x, one, AUTO)[..., 64:])
    gate, up_too = of_file(K, bias=False), of_file(K, seed=5, bias=False)
    last = of_file(bias=False)
    hidden = multiply_pair(x, matrix_of(gate), matrix_of(up_too))
    assert torch.equal(gated_feed_forward(x, gate, up_too, last, AUTO), multiply(hidden, matrix_of(last)))


def test_a_pair_of_4_and_8_bits_is_two_products() -> None:
    x, four = half(7, K), matrix_of(of_file())
    eight = IntegerMatrix(*rows_to_int8(half(N, K, seed=3), rotation=GROUP), GROUP)
    assert torch.equal(multiply_pair(x, four, eight), silu_mul(multiply(x, four), multiply(x, eight)))
    with pytest.raises(TypeError, match="linear_int8 multiplies rows that are Int8Rows, not Int4Rows"):
        multiply(rows_for(x, four), eight)


def test_a_lora_is_rounded_to_8_bits_with_what_it_changes() -> None:
    one, x = of_file(), half(integer_rule.LEAST_ROWS, K)
    before = one.weight._qdata.clone()
    halves = storage_of(one.weight).matrix(PRECISE)
    change = Added([Pair(half(N, 4, seed=7), half(4, K, seed=8), 0.02)])
    one.weight_function = [change]
    with operands(x, PRECISE, one) as [found]:
        assert torch.equal(found.matrix, change(halves.clone()))
    own = taken(x, one)
    assert isinstance(own, IntegerWeights) and own.matrix.bits == 8
    assert torch.equal(own.matrix.numbers, rows_to_int8(change(halves), rotation=GROUP).numbers)
    assert torch.equal(one.weight._qdata, before), "the file's own stays"
    assert isinstance(taken(x[:-1], one), Weights), "it is rounded for enough rows only"


def test_our_blocks_take_it_on_whatever_card() -> None:
    assert block._as_stored(of_file()) is None
    part: Any = SimpleNamespace(layout_type=INT4_LAYOUT, _full_precision_mm=False)
    assert block._as_stored(part) is None


def test_broken_files_name_their_layer() -> None:
    made, found = OPS.Linear(K, N, bias=True, device="cpu", dtype=HALF), tensors()
    found.pop("weight_scale")
    holder = nn.ModuleDict({"to_q": made})
    with pytest.raises(ValueError, match=r"Missing ConvRot W4A4 weight scale for layer to_q"):
        holder.load_state_dict({f"to_q.{name}": one for name, one in found.items()})


def test_a_wan_that_dev_py_wrote_is_multiplied_in_4_bits(tmp_path: Path) -> None:
    """A whole model, streamed: as far from its numbers as stock's products are, but for chance."""
    whole = checkpoints.write("wan_t2v", tmp_path, "fp16")
    quantise(whole, path := tmp_path / "w4a4.safetensors", "convrot_w4a4")
    scene = Studio(tmp_path).scene("wan_t2v")

    def latents(policy: KernelPolicy) -> Tensor:
        return sample(in_halves.load(path, policy), scene)

    precise, auto = latents(PRECISE), latents(AUTO)
    assert 1e-3 < distance(auto, precise) < 1.25 * distance(latents(KernelPolicy.of("off")), precise)
