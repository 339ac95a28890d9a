"""The products of stock's Linears: from files of 8-bit numbers and others, with what follows them, within what rounding allows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import comfy.ops
import gguf
import int8_files
import pytest
import torch
from torch import Tensor, nn

from fusestream.fusion.fused import block
from fusestream.fusion.weights import integer_weights, products
from fusestream.fusion.weights import operands as operands_module
from fusestream.fusion.weights.ggml_tensor import held
from fusestream.fusion.weights.integer_weights import IntegerWeights, integer_operands
from fusestream.fusion.weights.lora import Added, Pair
from fusestream.fusion.weights.operands import Weights, operands
from fusestream.fusion.weights.products import feed_forward, product
from fusestream.fusion.weights.storage import INT8_LAYOUT, Int8, storage_of
from fusestream.kernels_cuda import IntegerMatrix, KernelPolicy, KernelRefused, linear, rows_for, rows_to_int8
from fusestream.kernels_cuda.ops.matmul import integer_rule
from fusestream.kernels_cuda.ops.matmul.linear_operands import activate
from fusestream.memory import Extent

pytestmark = pytest.mark.usefixtures("as_comfyui_runs")
HALF = torch.float16
PRECISE, TURBO = KernelPolicy(), KernelPolicy.of(precision="turbo")
K, N = 640, 48
OPS: Any = comfy.ops.mixed_precision_ops({}, HALF)
TURNED = int8_files.Kind(True, 64)


half = int8_files.drawn


def of_file(kind: int8_files.Kind, n: int = N, k: int = K, seed: int = 1, *, bias: bool = True) -> Any:
    return int8_files.linear_of_file(kind, n, k, seed=seed, bias=bias)


def of_halves(n: int = N, k: int = K, dtype: torch.dtype = HALF, seed: int = 1) -> Any:
    return int8_files.linear_of_numbers(n, k, dtype, seed)


def taken(x: Tensor, module: Any, policy: KernelPolicy = TURBO) -> Any:
    with integer_operands(x, policy, module) as [found]:
        return found


def slack(x: Tensor, matrix: IntegerMatrix, weight: Tensor | None = None) -> Tensor:
    """By how much a product of 8-bit numbers may differ from the exact one, element by element: x' is off by half a step of its
    row at most, for each of the weight's numbers; and a weight that was rounded too, for each of those of x'."""
    rounded = rows_to_int8(x, rotation=matrix.rotation)
    numbers = matrix.numbers.double() * matrix.scales.reshape(-1, 1).double()
    found = rounded.scales.double()[..., None] / 2 * numbers.abs().sum(1)
    if weight is not None:
        of_x = (rounded.numbers.double().abs().sum(-1) * rounded.scales)[..., None]
        found = found + matrix.scales.double() / 2 * (of_x + rounded.scales.double()[..., None] / 2 * x.shape[-1])
    return found * 1.001


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none") -> Tensor:
    return activate(x.double() @ weight.double().t() + (0 if bias is None else bias.double()), activation)


def rounding(value: Tensor) -> Tensor:
    """Of a result to fp16."""
    return value.abs() * 2**-10 + 1e-6


# ------------------------------------------------------------------------------------------------- files of 8-bit numbers


@pytest.mark.parametrize("kind", [*int8_files.KINDS.values(), int8_files.Kind(True, 16), TURNED], ids=str)
def test_weights_become_halves_by_our_op(monkeypatch: pytest.MonkeyPatch, kind: int8_files.Kind) -> None:
    """Rounded once; stock turns back in fp32 products, and may be a rounding apart."""
    one = of_file(kind)
    stocks = one.weight.dequantize()
    for name in ("dequantize", "to"):
        monkeypatch.setattr(type(one.weight), name, lambda *_, **__: pytest.fail("by stock"))
    with operands(half(1, K), PRECISE, one) as [found]:
        assert found.matrix.dtype is HALF and torch.equal(found.matrix, int8_files.numbers(one.weight))
        assert found.bias is not None and torch.equal(found.bias, one.bias)
        apart = (found.matrix.double() - stocks.double()).abs()
        assert torch.all(apart <= (rounding(stocks.double()) if kind.rotation else 0))


@pytest.mark.parametrize(
    "changed",
    [{"convrot_groupsize": 1024}, {"convrot_groupsize": 128}, {"transposed": True}, {"scale": torch.ones(3)}],
    ids=lambda changed: next(iter(changed)),
)
def test_what_only_stock_knows_is_not_taken_as_it_lies(changed: dict[str, Any]) -> None:
    params = {"scale": torch.ones(N, 1), "convrot": True, "convrot_groupsize": 64, "transposed": False}
    weight: Any = SimpleNamespace(_layout_cls=INT8_LAYOUT, _qdata=torch.zeros(N, K, dtype=torch.int8))
    weight._params = SimpleNamespace(**params)
    assert Int8(weight).integers() is not None
    weight._params = SimpleNamespace(**params | changed)
    assert Int8(weight).integers() is None


@pytest.mark.parametrize("kind", int8_files.KINDS.values(), ids=int8_files.KINDS)
def test_turbo_takes_a_file_as_it_lies(kind: int8_files.Kind) -> None:
    one = of_file(kind)
    found = taken(half(1, K), one)
    assert isinstance(found, IntegerWeights) and found.matrix.numbers.data_ptr() == one.weight._qdata.data_ptr()
    assert found.matrix.rotation == (64 if kind.rotation else 0) and found.matrix.shape == (N, K)
    assert torch.equal(found.matrix.scales, one.weight._params.scale.reshape(-1)) and torch.equal(found.bias, one.bias)


@pytest.mark.parametrize("kind", int8_files.KINDS.values(), ids=int8_files.KINDS)
@pytest.mark.parametrize("activation", ["none", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(5, K), (2, 7, K)], ids=str)
def test_a_product_in_8_bits_is_as_near_as_rounding_x_is(kind: int8_files.Kind, activation: Any, shape: Any) -> None:
    one, x = of_file(kind), half(*shape)
    wanted = exact(x, int8_files.numbers(one.weight), one.bias, activation)
    found = product(x, one, TURBO, activation=activation)
    # GELU's slope is 1.13 at most. The halves that this is compared with are rounded themselves.
    halves = x.double().abs() @ int8_files.numbers(one.weight).double().abs().t() * 2**-11
    room = 1.13 * (slack(x, storage_of(one.weight).integers()) + halves) + rounding(wanted)
    assert found.dtype is HALF and torch.all((found - wanted).abs() <= room)
    assert not torch.equal(found, product(x, one, PRECISE, activation=activation))


def test_a_rotation_that_is_ignored_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    one, x = of_file(TURNED), half(5, K)
    wanted, room = exact(x, int8_files.numbers(one.weight), one.bias), slack(x, storage_of(one.weight).integers())
    int8 = Int8.integers
    monkeypatch.setattr(Int8, "integers", lambda storage: int8(storage)._replace(rotation=0))
    assert torch.any((product(x, one, TURBO) - wanted).abs() > 4 * room)


@pytest.mark.parametrize("policy", [PRECISE, KernelPolicy.of(precision="fast"), TURBO], ids=lambda p: p.precision)
def test_gate_and_residual_over_the_residual_itself(policy: KernelPolicy) -> None:
    one, x, residual, gate = of_file(TURNED), half(2, 7, K), half(2, 7, N, seed=3), half(2, 1, N, seed=4)
    value = product(x, one, policy).double()
    wanted = residual + gate * value
    found = product(x, one, policy, residual=residual, gate=gate)
    assert torch.all((found - wanted).abs() <= rounding(wanted) + gate.abs() * rounding(value))
    over = residual.clone()
    assert product(x, one, policy, residual=over, gate=gate, out=over) is over and torch.equal(over, found)


@pytest.mark.parametrize("policy", [PRECISE, TURBO], ids=lambda p: p.precision)
def test_a_feed_forward_is_its_two_products(policy: KernelPolicy) -> None:
    first, second = of_file(TURNED, n=96), of_file(int8_files.Kind(False), n=N, k=96, seed=5)
    x, residual, gate = half(2, 7, K), half(2, 7, N, seed=3), half(2, 1, N, seed=4)
    hidden = product(x, first, policy, activation="gelu_tanh")
    wanted = product(hidden, second, policy, residual=residual, gate=gate)
    assert torch.equal(feed_forward(x, first, second, policy, residual=residual, gate=gate), wanted)
    over = residual.clone()
    found = feed_forward(x, first, second, policy, residual=over, gate=gate, out=over)
    assert found.data_ptr() == over.data_ptr() and torch.equal(over, wanted)


def test_x_is_rounded_once_for_each_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = (TURNED, int8_files.Kind(True), TURNED, int8_files.Kind(False), int8_files.Kind(True, 16))
    several, x = [of_file(kind, seed=2 * i) for i, kind in enumerate(kinds)], half(2, 7, K)
    wanted = [product(x, one, TURBO) for one in several]
    turns: list[int] = []

    def counted(x: Tensor, weight: IntegerMatrix, *, policy: KernelPolicy) -> Any:
        turns.append(weight.rotation)
        return rows_for(x, weight, policy=policy)

    monkeypatch.setattr(products, "rows_for", counted)
    found = products.products(x, several, TURBO)
    assert turns == [64, 0, 16] and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("shape", [(2, 1600, K), (5, 300, K)], ids=str)
def test_long_x_is_rounded_a_few_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    """Of one of a batch, or several of them whole: the same numbers."""
    several, x = [of_file(TURNED), of_halves(n=44), of_file(int8_files.Kind(False), seed=5)], half(*shape)
    wanted = products.products(x, several, TURBO)
    sizes: list[int] = []

    def counted(x: Tensor, weight: IntegerMatrix, *, policy: KernelPolicy) -> Any:
        sizes.append(x.shape[:-1].numel())
        return rows_for(x, weight, policy=policy)

    monkeypatch.setattr(products, "rows_for", counted)
    monkeypatch.setattr(products, "ROUNDED_BYTES", 768 * K)
    found = products.products(x, several, TURBO)
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(found, wanted, strict=True))
    assert max(sizes) <= 768 and sum(sizes) == 2 * x.shape[:-1].numel() and len(sizes) > 4


def test_beside_one_in_8_bits_another_stays_in_fp16() -> None:
    """Each as it would alone: a weight of 44 rows is none that the kernels take."""
    some, x = [of_file(TURNED), of_halves(), of_file(TURNED, n=44)], half(7, K)
    found = products.products(x, some, TURBO)
    wanted = [product(x, one, policy) for one, policy in zip(some, (TURBO, PRECISE, PRECISE), strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    with integer_operands(x, TURBO, *some) as parts:
        assert [type(part) for part in parts] == [IntegerWeights, Weights, Weights]


# ------------------------------------------------------------------------------------------------------- weights as halves


def test_halves_that_lie_together_are_one_product_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    room, biases = half(3 * N, K), half(3 * N)
    several = [of_halves() for _ in range(3)]
    for i, one in enumerate(several):
        one.weight = nn.Parameter(room[i * N : i * N + N], requires_grad=False)
        one.bias = nn.Parameter(biases[i * N : i * N + N], requires_grad=False)
    calls: list[int] = []

    def counted(x: Tensor, weight: Tensor, *rest: Any, **others: Any) -> Tensor:
        calls.append(len(weight))
        return linear(x, weight, *rest, **others)

    monkeypatch.setattr(products, "linear", counted)
    for policy in (PRECISE, TURBO):
        calls.clear()
        found = products.products(half(2, 5, K), several, policy)
        assert calls == [3 * N] and [part.shape for part in found] == [(2, 5, N)] * 3
        assert torch.allclose(torch.cat(list(found), -1), linear(half(2, 5, K), room, biases), atol=1e-2)
    calls.clear()
    monkeypatch.setattr(products, "PACKED_ROWS", 9)
    apart = products.products(half(2, 5, K), several, PRECISE)
    assert calls == [N] * 3 and all(torch.equal(a, b) for a, b in zip(apart, found, strict=True))


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, torch.float8_e4m3fn])
def test_turbo_rounds_other_weights_for_enough_rows(dtype: torch.dtype) -> None:
    """To a scale for each row, turned in groups of 64, of which 640 has ten."""
    one, x = of_halves(dtype=dtype), half(2, integer_rule.LEAST_ROWS // 2, K)
    with operands(x, TURBO, one) as [halves]:
        weight = halves.matrix.clone()
    found = taken(x, one)
    assert isinstance(found, IntegerWeights) and found.matrix.rotation == 64
    assert found.matrix.scales.shape == (N,) and torch.equal(found.bias, one.bias.half())
    wanted = exact(x, weight, one.bias)
    room = slack(x, found.matrix, weight) + rounding(wanted)
    assert torch.all((product(x, one, TURBO) - wanted).abs() <= room)
    fewer = x[:, :-1]
    assert isinstance(taken(fewer, one), Weights)
    assert torch.equal(product(fewer, one, TURBO), product(fewer, one, PRECISE))


def test_a_packed_matrix_is_rounded_like_any_other() -> None:
    """ggml's blocks, as a streamed block of a GGUF file holds them: half first."""
    blocks = gguf.quants.quantize(half(N, K, seed=1).float().numpy() / K**0.5, gguf.GGMLQuantizationType.Q8_0)
    stored = torch.from_numpy(blocks).flatten()
    one = of_halves()
    one.weight = nn.Parameter(
        held(stored, Extent("w", "Q8_0", (N, K), 0, stored.numel()), HALF), requires_grad=False
    )  # fmt: skip
    x = half(integer_rule.LEAST_ROWS, K)
    weight = one.weight.dequantize()
    rounded = taken(x, one)
    assert isinstance(rounded, IntegerWeights)
    assert torch.equal(rounded.matrix.numbers, rows_to_int8(weight, rotation=64).numbers)
    wanted = exact(x, weight, one.bias)
    assert torch.all((product(x, one, TURBO) - wanted).abs() <= slack(x, rounded.matrix, weight) + rounding(wanted))
    assert torch.equal(product(x[:9], one, TURBO), linear(x[:9], weight, one.bias))


def test_a_bias_that_was_brought_outlives_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock brings weights through a buffer that the next one gets."""
    buffer = torch.zeros(N, K + 1, dtype=HALF)
    for place in (operands_module, integer_weights):
        monkeypatch.setattr(place, "is_here", lambda *_: False)
    monkeypatch.setattr(operands_module, "_lie_as_wanted", lambda *_: False)

    def cast(one: Any, **_: Any) -> tuple[Tensor, Tensor, None]:
        buffer[:, :K], buffer[:, K] = one.weight, one.bias
        return buffer[:, :K], buffer[:, K], None

    monkeypatch.setattr(comfy.ops, "cast_bias_weight", cast)
    monkeypatch.setattr(comfy.ops, "uncast_bias_weight", lambda *_: buffer.zero_())
    some = [of_halves(seed=seed) for seed in (1, 5)]
    with integer_operands(half(integer_rule.LEAST_ROWS, K), TURBO, *some) as found:
        for own, one in zip(found, some, strict=True):
            assert isinstance(own, IntegerWeights) and torch.equal(own.bias, one.bias)
            assert torch.equal(own.matrix.numbers, rows_to_int8(one.weight.data, rotation=64).numbers)


# ------------------------------------------------------------------------------------------------------------- functions


def lora() -> Added:
    return Added([Pair(half(N, 4, seed=7), half(4, K, seed=8), 0.02)])


@pytest.mark.parametrize("kind", int8_files.KINDS.values(), ids=int8_files.KINDS)
def test_a_lora_is_added_to_the_halves_of_an_int8_file(kind: int8_files.Kind) -> None:
    one, x = of_file(kind), half(integer_rule.LEAST_ROWS, K)
    before = one.weight._qdata.clone()
    patched = lora()(int8_files.numbers(one.weight))
    one.weight_function = [lora()]
    with operands(x, PRECISE, one) as [found]:
        assert torch.equal(found.matrix, patched)
    rounded = taken(x, one)
    assert isinstance(rounded, IntegerWeights) and rounded.matrix.rotation == 64, "whatever the file's was"
    assert torch.equal(rounded.matrix.numbers, rows_to_int8(patched, rotation=64).numbers)
    room = slack(x, rounded.matrix, patched) + rounding(wanted := exact(x, patched, one.bias))
    assert torch.all((product(x, one, TURBO) - wanted).abs() <= room)
    assert torch.equal(one.weight._qdata, before), "the file's own stays"
    assert isinstance(taken(x[:-1], one), Weights), "it is rounded for enough rows only"


def test_functions_of_other_nodes_get_fp32_and_biases_theirs() -> None:
    one, seen = of_file(TURNED), []
    one.weight_function = [lambda t: seen.append(t.dtype) or t * 2]
    one.bias_function = [lambda t: t + 1]
    with operands(half(1, K), PRECISE, one) as [found]:
        assert torch.equal(found.matrix, int8_files.numbers(one.weight) * 2) and seen == [torch.float32]
        assert found.bias is not None and torch.equal(found.bias, one.bias + 1)
    one.weight_function = []
    own = taken(half(1, K), one)
    assert torch.equal(own.bias, one.bias + 1) and own.matrix.numbers.data_ptr() == one.weight._qdata.data_ptr()


# ------------------------------------------------------------------------------------------------------------ the policy


@pytest.mark.parametrize("op", ["linear", "linear_", "linear_int8", "linear_int8_"])
def test_switched_off_a_product_is_one_of_halves(op: str) -> None:
    one, x = of_file(TURNED), half(7, K)
    off = KernelPolicy.of(precision="turbo", **{op: "off"})
    assert isinstance(taken(x, one, off), Weights)
    precise = KernelPolicy.of(**{op: "off"})
    assert torch.equal(product(x, one, off), product(x, one, precise))


def test_forced_it_says_why_it_cannot() -> None:
    with pytest.raises(KernelRefused, match=r"linear_int8 is forced on.*tensor is on the CPU"):
        product(half(7, K), of_file(TURNED), KernelPolicy.of(precision="turbo", linear_int8="on"))


def test_whose_a_files_weights_are() -> None:
    """Of 8-bit numbers they are ours, on whatever card; others that the card multiplies as they are stay stock's."""
    part: Any = SimpleNamespace(layout_type=INT8_LAYOUT, _full_precision_mm=False)
    assert block._as_stored(part) is None and block._as_stored(of_file(TURNED)) is None
    for layout in ("TensorCoreFP8E4M3Layout", "TensorCoreNVFP4Layout"):
        part.layout_type = layout
        assert block._as_stored(part) == "this card multiplies the file's quantised weights as they are"
    part.layout_type, part.pre_quant_scale = INT8_LAYOUT, torch.ones(1)
    assert block._as_stored(part) == "the file scales activations before its quantised weights"
