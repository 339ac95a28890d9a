"""What an op is handed for a weight, wherever it lies and whatever another node made of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import comfy.ops
import int8_files
import pytest
import torch
from torch import Tensor, nn

from fusestream.fusion.weights import operands as module
from fusestream.fusion.weights.few_rows import few_products
from fusestream.fusion.weights.lora import Added, Pair
from fusestream.fusion.weights.operands import Weights, operands, packed
from fusestream.kernels_cuda import KernelPolicy

pytestmark = pytest.mark.usefixtures("as_comfyui_runs")
POLICY = KernelPolicy()
HALF = torch.float16


def linear(dtype: torch.dtype = HALF, *, bias: bool = True, seed: int = 0) -> Any:
    source = torch.Generator().manual_seed(seed)
    made = comfy.ops.manual_cast.Linear(4, 3, bias=bias, dtype=dtype)
    for name, shape in (("weight", (3, 4)), ("bias", (3,)))[: 1 + bias]:
        setattr(made, name, nn.Parameter(torch.randn(shape, generator=source).to(dtype), requires_grad=False))
    return made


def taken(*modules: Any, x: torch.dtype = HALF) -> list[Weights]:
    with operands(torch.zeros(1, 4, dtype=x), POLICY, *modules) as found:
        return [Weights(*(None if part is None else part.clone() for part in each)) for each in found]


def test_what_lies_as_it_is_wanted_is_taken_as_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        operands, "_made", lambda *_, **__: pytest.fail("a block asks some twenty times: this is no way")
    )
    one, other = linear(), linear(bias=False)
    no_weight = comfy.ops.manual_cast.LayerNorm(4, elementwise_affine=False)
    with operands(torch.zeros(1, 4, dtype=HALF), POLICY, one, other, no_weight) as found:
        assert found[0].weight is one.weight and found[0].bias is one.bias
        assert found[1].weight is other.weight and found[1].bias is None
        assert found[2] == (None, None)
        assert found[0].matrix is one.weight
        with pytest.raises(AssertionError, match="a product has a weight"):
            _ = found[2].matrix


@pytest.mark.parametrize(
    "stored", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64]
)
def test_other_types_become_fp16(stored: torch.dtype) -> None:
    one = linear(stored)
    (found,) = taken(one)
    assert torch.equal(found.matrix, one.weight.half()) and found.bias is not None
    assert torch.equal(found.bias, one.bias.half())


def test_too_large_a_weight_saturates() -> None:
    one = linear(torch.float32)
    one.weight.data[0, 0] = 1e6
    assert float(taken(one)[0].matrix[0, 0]) == 65504.0


def test_a_bias_of_another_type_is_seen() -> None:
    one = linear()
    one.bias = nn.Parameter(one.bias.float(), requires_grad=False)
    (found,) = taken(one)
    assert found.bias is not None and found.bias.dtype is HALF and torch.equal(found.matrix, one.weight)


@pytest.mark.parametrize("stored", [HALF, torch.bfloat16])
def test_for_another_input_weights_become_what_it_is(stored: torch.dtype) -> None:
    one = linear(stored)
    (found,) = taken(one, x=torch.float32)
    assert torch.equal(found.matrix, one.weight.float()) and found.matrix.dtype is torch.float32
    assert found.bias is not None and torch.equal(found.bias, one.bias.float())


@pytest.mark.parametrize("stored", [HALF, torch.float32])
@pytest.mark.parametrize("attribute", ["weight", "bias"])
def test_functions_of_other_nodes_compute_in_fp32_on_a_copy(stored: torch.dtype, attribute: str) -> None:
    """One after another; and the module's own stays as it is."""
    one, seen = linear(stored), []

    def add(t: Tensor) -> Tensor:
        seen.append(t.dtype)
        return t.add_(1.0)

    def double(t: Tensor) -> Tensor:
        return t.mul_(2.0)

    before = {name: getattr(one, name).clone() for name in ("weight", "bias")}
    setattr(one, attribute + "_function", [add, double])
    (found,) = taken(one)
    for name, own in before.items():
        changed = (own.float() + 1) * 2 if name == attribute else own
        got = getattr(found, name)
        assert got.dtype is HALF and torch.allclose(got.float(), changed.float(), atol=4e-3)
        assert torch.equal(getattr(one, name), own), "on a copy"
    assert attribute == "bias" or seen == [torch.float32]


def test_a_lora_on_the_way_is_added_in_fp16_to_a_copy() -> None:
    for stored in (HALF, torch.bfloat16):
        one = linear(stored)
        before = one.weight.clone()
        up, down = torch.randn(3, 2).half(), torch.randn(2, 4).half()
        one.weight_function = [Added([Pair(up, down, 0.5)])]
        (found,) = taken(one)
        exact = before.double() + 0.5 * up.double() @ down.double()
        assert torch.allclose(found.matrix.double(), exact, atol=1e-2) and torch.equal(one.weight, before)
        seen: list[torch.dtype] = []
        one.weight_function = [Added([]), lambda t, seen=seen: seen.append(t.dtype) or t]
        taken(one)
        assert seen == [torch.float32], "beside a function of another node that one's precision counts"


@pytest.mark.parametrize("stored", ["one scale", "rows", "plain"])
def test_scales_of_inputs_are_in_the_columns(stored: str) -> None:
    """As files of AWQ have them: also for a few rows, which else read weights as they are stored."""
    made = linear() if stored == "plain" else int8_files.linear_of_file(int8_files.KINDS[stored], 64, 256, bias=False)
    weight = made.weight if stored == "plain" else made.weight.dequantize()
    plain = weight.detach().clone()
    made.pre_quant_scale = nn.Parameter(1 + torch.rand(weight.shape[1]), requires_grad=False)
    wanted = plain.float() * made.pre_quant_scale
    [own] = taken(made)
    assert torch.allclose(own.matrix.float(), wanted, rtol=2e-3, atol=1e-6)
    h = torch.randn(2, weight.shape[1]).half()
    [product] = few_products(h, (made,), KernelPolicy())
    assert torch.allclose(product, h.float() @ wanted.T, atol=3e-2, rtol=1e-2)
    now = made.weight if stored == "plain" else made.weight.dequantize()
    assert torch.equal(now, plain), "not in place"


def test_of_several_that_are_brought_none_overwrites_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock brings them through a buffer that the next one gets."""
    buffer = torch.zeros(3, 5, dtype=HALF)
    monkeypatch.setattr(module, "is_here", lambda *_: False)
    monkeypatch.setattr(module, "_lie_as_wanted", lambda *_: False)
    casts: list[Any] = []

    def cast(one: Any, **how: Any) -> tuple[Tensor, Tensor, str]:
        casts.append(how)
        buffer[:, :4], buffer[:, 4] = one.weight, one.bias
        return buffer[:, :4], buffer[:, 4], "the stream"

    given: list[Any] = []
    monkeypatch.setattr(comfy.ops, "cast_bias_weight", cast)
    monkeypatch.setattr(comfy.ops, "uncast_bias_weight", lambda one, *what: given.append((one, what[-1])))
    modules = [linear(seed=seed) for seed in range(3)]
    with operands(torch.zeros(1, 4, dtype=HALF), POLICY, *modules) as found:
        for own, one in zip(found, modules, strict=True):
            assert torch.equal(own.matrix, one.weight) and own.bias is not None and torch.equal(own.bias, one.bias)
        assert given == [(one, "the stream") for one in modules[:2]], "the last one's buffer is in use"
    assert given == [(one, "the stream") for one in modules]
    assert {(how["dtype"], how["bias_dtype"], how["compute_dtype"]) for how in casts} == {(HALF, HALF, torch.float32)}
    modules[0].weight_function = [Added([])]
    with operands(torch.zeros(1, 4, dtype=HALF), POLICY, modules[0]):
        assert casts[-1]["dtype"] is torch.float32, "what patches it shall not round twice"


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_a_bias_that_is_brought_is_not_rounded_as_its_weight_is(
    stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_here", lambda *_: False)
    one = linear(stored)
    one.bias = nn.Parameter(linear(torch.float32).bias, requires_grad=False)
    (found,) = taken(one)
    assert torch.equal(found.matrix, one.weight.half())
    assert found.bias is not None and torch.equal(found.bias, one.bias.half())
    one.bias_function = [lambda t: t.add_(2.0**-6)]
    (changed,) = taken(one)
    assert changed.bias is not None and torch.equal(changed.bias, (one.bias + 2.0**-6).half())


# --------------------------------------------------------------------------------------------------------------- packed


def parts(*rows: int, bias: bool = True, dtype: torch.dtype = HALF) -> list[Weights]:
    """Of one memory, each right behind the one before."""
    whole, biases = torch.randn(sum(rows), 4).to(dtype), torch.randn(sum(rows)).to(dtype)
    found, at = [], 0
    for count in rows:
        own = nn.Parameter(whole[at : at + count], requires_grad=False)
        found.append(Weights(own, biases[at : at + count] if bias else None))
        at += count
    return found


@pytest.mark.parametrize("bias", [True, False])
def test_neighbours_are_one_matrix_and_nothing_is_copied(bias: bool) -> None:
    some = parts(3, 2, 5, bias=bias)
    one = packed(some)
    assert one is not None and one.matrix.data_ptr() == some[0].matrix.data_ptr()
    assert torch.equal(one.matrix, torch.cat([part.matrix for part in some])) and one.matrix.shape == (10, 4)
    if bias:
        assert one.bias is not None and torch.equal(one.bias, torch.cat([part.bias for part in some]))
    else:
        assert one.bias is None
    assert packed(some) is one, "looked for once"


def test_what_was_found_counts_as_long_as_they_lie_where_they_lay() -> None:
    some = parts(3, 2)
    assert packed(some) is not None
    moved = [some[0], Weights(nn.Parameter(some[1].matrix.clone(), requires_grad=False), some[1].bias)]
    assert packed(moved) is None and packed(some) is not None


def elsewhere(part: Weights) -> Weights:
    return Weights(nn.Parameter(part.matrix.clone(), requires_grad=False), part.bias)


def as_view(part: Weights, *shape: int, dtype: torch.dtype = HALF, rows_apart: bool = False) -> Weights:
    """The same memory, looked at in another way."""
    other = part.matrix.as_strided((3, 4), (8, 1)) if rows_apart else part.matrix.view(dtype).view(shape)
    return Weights(nn.Parameter(other, requires_grad=False), part.bias)


APART: dict[str, Callable[..., list[Weights]]] = {
    "turned": lambda a, b, c: [b, a, c],
    "a gap": lambda a, b, c: [a, c],
    "other memory": lambda a, b, c: [a, elsewhere(b), c],
    "no bias": lambda a, b, c: [a, Weights(b.weight, None), c],
    "the first without": lambda a, b, c: [Weights(a.weight, None), b, c],
    "no weight": lambda a, b, c: [a, Weights(None, None)],
    "nothing": lambda a, b, c: [Weights(None, None), b],
    "another bias": lambda a, b, c: [a, Weights(b.weight, b.bias.clone()), c],
    "another width": lambda a, b, c: [a, as_view(b, 8, 2)],
    "another type": lambda a, b, c: [a, as_view(b, 4, 4, dtype=torch.bfloat16)],
    "rows apart": lambda a, b, c: [a, as_view(b, rows_apart=True)],
}


@pytest.mark.parametrize("change", APART.values(), ids=APART)
def test_what_does_not_lie_side_by_side_is_taken_one_by_one(change: Callable[..., list[Weights]]) -> None:
    assert packed(change(*parts(4, 4, 4))) is None


def test_what_is_packed_keeps_no_module_alive() -> None:
    some = parts(3, 2)
    one, first = packed(some), weakref.ref(some[0].matrix)
    assert one is not None
    del some
    gc.collect()
    assert first() is None and one.matrix.shape == (5, 4)


def test_what_is_on_the_device_is_not_brought_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's way would copy it once more."""
    monkeypatch.setattr(comfy.ops, "cast_bias_weight", lambda *_, **__: pytest.fail("brought"))
    assert torch.equal(taken(one := linear(torch.bfloat16))[0].matrix, one.weight.half())
