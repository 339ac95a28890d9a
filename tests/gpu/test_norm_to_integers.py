"""norm_to_int8 and norm_to_int4 on the GPU, in both instruction classes: numbers within half a step of the norm in float64."""

from __future__ import annotations

import pytest
import torch
from gpu.support import HALF_STEP, WAYS, on
from gpu.test_norm_modulate import EPS, exact, inputs, of_two_bytes

from fusestream.kernels_cuda import norm_to_int4, norm_to_int8, rows_to_int4, rows_to_int8
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.launcher import card
from fusestream.kernels_cuda.ops.norm import norm_to_integers as op
from fusestream.kernels_cuda.ops.quant.integer_rows import unpacked
from fusestream.kernels_cuda.ops.quant.rotation import GROUPS, root, turned

# The function, its op, the largest number, bytes as numbers.
KINDS = {
    "int8": (norm_to_int8, op.NORM_TO_INT8, 127, lambda numbers: numbers),
    "int4": (norm_to_int4, op.NORM_TO_INT4, 7, unpacked),
}
IN_REGISTERS = (64, 1536, 3840, 5120, 6144)
IN_TWO_PASSES = (6400, 8200)  # ... and what lies at odd places


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def check(kind, found, want, group, what=""):
    """Half a step of the true numbers at most, and the scale that the largest of a row asks for. What fp32 arithmetic is off
    may move a number that lies between two."""
    largest, numbers_of = KINDS[kind][2:]
    wide = turned(want, group) * root(group)
    most = wide.abs().amax(-1)
    scales = torch.where(most == 0, torch.ones_like(most), most / largest)
    torch.testing.assert_close(found.scales.double(), scales, rtol=3e-5, atol=0, msg=lambda m: f"{what}: {m}")
    numbers = numbers_of(found.numbers)
    off = (numbers.double() * scales[..., None] - wide).abs() / scales[..., None]
    assert off.max() <= 0.501 + largest * 3e-5, f"{what}: {off.max()}"
    assert (numbers.abs().amax(-1) == largest)[most > 0].all(), f"{what}: a row without its largest number"


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("form", ["none", "batch", "frame", "token", "one"])
@of_two_bytes
def test_numbers_are_those_of_the_norm(isa, kind, form, norm, dtype):
    function = KINDS[kind][0]
    for d in (*IN_REGISTERS, *IN_TWO_PASSES):
        for of_rows in (dtype, torch.float32):
            x, scale, shift = inputs(2, 21, d, form, of_rows, x_dtype=dtype)
            for group in (0, *GROUPS):
                if group and d % group:
                    continue
                got = function(x, scale, shift, eps=EPS, kind=norm, rotation=group, policy=on(isa))
                if d in IN_REGISTERS:
                    check(kind, got, exact(x, scale, shift, kind=norm), group, f"{d} {of_rows} {group}")
                else:
                    near(kind, got, exact(x, scale, shift, kind=norm), group)


def near(kind, found, want, group):
    """What is rounded to fp16 in between: half a step, and the error of that."""
    largest, numbers_of = KINDS[kind][2:]
    wide = turned(want, group) * root(group)
    got = numbers_of(found.numbers).double() * found.scales.double()[..., None]
    allowed = wide.abs().amax(-1, keepdim=True) * (0.52 / largest + 4 * HALF_STEP)
    assert ((got - wide).abs() <= allowed).all()


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_weights_streams_and_places(isa, kind, dtype):
    """A lone weight and bias, streams of fp32, rows wherever they lie."""
    function = KINDS[kind][0]
    of_weights = torch.float16 if dtype is torch.float32 else dtype
    for way in WAYS:
        if way == "turned":  # elements of a row apart, of which norm_modulate makes nothing either
            continue
        for d in (64, 1536):
            x = WAYS[way](torch.randn(2, 37, d, device="cuda").to(dtype))
            weight, bias = (torch.randn(d, device="cuda").to(of_weights) for _ in range(2))
            for group in (0, 16, 64):
                got = function(x, None, None, weight, bias, eps=EPS, rotation=group, policy=on(isa))
                want = exact(x, None, None, weight, bias)
                if way in ("plain", "gaps", "every other row", "transposed batch"):
                    check(kind, got, want, group, f"{way} {d} {group}")
                else:
                    near(kind, got, want, group)


def test_cuts_and_repeats_agree(isa, kind):
    """However rows are cut, each is summed in one of two orders: the numbers are the same but where they lie between two."""
    of = KINDS[kind][1]
    x, scale, shift = inputs(2, 300, 3840, "batch")
    call = Call(of.unit, (x, scale, shift, None, None), (EPS, "layer", 256), on(isa))
    found = [of.plan(call, card(0, isa), way)(*call.tensors) for way in of.ways(call)]
    again = [of.plan(call, card(0, isa), way)(*call.tensors) for way in of.ways(call)]
    numbers_of = KINDS[kind][3]
    for (numbers, scales), (same, same_scales) in zip(found, again, strict=True):
        assert torch.equal(numbers, same) and torch.equal(scales, same_scales)
        off = (numbers_of(numbers).int() - numbers_of(found[0][0]).int()).abs()
        assert off.max() <= 1 and (off > 0).float().mean() < 1e-3
        torch.testing.assert_close(scales, found[0][1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_stays_in_its_row(isa, kind, value):
    function, _, _, numbers_of = KINDS[kind]
    x, scale, shift = inputs(2, 130, 1536, "batch")
    clean = function(x, scale, shift, eps=EPS, rotation=256, policy=on(isa))
    x[1, 7, 300] = value
    x[0, 3] = 0
    got = function(x, scale, torch.zeros_like(shift), eps=EPS, kind="rms", rotation=256, policy=on(isa))
    assert got.scales[1, 7].isnan() and not numbers_of(got.numbers[1, 7]).any()
    assert got.scales[0, 3] == 1 and not numbers_of(got.numbers[0, 3]).any()
    assert got.scales.isnan().sum() == 1
    again = function(x, scale, shift, eps=EPS, rotation=256, policy=on(isa))
    others = torch.ones(2, 130, dtype=torch.bool, device="cuda")
    others[1, 7] = others[0, 3] = False
    assert torch.equal(again.numbers[others], clean.numbers[others])


def test_one_huge_value_and_turned(isa, kind):
    """A column far outside the others costs a row without a rotation its digits, and with one nearly nothing."""
    function = KINDS[kind][0]
    x = torch.randn(1, 64, 2048, device="cuda").half()
    x[..., 5] = 65504
    want = exact(x, kind="rms")
    lost = {}
    for group in (0, 256):
        got = function(x, eps=EPS, kind="rms", rotation=group, policy=on(isa))
        check(kind, got, want, group)
        lost[group] = float(got.scales.mean())
    assert lost[256] < lost[0] / 10


def test_as_two_passes_but_for_a_rounding(isa, kind):
    function, rounded = KINDS[kind][0], rows_to_int8 if kind == "int8" else rows_to_int4
    x, scale, shift = inputs(1, 500, 5120, "batch")
    one = function(x, scale, shift, eps=EPS, rotation=256, policy=on(isa))
    two = rounded(exact(x, scale, shift).half(), rotation=256, policy=on(isa))
    off = (KINDS[kind][3](one.numbers).int() - KINDS[kind][3](two.numbers).int()).abs()
    assert off.max() <= 1 and (off > 0).float().mean() < 0.02
