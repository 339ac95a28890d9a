"""few_rows without a GPU: every encoding against float64, operands, what the kernels take."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf import dequantize as by_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from bed.depth import examples
from fusestream.kernels_cuda import LEDGER, OPS, KernelPolicy, KernelRefused, few_rows
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.matmul.few_rows import (
    PLAIN,
    SCALED,
    STEPS,
    kernel_for,
    obstacles,
)
from fusestream.kernels_cuda.ops.quant.packed_blocks import BLOCK_TYPES

OFF = KernelPolicy.of("off")
# Where the fp16 numbers of a block lie: random bytes there would be Inf and NaN.
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)} | dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))


def weight_of(encoding, n, k, make=None):
    """Any quants, with scales such as weights have."""
    if encoding == "F16":
        return torch.randn(n, k, generator=make).half()
    if encoding == "BF16":
        return torch.randn(n, k, generator=make).bfloat16()
    if encoding.startswith("F8"):
        return torch.randn(n, k, generator=make).to(PLAIN[encoding])
    if encoding == "I8":
        return torch.randint(-128, 128, (n, k), generator=make, dtype=torch.int8)
    kind = BLOCK_TYPES[encoding]
    blocks = torch.randint(256, (n, k // kind.elements, kind.bytes), generator=make, dtype=torch.uint8)
    for at in HALVES.get(encoding, (0,)):
        scales = torch.rand(n, k // kind.elements, 1, generator=make) * 0.01 + 0.001
        blocks[..., at : at + 2] = scales.half().view(torch.uint8)
    return blocks.view(n, -1)


def by_numpy(weight, encoding, scale):
    """The weight as somebody else reads it."""
    if encoding in PLAIN:
        numbers = (weight.half() if encoding == "BF16" else weight).double()
        return numbers if scale is None else numbers * scale.double().reshape(-1, 1)
    return torch.from_numpy(by_gguf(weight.numpy(), GGMLQuantizationType[encoding]).astype(np.float64))


@settings(max_examples=examples(60), deadline=None)
@given(
    encoding=st.sampled_from([*BLOCK_TYPES, *PLAIN]),
    leading=st.sampled_from([(), (1,), (3,), (16,), (2, 5), (0,)]),
    n=st.integers(1, 20),
    steps=st.integers(1, 3),
    scaled=st.booleans(),
    bias=st.sampled_from([None, torch.float16, torch.float32]),
    added=st.booleans(),
    policy=st.sampled_from([KernelPolicy(), OFF]),
    seed=st.integers(0, 2**31),
)
def test_the_definition(encoding, leading, n, steps, scaled, bias, added, policy, seed):
    make = torch.Generator().manual_seed(seed)
    k = 256 * steps
    x, weight = torch.randn(*leading, k, generator=make).half(), weight_of(encoding, n, k, make)
    scale = torch.rand(*((n, 1) if n % 2 else (1,)), generator=make) if encoding in SCALED and scaled else None
    vector = None if bias is None else torch.randn(n, generator=make).to(bias)
    residual = torch.randn(*leading, n, generator=make).half() if added else None
    got = few_rows(x, weight, encoding, scale=scale, bias=vector, residual=residual, policy=policy)
    assert got.shape == (*leading, n)
    assert got.dtype is torch.float16
    numbers = by_numpy(weight, encoding, scale)
    want = x.double() @ numbers.t()
    size = x.double().abs() @ numbers.abs().t()
    for t in (vector, residual):
        want, size = (want, size) if t is None else (want + t.double(), size + t.double().abs())
    # Once rounded; the other way rounds the weight too, and after each sum.
    allowed = 2.0**-11 * want.abs() + 1e-6 * size if policy is not OFF else 2.0**-9 * size
    allowed = allowed + 2.0**-24
    finite = want.abs() < 65000
    assert ((got.double() - want).abs() <= allowed)[finite].all()


@settings(max_examples=examples(30), deadline=None)
@given(
    encoding=st.sampled_from([*STEPS]),
    rows=st.sampled_from([(), (1,), (1, 1), (3,)]),
    bias=st.booleans(),
    residual=st.sampled_from([None, torch.float16, torch.float32]),
    factor=st.sampled_from([1.0, 64.0]),
    policy=st.sampled_from([KernelPolicy(), OFF]),
)
def test_two_parts_joined_as_floats(encoding, rows, bias, residual, factor, policy):
    """What precision `precise` multiplies by: nothing is rounded but the operands."""
    whole = torch.randn(*rows, 256)
    x = torch.stack((whole.half(), (whole - whole.half()).half()))
    weight = weight_of(encoding, 5, 256)
    vector = torch.randn(5) if bias else None
    added = None if residual is None else torch.randn(*rows, 5).to(residual)
    given = {"bias": vector, "residual": added, "factor": factor, "joined": True, "out_dtype": torch.float32}
    got = few_rows(x, weight, encoding, **given, policy=policy)
    numbers = by_numpy(weight, encoding, None)
    want = factor * (whole.double() @ numbers.t())
    for t in (vector, added):
        want = want if t is None else want + t.double()
    assert got.dtype is torch.float32 and got.shape == (*rows, 5)
    assert (got.double() - want).abs().max() <= 1e-5 * factor * (whole.double().abs() @ numbers.abs().t() + 1).max()


def test_float64_stays():
    x, weight = torch.randn(2, 256).double(), weight_of("Q4_K", 3, 256)
    got = few_rows(x, weight, "Q4_K")
    assert got.dtype is torch.float64
    torch.testing.assert_close(got, x @ by_numpy(weight, "Q4_K", None).t(), rtol=1e-6, atol=1e-6)


X, W = torch.zeros(2, 256).half(), torch.zeros(3, 144, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("x", "weight", "encoding", "more", "message"),
    [
        (X, W, "Q9_K", {}, "encoding is 'Q9_K', expected one of"),
        (X, W.char(), "Q4_K", {}, r"weight: int8 \[3, 144\] is not uint8, as Q4_K is"),
        (X, W, "F16", {}, "weight: uint8 .* is not float16, as F16 is"),
        (X, W[:, :143], "Q4_K", {}, "has no rows of Q4_K blocks"),
        (X, W[0], "Q4_K", {}, r"weight: \[144\] is not \[n, k\]"),
        (X[:, :128], W, "Q4_K", {}, r"x: \[2, 128\] does not go with Q4_K rows of 256"),
        (X, W, "Q4_K", {"scale": torch.ones(3)}, r"scale: \[3\] .* but of Q4_K"),
        (X, torch.zeros(3, 256).char(), "I8", {"scale": torch.ones(2)}, r"scale: \[2\] is not one for each of 3 rows"),
        (X, W, "Q4_K", {"joined": True, "residual": torch.ones(2, 3)}, r"\[2, 3\] is not the result's shape \[3\]"),
        (torch.zeros(3, 256).half(), W, "Q4_K", {"joined": True}, r"x: \[3, 256\] is not \[2, \.\.\., 256\]"),
        (X, W, "Q4_K", {"out_dtype": torch.float64}, "out_dtype is float64, expected float32 or x's own"),
        (X, W, "Q4_K", {"factor": 3.0}, "scale is 3.0, expected a power of two"),
        (X, W, "Q4_K", {"bias": torch.ones(2)}, r"bias: \[2\] is not \[3\]"),
        (X, W, "Q4_K", {"residual": torch.ones(3, 2)}, r"residual: \[3, 2\] is not the result's shape \[2, 3\]"),
    ],
)
def test_wrong_operands_are_named(x, weight, encoding, more, message):
    for policy in (KernelPolicy(), OFF):
        with pytest.raises(ValueError, match=f"^few_rows: .*{message}|{message}"):
            few_rows(x, weight, encoding, **more, policy=policy)


@pytest.mark.parametrize(
    ("tensors", "encoding", "reason"),
    [
        ((X, weight_of("Q3_K", 3, 256), None, None, None), "Q3_K", "weights are Q3_K, the kernels take Q4_0"),
        ((X.float(), W, None, None, None), "Q4_K", "x is float32"),
        ((X, W, None, torch.ones(3).double(), None), "Q4_K", "bias is float64"),
        ((X, W, None, None, torch.ones(2, 3).double()), "Q4_K", "residual is float64"),
        ((X, torch.zeros(3, 288).byte()[:, ::2], None, None, None), "Q4_K", "weight is not contiguous"),
        ((torch.zeros(2, 264).half()[:, 8:], W, None, None, None), "Q4_K", "x is not contiguous"),
        ((torch.zeros(17, 256).half(), W, None, None, None), "Q4_K", "x has 17 rows, the kernels take up to 16"),
        (
            (X[:, :32].clone(), torch.zeros(3, 18).byte(), None, None, None),
            "Q4_0",
            "rows are 32 long, no multiple of 256",
        ),
        ((X[:1], torch.zeros(145).byte()[1:].view(1, 144), None, None, None), "Q4_K", "weight does not start"),
    ],
)
def test_what_the_kernels_do_not_take(tensors, encoding, reason):
    assert next(obstacles(Call("few_rows", tensors, (encoding, 1.0, False, None)))).startswith(reason)


def test_what_the_kernels_take():
    for encoding, step in STEPS.items():
        tensors = torch.zeros(16, step.elements).half(), weight_of(encoding, 5, step.elements), None, None, None
        assert not list(obstacles(Call("few_rows", tensors, (encoding, 1.0, False, None))))
        assert tensors[1].nbytes == 5 * step.bytes


def test_modes():
    LEDGER.clear()
    OPS["few_rows"].forget()
    few_rows(X, W, "Q4_K")
    assert [(r.op, r.reason) for r in LEDGER.refusals] == [("few_rows", "tensor is on the CPU")]
    with pytest.raises(KernelRefused, match="on the CPU"):
        few_rows(X, W, "Q4_K", policy=KernelPolicy.of("on"))


@pytest.mark.parametrize("encoding", ["Q6_K", "I8"])
def test_compile_and_registration(encoding):
    x, weight = torch.randn(2, 256).half(), weight_of(encoding, 4, 256)
    scale = torch.rand(4) if encoding == "I8" else None

    def product(x, weight, scale):
        return few_rows(x, weight, encoding, scale=scale, bias=torch.ones(4))

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight, scale), product(x, weight, scale), rtol=0, atol=0)
    arguments = (x, weight, scale, None, torch.randn(2, 4).half(), encoding, 1.0, False, None, KernelPolicy().token)
    torch.library.opcheck(OPS["few_rows"].traced, arguments)


@pytest.mark.parametrize(
    ("m", "n", "steps", "kernel"),
    [
        (1, 9728, 10, (2, 264)),
        (2, 2560, 38, (2, 160)),
        (2, 16, 8, (2, 1)),
        (2, 151936, 10, (2, 264)),
        (3, 9728, 10, (8, 608)),
        (2, 9729, 10, (8, 609)),
        (2, 9728, 7, (8, 608)),
        (9, 9728, 10, (16, 608)),
        (8, 17, 10, (8, 2)),
    ],
)
def test_which_kernel_and_how_many_blocks(m: int, n: int, steps: int, kernel: tuple[int, int]) -> None:
    """A token's blocks stay, as many as run at once on 132 multiprocessors; it takes whole tiles, of which each warp has a part."""
    assert kernel_for(m, n, steps, 132) == kernel
