"""norm_to_int8 and to_int4 without a GPU: what is rounded, rows without numbers, and who serves what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusestream.kernels_cuda import (
    KernelPolicy,
    KernelRefused,
    norm_modulate,
    norm_to_int4,
    norm_to_int8,
    rows_to_int8,
)
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.norm.norm_to_integers import NORM_TO_INT8
from fusestream.kernels_cuda.ops.quant.integer_rows import unpacked
from fusestream.kernels_cuda.ops.quant.rotation import GROUPS, root, turned
from fusestream.kernels_cuda.registry import CudaCandidate, racing

OFF = KernelPolicy.of("off")
EPS = 1e-6
OPS = {8: norm_to_int8, 4: norm_to_int4}


def numbers_of(rows: Any) -> Tensor:
    return unpacked(rows.numbers) if rows.numbers.shape[-1] < 512 else rows.numbers


def exactly(x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None, group: int = 0) -> Tensor:
    wide = [None if t is None else t.double() for t in (x, scale, shift)]
    assert wide[0] is not None
    return turned(norm_modulate(wide[0], *wide[1:], eps=EPS), group) * root(group)


@pytest.mark.parametrize("bits", OPS)
@pytest.mark.parametrize("group", [0, *GROUPS])
@pytest.mark.parametrize("policy", [KernelPolicy(), OFF], ids=["reference", "stock"])
def test_a_norm_is_rounded_to_the_nearest(group: int, policy: KernelPolicy, bits: int) -> None:
    """Off by half a step at most, and the largest of a row is the largest number."""
    x, (scale, shift) = torch.randn(3, 5, 512).half() * 3 + 1, torch.randn(2, 3, 1, 512).half()
    x[1, 2, 7] = 400
    largest = 2 ** (bits - 1) - 1
    rows = OPS[bits](x, scale, shift, eps=EPS, rotation=group, policy=policy)
    assert rows.numbers.shape == (3, 5, 512 * bits // 8) and rows.scales.shape == (3, 5)
    numbers, exact = numbers_of(rows), exactly(x, scale, shift, group)
    assert (numbers.abs().amax(-1) == largest).all()
    off = (numbers.double() * rows.scales.double()[..., None] - exact).abs()
    slack = 1.001 if policy is not OFF else 1.5  # stock has the norm and the turned rows in fp16
    assert (off <= 0.5 * slack * rows.scales[..., None]).all()
    close = {"rtol": 5e-3 if policy is OFF else 1e-6, "atol": 0}
    torch.testing.assert_close(rows.scales.double(), exact.abs().amax(-1) / largest, **close)


def test_numbers_are_nearer_than_those_of_rounded_halves() -> None:
    x, (scale, shift) = torch.randn(1, 64, 512).half(), torch.randn(2, 1, 1, 512).half()
    halves = norm_modulate(x, scale, shift, eps=EPS)
    exact = exactly(x, scale, shift)
    once, twice = (
        float(((rows.numbers - exact / rows.scales.double()[..., None]).abs() > 0.5001).double().mean())
        for rows in (norm_to_int8(x, scale, shift, eps=EPS), rows_to_int8(halves))
    )
    assert once < 1e-4 and twice > 1e-3


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("policy", [KernelPolicy(), OFF], ids=["reference", "stock"])
def test_rows_without_numbers(kind: Any, policy: KernelPolicy) -> None:
    x = torch.randn(1, 5, 256).half()
    x[0, 0] = 0
    x[0, 1, 3], x[0, 2, 4], x[0, 3, 5] = torch.nan, torch.inf, -torch.inf
    numbers, scales = norm_to_int8(x, eps=EPS, kind=kind, rotation=64, policy=policy)
    assert scales[0, 0] == 1 and scales[0, 1:4].isnan().all() and not numbers[0, :4].any()
    assert scales[0, 4].isfinite() and numbers[0, 4].any()


def test_what_is_too_large_for_halves_has_numbers() -> None:
    x, weight = torch.randn(1, 4, 64).bfloat16(), torch.full((64,), 1e6).bfloat16()
    assert norm_to_int8(x, weight=weight, eps=EPS).scales.isfinite().all()


def room(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def asked(*tensors: Tensor | None) -> Call:
    return Call("norm_to_int8", (*tensors, *([None] * (5 - len(tensors)))), (EPS, "layer", 0))


SINGLE = torch.float32
IN_TWO_PASSES = {
    "a wide row": asked(room(1, 4, 6152)),
    "modulation and a weight": asked(room(1, 4, 64), room(1, 1, 64), None, room(64)),
    "fp32 twice": asked(room(1, 4, 64, dtype=SINGLE), room(1, 1, 64, dtype=SINGLE)),
}
BY_NONE = {
    "an odd width": (asked(room(1, 4, 12)), "k is 12, the kernel takes multiples of 8"),
    "a row too wide to be rounded": (asked(room(1, 1, 32776)), "the kernel holds rows of 32768 at most"),
    "two types": (asked(room(1, 4, 64), None, None, room(64), room(64, dtype=SINGLE)), "the kernels take one type"),
}


@pytest.mark.parametrize("call", IN_TWO_PASSES.values(), ids=IN_TWO_PASSES)
def test_what_one_pass_does_not_serve_two_do(call: Call) -> None:
    cuda = NORM_TO_INT8.op.candidates[0]
    assert isinstance(cuda, CudaCandidate)
    assert next(cuda.obstacles(call), None) is None and not cuda.ways(call)


@pytest.mark.parametrize(("call", "words"), BY_NONE.values(), ids=BY_NONE)
def test_what_the_kernels_do_not_serve(call: Call, words: str) -> None:
    cuda = NORM_TO_INT8.op.candidates[0]
    assert isinstance(cuda, CudaCandidate) and any(words in reason for reason in cuda.obstacles(call))


@pytest.mark.parametrize(("tokens", "races"), [(100, True), (32760, False)])
def test_what_takes_room_beside_a_long_video_takes_no_turn(tokens: int, races: bool) -> None:
    x = torch.empty(1, tokens, 5120, dtype=torch.float16, device="meta")
    call = Call("norm_to_int8", (x, None, None, None, None), (EPS, "layer", 256))
    names = [candidate.name for candidate in racing(call, NORM_TO_INT8.op.candidates)]
    assert names == ["cuda", *(["stock"] if races else [])]


def test_the_reason_is_told() -> None:
    with pytest.raises(KernelRefused, match="cuda: tensor is on the CPU"):
        norm_to_int4(room(1, 4, 64), eps=EPS, policy=KernelPolicy.of("on"))
