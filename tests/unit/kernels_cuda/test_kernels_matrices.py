"""A product of whatever matrix it is given, and the rule when a tier rounds one to 8 bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusestream.kernels_cuda import (
    IntegerMatrix,
    KernelPolicy,
    best_rotation,
    linear,
    linear_int8,
    linear_int8_pair,
    mlp,
    multiplies_integers,
    multiply,
    multiply_,
    multiply_pair,
    multiply_pair_,
    rows_of,
    rows_to_int8,
    silu_mul,
)
from fusestream.kernels_cuda.binary.arch import int8_pays
from fusestream.kernels_cuda.ops.matmul import integer_rule

TURBO = KernelPolicy.of(precision="turbo")


def half(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def in_int8(weight: Tensor, rotation: int = 16) -> IntegerMatrix:
    return IntegerMatrix(*rows_to_int8(weight, rotation=rotation), rotation)


def test_either_matrix_is_multiplied_by_its_own_op() -> None:
    x, weight, bias, residual, gate = half(2, 5, 32), half(8, 32, seed=1), half(8), half(2, 5, 8), half(8)
    rest: Any = {"activation": "gelu_tanh", "residual": residual, "gate": gate, "scale": 0.5}
    rounded = in_int8(weight)
    of_halves = linear(x, weight, bias, **rest)
    of_int8 = linear_int8(x, rounded.numbers, rounded.scales, bias, rotation=16, **rest)
    assert not torch.equal(of_halves, of_int8)
    for matrix, wanted in ((weight, of_halves), (rounded, of_int8)):
        assert torch.equal(multiply(x, matrix, bias, **rest), wanted)
        out = residual.clone()
        multiply_(out, x, matrix, bias, **rest | {"residual": out})
        assert torch.equal(out, wanted)
    wide = multiply(x, rounded, bias, out_dtype=torch.float32)
    assert wide.dtype is torch.float32 and torch.equal(wide.half(), multiply(x, rounded, bias))


def test_rows_that_are_rounded_already_are_not_turned_again() -> None:
    x, matrix = half(3, 32), in_int8(half(8, 32, seed=1))
    rounded = rows_to_int8(x, rotation=16)
    assert torch.equal(multiply(rounded, matrix), multiply(x, matrix))
    out = torch.empty(3, 8).half()
    multiply_(out, rounded, matrix)
    assert torch.equal(out, multiply(x, matrix))
    for call in (lambda: multiply(rounded, half(8, 32)), lambda: multiply_(out, rounded, half(8, 32))):
        with pytest.raises(TypeError, match="weight of halves cannot be multiplied with Int8Rows"):
            call()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_either_matrix_of_a_feed_forward_may_be_of_8_bits(first: bool, second: bool) -> None:
    """In chunks or not, in place or not: the same numbers."""
    x, residual, gate = half(2, 1600, 32), half(2, 1600, 16, seed=1), half(2, 1, 16, seed=2)
    w_in, w_out, b_in, b_out = half(48, 32, seed=3), half(16, 48, seed=4), half(48, seed=5), half(16, seed=6)
    one, other = in_int8(w_in) if first else w_in, in_int8(w_out) if second else w_out
    hidden = multiply(x, one, b_in, activation="gelu_tanh")
    wanted = multiply(hidden, other, b_out, residual=residual, gate=gate)
    for chunk_bytes in (1 << 28, 1):
        for out in (None, residual.clone()):
            added = residual if out is None else out
            found = mlp(
                x, one, other, b_in, b_out, residual=added, gate=gate, out=out, chunk_bytes=chunk_bytes
            )  # fmt: skip
            assert torch.equal(found, wanted) and (out is None or found.data_ptr() == out.data_ptr())


def test_a_pair_may_be_of_8_bits_too() -> None:
    """Either half of it, or both as one weight; in chunks or not, and what follows it. Unlike numbers have SiLU alone."""
    x, gate, up, last = half(2, 1600, 32), half(48, 32, seed=1), half(48, 32, seed=2), half(16, 48, seed=3)
    both = in_int8(torch.cat((gate, up)))
    alike = rows_of(both, 0, 48), rows_of(both, 48, 96)
    hidden = linear_int8_pair(x, *alike[0][:2], *alike[1][:2], rotation=both.rotation)
    unlike = [(in_int8(gate), up), (gate, in_int8(up)), (in_int8(gate), in_int8(up)._replace(scales=torch.ones(1)))]
    for one, other in (alike, *unlike):
        apart = silu_mul(multiply(x, one), multiply(x, other))
        wanted = multiply(hidden if one is alike[0] else apart, in_int8(last))
        for chunk_bytes in (1 << 28, 1):
            assert torch.equal(mlp(x, one, in_int8(last), up=other, activation="silu", chunk_bytes=chunk_bytes), wanted)
    assert torch.equal(multiply_pair(x, both), hidden)
    room = torch.zeros(2, 1600, 60).half()
    multiply_pair_(room[..., 12:], rows_to_int8(x, rotation=both.rotation), both)
    assert torch.equal(room[..., 12:], hidden) and not room[..., :12].any()
    assert torch.equal(mlp(x, both, last, gated=True), multiply(hidden, last))
    with pytest.raises(ValueError, match="a pair of unlike numbers has activation silu"):
        mlp(x, in_int8(gate), last, up=up)


def test_rows_of_a_weight() -> None:
    """The product of some rows is a part of the product of all, whatever the numbers."""
    x, weight = half(3, 32), half(48, 32, seed=1)
    for matrix in (weight, in_int8(weight)):
        whole = multiply(x, matrix)
        assert torch.equal(torch.cat([multiply(x, rows_of(matrix, *at)) for at in ((0, 16), (16, 48))], -1), whole)


# ------------------------------------------------------------------------------------------------------------- the rule


def rows(count: int, k: int = 64, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(count, k, dtype=dtype, device="meta")


def test_turbo_rounds_a_weight_for_enough_rows() -> None:
    least = integer_rule.LEAST_ROWS
    for count, rounds, taken in ((least, True, True), (least - 1, True, False), (1, False, True)):
        assert multiplies_integers(rows(count), (8, 64), TURBO, rounds=rounds) is taken
    assert multiplies_integers(torch.empty(2, least // 2, 64, device="meta").half(), (8, 64), TURBO, rounds=True)


@pytest.mark.parametrize("precision", ["precise", "fast"])
def test_no_other_tier_rounds(precision: Any) -> None:
    for mode in ("auto", "on"):
        policy = KernelPolicy.of(mode, precision=precision)
        assert not multiplies_integers(rows(9999), (8, 64), policy, rounds=False)


@pytest.mark.parametrize("op", ["linear", "linear_", "linear_int8", "linear_int8_"])
@pytest.mark.parametrize("default", ["auto", "on"])
def test_who_switches_a_product_off_gets_none_in_8_bits(op: str, default: Any) -> None:
    policy = KernelPolicy.of(default, precision="turbo", **{op: "off"})
    assert not multiplies_integers(rows(9999), (8, 64), policy, rounds=False)


@pytest.mark.parametrize(
    ("n", "k", "dtype"), [(7, 64, torch.float16), (8, 72, torch.float16), (8, 1 << 16, torch.float16), (8, 64, torch.float32)]
)  # fmt: skip
def test_sizes_and_types_that_the_kernels_do_not_take_stay_in_fp16(n: int, k: int, dtype: torch.dtype) -> None:
    x = rows(9999, k, dtype)
    assert not multiplies_integers(x, (n, k), TURBO, rounds=False)
    forced = KernelPolicy.of(precision="turbo", linear_int8="on")
    assert multiplies_integers(x, (n, k), forced, rounds=True), "the op says why it cannot"


def test_auto_leaves_cards_to_cublas_that_gain_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    card: Any = SimpleNamespace(dtype=torch.float16, shape=torch.Size((9999, 64)), is_cuda=True, get_device=lambda: 0)
    on = KernelPolicy.of("on", precision="turbo")
    for capability in ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)):
        monkeypatch.setattr(integer_rule, "_capability", lambda _, found=capability: found)
        gains = capability not in ((9, 0), (10, 0), (10, 3))
        assert int8_pays(capability) is gains
        assert multiplies_integers(card, (8, 64), TURBO, rounds=True) is gains
        # FP16 products of a weight of integers begin with a copy of it.
        assert multiplies_integers(card, (8, 64), TURBO, rounds=False) is (gains or capability == (9, 0))
        assert multiplies_integers(card, (8, 64), on, rounds=True), "forced on any card"


def test_rows_are_turned_in_the_largest_groups_that_divide_them() -> None:
    found = {5120: 256, 13824: 256, 8960: 256, 640: 64, 48: 16, 20: 4, 6: 0}
    assert {k: best_rotation(k) for k in found} == found
