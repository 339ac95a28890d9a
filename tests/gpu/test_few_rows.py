"""few_rows on the GPU, in both instruction classes, against float64."""

from __future__ import annotations

import os

import pytest
import torch
from gpu.support import HALF_STEP, SMALLEST, on
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from fusestream.kernels_cuda import few_rows
from fusestream.kernels_cuda.ops.matmul.few_rows import (
    PLAIN,
    RESIDENT,
    ROWS,
    SCALED,
    STEPS,
    TOKEN_ROWS,
    kernel_for,
    numbers,
    reference,
)
from fusestream.kernels_cuda.ops.quant.packed_blocks import BLOCK_TYPES

ENCODINGS = list(STEPS)
# Where the fp16 numbers of a block lie: random bytes there would be Inf and NaN.
HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def weight_of(encoding, n, k):
    """Any quants, with scales such as weights have."""
    if encoding == "F16":
        return torch.randn(n, k, device="cuda").half()
    if encoding == "BF16" or encoding.startswith("F8"):
        return torch.randn(n, k, device="cuda").to(PLAIN[encoding])
    if encoding == "I8":
        return torch.randint(-128, 128, (n, k), dtype=torch.int8, device="cuda")
    kind = BLOCK_TYPES[encoding]
    blocks = torch.randint(256, (n, k // kind.elements, kind.bytes), dtype=torch.uint8, device="cuda")
    for at in HALVES.get(encoding, (0,)):
        scales = torch.rand(n, k // kind.elements, 1, device="cuda") * 0.01 + 0.001
        blocks[..., at : at + 2] = scales.half().view(torch.uint8)
    return blocks.view(n, -1)


def operands(encoding, m, n, k, bias=None, added=False):
    scale = torch.rand(1 if encoding.startswith("F8") else n, device="cuda") * 0.01 if encoding in SCALED else None
    vector = None if bias is None else torch.randn(n, device="cuda").to(bias)
    residual = torch.randn(m, n, device="cuda").half() if added else None
    return torch.randn(m, k, device="cuda").half(), weight_of(encoding, n, k), scale, vector, residual


def check(encoding, tensors, isa):
    x, weight, scale, bias, residual = tensors
    got = few_rows(x, weight, encoding, scale=scale, bias=bias, residual=residual, policy=on(isa))
    want = reference(x.double(), weight, scale, bias, residual, encoding)
    size = x.double().abs() @ numbers(weight, encoding, scale, torch.float64).abs().t()
    # One rounding of the result; of Q6_K a rounding of each weight too. Tensor cores cut the sums' last bits off.
    each = HALF_STEP if encoding == "Q6_K" else 2.0**-17
    allowed = HALF_STEP * want.abs() * 1.001 + SMALLEST + each * size
    wrong = ((got.double() - want).abs() - allowed)[want.abs() < 65000]
    assert got.shape == want.shape and got.dtype is torch.float16
    assert wrong.numel() == 0 or wrong.max() <= 0, f"{encoding}: {wrong.max().item():.3g} over what is allowed"
    return got


@pytest.fixture
def isa(every_isa):
    return every_isa


@pytest.mark.sanitize
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("m", "n", "steps"), [(1, 1, 1), (3, 17, 2), (8, 16, 9), (9, 33, 3), (16, 15, 17)])
def test_shapes(isa, encoding, m, n, steps):
    """Fewer rows than a tile, fewer steps than warps, steps that do not start at multiples of 16 (Q6_K)."""
    k = steps * STEPS[encoding].elements
    for bias, added in ((None, False), (torch.float16, True), (torch.float32, False)):
        check(encoding, operands(encoding, m, n, k, bias, added), isa)


@pytest.mark.sanitize
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("steps", [8, 9, 15, 17])
def test_a_tokens_tiles(isa, encoding, m, steps):
    """Blocks that have no tile more than others, one, and more than the warps keep sums of; steps that fall to the warps evenly and
    not."""
    blocks = RESIDENT * torch.cuda.get_device_properties(0).multi_processor_count
    k = steps * STEPS[encoding].elements
    for tiles in (1, blocks, blocks + 1, 5 * blocks + 3):
        assert kernel_for(m, tiles * ROWS, steps, blocks // RESIDENT)[0] == TOKEN_ROWS
        check(encoding, operands(encoding, m, tiles * ROWS, k, torch.float16, True), isa)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("m", range(1, 17))
def test_every_number_of_rows(isa, encoding, m):
    check(encoding, operands(encoding, m, 200, 2560), isa)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("n", "k"), [(5120, 5120), (13824, 5120), (5120, 13824), (1024, 2560), (9728, 2560)])
def test_weights_of_models(isa, encoding, n, k):
    check(encoding, operands(encoding, 2, n, k, torch.float16, True), isa)


@given(
    encoding=st.sampled_from(ENCODINGS),
    m=st.integers(1, 16),
    n=st.integers(1, 300),
    steps=st.integers(1, 20),
    bias=st.sampled_from([None, torch.float16, torch.float32]),
    added=st.booleans(),
)
@seed(int(os.environ.get("FUSESTREAM_SEED") or 0))
@settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_the_definition(isa, encoding, m, n, steps, bias, added):
    check(encoding, operands(encoding, m, n, steps * STEPS[encoding].elements, bias, added), isa)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("rows", "n"), [(1, 200), (1, 208), (3, 200), (8, 200)])
@pytest.mark.parametrize("residual", [None, torch.float16, torch.float32])
def test_two_parts_joined_as_floats(isa, encoding, rows, n, residual):
    """Up to eight tokens of two parts each, as the stream of a language model adds them up."""
    whole = torch.randn(rows, 2560, device="cuda")
    x = torch.stack((whole.half(), (whole - whole.half()).half()))
    weight = weight_of(encoding, n, 2560)
    added = None if residual is None else torch.randn(rows, n, device="cuda").to(residual)
    options = {"residual": added, "factor": 64.0, "joined": True, "out_dtype": torch.float32}
    got = few_rows(x, weight, encoding, **options, policy=on(isa))
    want = reference(x.double(), weight, None, None, added, encoding, 64.0, True)
    size = 64 * (whole.double().abs() @ numbers(weight, encoding, None, torch.float64).abs().t())
    allowed = (HALF_STEP if encoding == "Q6_K" else 2.0**-17) * size + 1e-6
    assert got.dtype is torch.float32 and ((got.double() - want).abs() <= allowed).all()


def test_bf16_saturates(isa):
    """What fp16 cannot hold, as `to_half` has it."""
    weight = torch.zeros(3, 256, device="cuda", dtype=torch.bfloat16)
    weight[0, 0], weight[1, 0], weight[2, 0] = 1e6, -1e6, 1e-9
    x = torch.zeros(1, 256, device="cuda").half()
    x[0, 0] = 1
    got = few_rows(x, weight, "BF16", out_dtype=torch.float32, policy=on(isa))
    assert got.tolist() == [[65504.0, -65504.0, 0.0]]


@pytest.mark.parametrize("encoding", list(PLAIN)[1:])
@pytest.mark.parametrize("m", [1, 3, 9])
def test_a_weight_that_is_nan(isa, encoding, m):
    """Its row of the weight makes NaN, of either sign and wherever it stands; no other row does."""
    weight = weight_of(encoding, 48, 2560)
    nan = torch.tensor([torch.nan, -torch.nan], device="cuda").to(weight.dtype)
    weight[3, 0], weight[20, 1234], weight[47, 2559] = nan[0], nan[1], nan[0]
    x = torch.randn(m, 2560, device="cuda").half()
    x[:, 0] = 0
    got = few_rows(x, weight, encoding, policy=on(isa))
    assert got.isnan().all(0).nonzero().flatten().tolist() == [3, 20, 47]
    assert got.isnan().sum() == 3 * m


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_large_and_small_inputs(isa, encoding):
    """Sums are floats, whatever x's size."""
    x, weight, scale, bias, residual = operands(encoding, 4, 64, 2560)
    for size in (1e-4, 300.0):
        check(encoding, ((x * size).half(), weight, scale, bias, residual), isa)


def test_a_row_does_not_depend_on_its_neighbours(isa):
    for encoding in ENCODINGS:
        x, weight, scale, bias, _ = operands(encoding, 8, 40, 2560, torch.float16)
        many = few_rows(x, weight, encoding, scale=scale, bias=bias, policy=on(isa))
        for row in (0, 7):
            alone = few_rows(x[row], weight, encoding, scale=scale, bias=bias, policy=on(isa))
            assert torch.equal(alone, many[row])


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 24 * 2**30, reason="needs 24 GB")
def test_products_beyond_32_bits():
    weight = torch.zeros(1_100_000, 2560 // 256 * 210, device="cuda", dtype=torch.uint8)
    weight[-3:] = weight_of("Q6_K", 3, 2560)
    x = torch.randn(2, 2560, device="cuda").half()
    got = few_rows(x, weight, "Q6_K", policy=on(None))
    want = few_rows(x, weight[-16:].clone(), "Q6_K", policy=on(None))
    assert torch.equal(got[:, -3:], want[:, -3:])
    assert not got[:, :-3].any()
