"""linear, linear_, linear_pair and mlp without a GPU: cuBLAS, what is refused and why, chunks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bed.depth import examples
from fusestream.kernels_cuda import OPS, KernelPolicy, KernelRefused, linear, linear_, linear_pair, mlp
from fusestream.kernels_cuda.build import matrix
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.matmul import linear as op
from fusestream.kernels_cuda.ops.matmul import linear_torch
from fusestream.kernels_cuda.ops.matmul import mlp as mlp_file
from fusestream.kernels_cuda.ops.matmul.linear_operands import ACTIVATIONS
from fusestream.kernels_cuda.ops.matmul.linear_torch import (
    CublasEpilogue,
    CublasFused,
    CublasPair,
    CublasWide,
)

OFF = KernelPolicy.of("off")
ON = KernelPolicy.of("on")


def test_a_product_into_rows_that_follow_each_other_is_torchs():
    """With a bias and without, into part of a buffer whose rows follow each other, and into one whose rows do not."""
    x, weight, bias = torch.randn(1, 5, 8), torch.randn(6, 8), torch.randn(6)
    for added in (None, bias):
        room, apart = torch.zeros(1, 9, 6), torch.zeros(1, 5, 10)
        linear_(room[:, 2:7], x, weight, added, policy=OFF)
        linear_(apart[..., 2:8], x, weight, added, policy=OFF)
        want = torch.nn.functional.linear(x, weight, added)
        torch.testing.assert_close(room[:, 2:7], want)
        torch.testing.assert_close(apart[..., 2:8], want)
        assert not room[:, :2].any() and not room[:, 7:].any() and not apart[..., :2].any()


def test_the_result_has_the_streams_type():
    x, weight, stream = torch.randn(3, 8).half(), torch.randn(8, 8).half(), torch.randn(3, 8)
    for policy in (KernelPolicy(), OFF):
        assert linear(x, weight, policy=policy).dtype is torch.float16
        assert linear(x, weight, residual=stream, policy=policy).dtype is torch.float32
        assert linear(x, weight, residual=stream, out_dtype=torch.float16, policy=policy).dtype is torch.float16
        assert linear(x, weight, out_dtype=torch.float32, policy=policy).dtype is torch.float32


def test_scale_keeps_what_would_overflow():
    """Sums of 2^17 do not fit fp16, an eighth of them does; saturating keeps the largest number instead of infinity."""
    x, weight = torch.full((1, 32), 64.0).half(), torch.full((8, 32), 64.0).half()
    for policy in (KernelPolicy(), OFF):
        assert linear(x, weight, policy=policy).isinf().all()
        assert (linear(x, weight, scale=0.125, policy=policy) == 16384).all()
        assert (linear(x, weight, saturate=True, policy=policy) == 65504).all()
        assert (linear(x, -weight, saturate=True, policy=policy) == -65504).all()
        assert linear(x * torch.nan, weight, saturate=True, policy=policy).isnan().all()
        assert (linear_pair(x / 4, weight, weight, activation="relu", scale=2.0**-16, policy=policy) == 16384).all()


def test_in_place_over_the_residual():
    x, weight, stream = torch.randn(2, 5, 8), torch.randn(8, 8), torch.randn(2, 5, 8)
    gate = torch.randn(2, 5, 8)
    want = linear(x, weight, residual=stream, gate=gate, activation="silu")
    room = torch.zeros(2, 9, 8)
    linear_(room[:, 2:7], x, weight, residual=stream, gate=gate, activation="silu")
    torch.testing.assert_close(room[:, 2:7], want)
    assert not room[:, :2].any() and not room[:, 7:].any()
    linear_(stream, x, weight, residual=stream, gate=gate, activation="silu")
    torch.testing.assert_close(stream, want)


def test_wrong_pairs_and_places_are_named():
    x, weight = torch.zeros(2, 16), torch.zeros(8, 16)
    with pytest.raises(ValueError, match=r"up: \[6, 16\] is not the weight's shape \[8, 16\]"):
        linear_pair(x, weight, torch.zeros(6, 16))
    with pytest.raises(ValueError, match=r"weight: \[7, 16\] is not \[2 n, k\]"):
        linear_pair(x, torch.zeros(7, 16))
    with pytest.raises(ValueError, match=r"linear_: out: \[2, 9\] is not the result's shape \[2, 8\]"):
        linear_(torch.zeros(2, 9), x, weight)
    square = torch.zeros(16, 16)
    with pytest.raises(ValueError, match=r"linear_: out: \[2, 16\] is written, and overlaps x"):
        linear_(x, x, square)
    with pytest.raises(ValueError, match=r"is written, and overlaps residual"):
        room = torch.zeros(3, 16)
        linear_(room[:2], x, square, residual=room[1:])


def halves(*shape):
    return torch.zeros(*shape, dtype=torch.float16)


def call(x=None, weight=None, bias=None, residual=None, gate=None, options=("none", 1.0, False, None)):
    x = halves(4, 32) if x is None else x
    weight = halves(16, 32) if weight is None else weight
    return Call("linear", (x, weight, bias, residual, gate), options)


def into(out, x=None, residual=None, scale=1.0):
    """A call of linear_ that saturates, as all of an fp32 stream's do."""
    x = halves(4, 32) if x is None else x
    return Call("linear_", (out, x, halves(16, 32), None, residual, None), ("none", scale, True))


def test_every_obstacle_is_spoken():
    apart = halves(4, 70).as_strided((4, 32), (65, 1))
    turned = halves(32, 4).t()
    cases = [
        (call(x=halves(4, 32).float()), "x is float32"),
        (call(weight=halves(16, 32).float()), "weight is float32"),
        (call(bias=halves(16).double()), "bias is float64"),
        (call(residual=halves(4, 16).bfloat16()), "residual is bfloat16"),
        (call(gate=halves(16).bfloat16()), "gate is bfloat16"),
        (call(options=("none", 1.0, False, torch.bfloat16)), "the output is bfloat16"),
        (call(halves(4, 0), halves(16, 0)), "k is 0"),
        (call(halves(4, 36), halves(16, 36)), "k is 36, the kernels take multiples of 8"),
        (call(weight=halves(15, 32)), "n is 15, the kernels take multiples of 8"),
        (call(x=halves(32)), "x: a tensor of rank 1 has no rows"),
        (call(x=turned), "x: elements of a row are 4 apart"),
        (call(x=apart), "x: rows do not start at multiples of 16 bytes"),
        (call(x=halves(140)[3:131].view(4, 32)), "x: rows do not start at multiples of 16 bytes"),
        (call(weight=halves(32, 16).t()), "weight: elements of a row are 16 apart"),
        (call(residual=halves(16, 4).t()), "residual: elements of a row are 4 apart"),
        (call(bias=halves(32)[::2]), "bias is not contiguous"),
        (call(bias=halves(17)[1:]), "bias is not contiguous, or does not start"),
        (call(gate=halves(32)[::2]), "gate: elements of a row are 2 apart"),
        (call(gate=halves(4, 18)[:, :16]), "gate: rows do not start at multiples of 16 bytes"),
        (call(x=halves(1).expand(2, 2**31).expand(2, 2**31)[:, :32].expand(4, 2, 32)[:2]), "x: elements of a row"),
    ]
    for each, words in cases:
        assert words in next(op.obstacles(each), "nothing"), words
    for fine in (call(), call(halves(0, 32)), call(bias=halves(16), residual=halves(4, 16), gate=halves(4, 16))):
        assert next(op.obstacles(fine), None) is None
    with pytest.raises(KernelRefused, match="tensor is on the CPU"):
        linear(halves(4, 32), halves(16, 32), policy=ON)


def far(rows, columns, stride):
    """A shape with its rows far apart, without the memory."""
    return torch.empty(rows * stride, dtype=torch.float16, device="meta").as_strided((rows, columns), (stride, 1))


def test_what_exceeds_the_kernels_is_spoken():
    big = torch.empty(2**31, 8, dtype=torch.float16, device="meta")
    weight = torch.empty(8, 8, dtype=torch.float16, device="meta")
    assert "exceeds" in next(op.obstacles(call(big, weight)))
    assert "x: rows are 4294967296 elements apart" in next(op.obstacles(call(far(3, 8, 2**32), weight)))
    many = torch.empty(70000, 2, 9, 8, dtype=torch.float16, device="meta")[:, :, 0]
    assert next(op.obstacles(call(many, weight)), None) is None
    apart = torch.empty(70000, 3, 8, dtype=torch.float16, device="meta")[:, :2]
    assert "in 70000 batches exceed a grid" in next(op.obstacles(call(apart, weight)))
    pair = Call("linear_pair", (weight, far(8, 8, 16), far(8, 8, 24)), ("silu", 1.0, False, None))
    assert "weight and up have different strides" in next(op.obstacles(pair))


def test_cuts_fit_a_multiprocessor():
    """Eight warps by registers; shared memory is looked at in what was compiled (test_kernels_build.py)."""
    for cut in op.CUTS:
        assert cut.resident * cut.warps == 8
        assert mlp_file.CHUNK_ROWS % cut.rows == 0


def test_the_cut_follows_the_work():
    assert op.best_cut(32760, 8960, False, 34, "sm_80") == op.Cut(192, 128, 96)
    assert op.best_cut(32760, 8960, False, 34, "sm_75") == op.Cut(128, 256)
    assert op.best_cut(64, 8960, False, 34, "sm_80") == op.Cut(64, 128)
    assert op.best_cut(128 * 34, 256, False, 34, "sm_75") == op.Cut(128, 256)
    assert op.best_cut(32760, 8960, False, 34, "sm_80", "fast").precisions == ("precise", "fast")


def test_fast_is_an_offer():
    fast = Call("linear", call().tensors, call().options, KernelPolicy.of("auto", precision="fast"))
    assert [str(way) for way in op.ways(fast)][:3] == ["128x256 fast", "128x128 fast", "192x128 precise"]
    assert [str(way) for way in op.ways(call())] == [
        f"{cut} precise" for cut in ("192x128", "192x256", "128x256", "128x128", "64x128")
    ]
    assert op.shape_class(fast) != op.shape_class(call())
    turbo = Call("linear", call().tensors, call().options, KernelPolicy.of("auto", precision="turbo"))
    assert op.ways(turbo) == op.ways(fast) and op.shape_class(turbo) == op.shape_class(fast)


def test_shape_classes_tell_apart_what_costs_differently():
    calls = [
        call(),
        call(bias=halves(16)),
        call(bias=halves(16).float()),
        call(residual=halves(4, 16)),
        call(residual=halves(4, 16).float()),
        call(gate=halves(16)),
        call(gate=halves(4, 16)),
        call(options=("gelu", 1.0, False, None)),
        call(options=("none", 0.5, False, None)),
        call(options=("none", 1.0, False, torch.float32)),
        call(x=halves(4, 64)[:, :32]),
        call(weight=halves(24, 32)),
        call(x=halves(9, 32)),
        into(torch.zeros(4, 16)),
        into(torch.zeros(4, 24)[:, :16]),
    ]
    assert len({op.shape_class(each) for each in calls}) == len(calls)
    assert op.shape_class(call(x=halves(7, 32))) == op.shape_class(call(x=halves(8, 32)))


def test_what_cublas_is_asked(monkeypatch):
    """Which calls its epilogues serve, whatever the device."""
    monkeypatch.setattr(Call, "device", property(lambda _: torch.device("cuda", 0)))
    bias, stream = halves(16), halves(4, 16)
    options = {kind: (kind, 1.0, False, None) for kind in ACTIVATIONS}
    serves = [
        call(bias=bias, options=options["gelu_tanh"]),
        call(bias=bias, options=options["relu"]),
        call(residual=stream),
    ]
    refuses = [
        (call(bias=bias, options=options["gelu"]), "no epilogue for activation gelu"),
        (call(options=options["relu"]), "with a bias only"),
        (call(bias=bias, residual=stream), "a residual to a plain product only"),
        (call(residual=stream.float()), "the output is not float16"),
        (call(gate=bias), "cuBLAS has no gate"),
        (call(options=("relu", 0.5, False, None)), "scaled or saturated"),
        (call(bias=bias.float(), options=options["relu"]), "bias is not float16"),
        (call(x=halves(0, 32), bias=bias, options=options["relu"]), "nothing to compute"),
        (call(x=halves(4, 32).float()), "x and weight are not float16"),
    ]
    assert all(CublasEpilogue().refuse(each) is None for each in serves)
    for each, words in refuses:
        assert words in (CublasEpilogue().refuse(each) or "served"), words
    saturated = ("none", 1.0, True, None)
    assert CublasFused().refuse(call(residual=stream, options=saturated)) is None
    assert "scaled or saturated" in (CublasFused().refuse(call(bias=bias, options=saturated)) or "")
    assert "scaled or saturated" in (CublasEpilogue().refuse(call(residual=stream, options=saturated)) or "")
    assert CublasFused().refuse(call(options=options["gelu"])) is None
    assert CublasFused().refuse(call(residual=stream.float(), gate=bias)) is None
    assert "could overflow" in (CublasFused().refuse(call(residual=stream.float(), options=saturated)) or "")
    assert "nothing to fuse" in (CublasFused().refuse(call()) or "")
    assert "gate alone" in (CublasFused().refuse(call(gate=bias)) or "")
    assert "changes the type" in (CublasFused().refuse(call(options=("gelu", 1.0, False, torch.float32))) or "")


def test_which_wide_results_cublas_is_asked_for(monkeypatch):
    asked = call(options=("none", 1.0, True, torch.float32))
    assert "tensor is on the CPU" in (CublasWide().refuse(asked) or "")
    monkeypatch.setattr(Call, "device", property(lambda _: torch.device("cuda", 0)))
    wide, stream = asked.options, torch.zeros(4, 16)
    serves = [
        asked,
        call(options=("none", 0.3, False, torch.float32)),
        call(residual=stream),
        call(residual=halves(4, 16), options=wide),
        call(x=halves(4, 40)[:, :32], options=wide),
        call(x=halves(6, 32)[::3].unflatten(0, (2, 1)), options=wide),
        call(weight=halves(16, 33)[:, :32], options=wide),
        into(stream),
        into(stream, residual=stream, scale=64.0),
        into(stream, residual=torch.zeros(4, 24)[:, :16]),
    ]
    refuses = [
        (call(), "the output is not float32"),
        (call(options=("none", 1.0, False, torch.bfloat16)), "the output is not float32"),
        (call(bias=halves(16), options=wide), "to a plain product only"),
        (call(gate=halves(16), residual=stream), "to a plain product only"),
        (call(options=("relu", 1.0, False, torch.float32)), "to a plain product only"),
        (call(x=halves(4, 32).float(), options=wide), "x and weight are not float16"),
        (call(x=halves(0, 32), options=wide), "nothing to compute"),
        (call(x=halves(32, 4).t(), options=wide), "x: elements of a row are 4 apart"),
        (call(x=halves(2, 5, 32)[:, :3], options=wide), "x: rows are not equally far apart"),
        (call(x=halves(1, 32).expand(4, 32), options=wide), "x: rows overlap"),
        (call(weight=halves(32, 16).t(), options=wide), "weight: elements of a row are 16 apart"),
        (into(torch.zeros(4, 24)[:, :16]), "the output's rows do not follow each other"),
    ]
    for each in serves:
        assert CublasWide().refuse(each) is None
    for each, words in refuses:
        assert words in (CublasWide().refuse(each) or "served"), words
    monkeypatch.setattr(linear_torch, "WRITES_FLOATS", False)
    assert "has no product of float16 into float32" in (CublasWide().refuse(asked) or "served")


@pytest.fixture
def halves_into_floats(monkeypatch):
    """torch's product of halves into floats, which the CPU does not have. It is asked to add in place, and for no sums in fp16."""

    def baddbmm(added, x, weight, dtype, *, beta, alpha, out):
        assert added is out and out.dtype is dtype is torch.float32 and x.dtype is weight.dtype is torch.float16
        assert x.stride(2) == 1 and weight.stride(1) == 1, "torch would copy them"
        assert not torch.backends.cuda.matmul.allow_fp16_accumulation
        result = alpha * (x.float() @ weight.float())
        return out.copy_(result + beta * added if beta else result)

    monkeypatch.setattr(torch, "baddbmm", baddbmm)


@pytest.mark.usefixtures("halves_into_floats")
@pytest.mark.parametrize("lies", ["plain", "apart", "one row"])
def test_what_cublas_makes_of_a_wide_result(lies):
    """A new one, one with a residual, and one in place of it; products beyond fp16's range."""
    x = {
        "plain": torch.randn(2, 5, 16).half(),
        "apart": torch.randn(2, 5, 40).half()[..., 8:24],
        "one row": torch.randn(9, 16).half()[::4][1:2],
    }[lies]
    x *= 1000  # in place: its rows stay where they are
    weight, stream = (torch.randn(24, 19).half() * 1000)[:, :16], torch.randn(*x.shape[:-1], 24) * 1e6
    near = {"rtol": 1e-5, "atol": 1.0}  # of sums of magnitudes of some 10^7
    for residual in (None, stream, stream.half().clamp(-6e4, 6e4)):
        for scale in (1.0, 0.3):
            want = op.reference(x, weight, None, residual, None, "none", scale, True, torch.float32)
            assert want.abs().max() > 65504
            tensors, options = (x, weight, None, residual, None), ("none", scale, True, torch.float32)
            got = CublasWide().prepare(Call("linear", tensors, options))(*tensors)
            assert got.is_contiguous() and got.shape == want.shape
            torch.testing.assert_close(got, want, **near)
            out = torch.full_like(want, torch.nan)
            CublasWide().prepare(Call("linear_", (out, *tensors), options[:3]))(out, *tensors)
            torch.testing.assert_close(out, want, **near)
    want = op.reference(x, weight, None, stream, None, "none", 0.3, True, None)
    tensors = stream, x, weight, None, stream, None
    CublasWide().prepare(Call("linear_", tensors, ("none", 0.3, True)))(*tensors)
    torch.testing.assert_close(stream, want, **near)


@pytest.mark.usefixtures("halves_into_floats")
def test_sums_in_fp16_are_taken_back_for_a_wide_result(monkeypatch):
    """Also where they were allowed after the plan was made, and where the product fails."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_accumulation
    tensors = torch.randn(4, 32).half(), torch.randn(16, 32).half(), None, None, None
    plan = CublasWide().prepare(call(*tensors, options=("none", 1.0, False, torch.float32)))
    try:
        matmul.allow_fp16_accumulation = True
        torch.testing.assert_close(plan(*tensors), tensors[0].float() @ tensors[1].float().t())
        assert matmul.allow_fp16_accumulation
        monkeypatch.setattr(torch, "baddbmm", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            plan(*tensors)
        assert matmul.allow_fp16_accumulation
    finally:
        matmul.allow_fp16_accumulation = before


def test_which_pairs_cublas_is_asked_for(monkeypatch):
    monkeypatch.setattr(Call, "device", property(lambda _: torch.device("cuda", 0)))
    x, weight = halves(4, 32), halves(32, 32)

    def pair(activation="silu", scale=1.0, saturate=False, dtype=None, weight=weight, up=None):
        return Call("linear_pair", (x, weight, up), (activation, scale, saturate, dtype))

    for fine in (pair(), pair(saturate=True), pair(scale=0.25), pair(dtype=torch.float32), pair(up=weight)):
        assert CublasPair().refuse(fine) is None
    assert CublasPair().refuse(Call("linear_pair_", (halves(4, 16), x, weight, None), ("silu", 1.0, True))) is None
    for other, words in (
        (pair("gelu_tanh"), "activation gelu_tanh"),
        (pair(scale=3.0), "powers of two"),
        (pair(dtype=torch.bfloat16), "the output is bfloat16"),
        (pair(weight=weight.float()), "are not float16"),
    ):
        assert words in (CublasPair().refuse(other) or "served"), words


@pytest.mark.parametrize("up_apart", [True, False])
@pytest.mark.parametrize("written", [True, False])
def test_what_cublas_makes_of_a_pair(up_apart, written, monkeypatch):
    """Its plan, with the passes' references in place of their kernels."""
    monkeypatch.setattr(KernelPolicy, "mode", lambda *_: "auto")
    x, weight = torch.randn(2, 5, 16).half(), torch.randn(24, 16).half()
    both = (weight[:12], weight[12:]) if up_apart else (weight, None)
    out = torch.zeros(2, 5, 20).half()
    given_ = (out[..., 8:], x, *both) if written else (x, *both)
    asked = Call(
        "linear_pair_" if written else "linear_pair", given_, ("silu", 0.5, True, *(() if written else (None,)))
    )
    found = CublasPair().prepare(asked)(*given_)
    found = out[..., 8:] if written else found
    torch.testing.assert_close(found, linear_pair(x, weight, scale=0.5, saturate=True), rtol=4e-3, atol=4e-3)


def test_off_is_stock():
    """`off` takes the first candidate that is not ours."""
    fused = "cublas + fused pass"
    single = ["cublas epilogue", fused, "cublas fp32"]
    ops = {"linear": single, "linear_": single, "linear_pair": [fused], "linear_pair_": [fused]}
    for name, rest in ops.items():
        assert [c.name for c in OPS[name].candidates] == ["cuda", "stock", *rest]


def test_struct_and_enum_mirror_the_source():
    source = (matrix.SOURCES / "linear_params.cuh").read_text(encoding="utf-8")
    shared = (matrix.SOURCES / "eight.cuh").read_text(encoding="utf-8")
    listed = shared.split("enum Activation {")[1].split("}")[0]
    names = [name.strip() for name in listed.split(",")]
    assert names == ["kIdentity", "kGeluErf", "kGeluTanh", "kSilu", "kRelu"] and len(names) == len(ACTIVATIONS)
    body = source.split("struct LinearParams {")[1].split("};")[0]
    places = [body.index(field) for field in ("x;", "weight;", "up;", "bias;", "residual;", "gate;", "out;")]
    assert places == sorted(places)


def test_empty_cases():
    for policy in (KernelPolicy(), OFF):
        assert linear(halves(0, 32), halves(16, 32), policy=policy).shape == (0, 16)
        assert linear(halves(2, 0, 32), halves(16, 32), policy=policy).shape == (2, 0, 16)
        assert linear(halves(4, 32), halves(0, 32), policy=policy).shape == (4, 0)
        assert not linear(halves(4, 0), halves(16, 0), policy=policy).any()


@given(
    sizes=st.tuples(st.integers(1, 2), st.sampled_from([1, 767, 768, 769, 1700])),
    paired=st.booleans(),
    gate=st.sampled_from(["none", "all", "frames", "tokens"]),
    residual=st.booleans(),
    chunk=st.sampled_from([1, 768 * 32 * 2 * 2, 2**30]),
)
@settings(max_examples=examples(40), deadline=None)
def test_mlp_does_not_depend_on_its_chunks(sizes, paired, gate, residual, chunk):
    b, s = sizes
    x, w_in, w_out = torch.randn(b, s, 16).double(), torch.randn(32, 16).double(), torch.randn(8, 32).double()
    up = torch.randn(32, 16).double() if paired else None
    options = {"activation": "gelu_tanh", "up": up}
    if residual:
        options["residual"] = torch.randn(b, s, 8).double()
    frames = {"all": 1, "frames": min(3, s), "tokens": s}
    if gate != "none":
        options["gate"] = torch.randn(b, frames[gate], 1, 8).double()
    b_in = None if paired else torch.randn(32).double()
    b_out = torch.randn(8).double()
    got = mlp(x, w_in, w_out, b_in, b_out, **options, hidden_scale=0.25 if paired else 1.0, chunk_bytes=chunk)
    hidden = (
        linear_pair(x, w_in, up, activation="gelu_tanh") if paired else linear(x, w_in, b_in, activation="gelu_tanh")
    )
    want = linear(hidden, w_out, b_out, residual=options.get("residual"), gate=options.get("gate"))
    torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)


def test_mlp_says_what_it_cannot():
    x, w = torch.randn(2, 8), torch.randn(8, 8)
    with pytest.raises(ValueError, match=r"mlp: hidden_scale is 0.5"):
        mlp(x, w, w, hidden_scale=0.5)
    with pytest.raises(ValueError, match=r"mlp: b_in: \[8\]"):
        mlp(x, w, w, torch.randn(8), up=w)
    with pytest.raises(ValueError, match=r"mlp: b_in: \[8\]"):
        mlp(x, w, w, torch.randn(8), gated=True)
    with pytest.raises(ValueError, match=r"mlp: gated, and up is given"):
        mlp(x, w, w, up=w, gated=True)


@given(
    sizes=st.tuples(st.integers(1, 2), st.sampled_from([1, 768, 1700])),
    chunk=st.sampled_from([1, 2**30]),
    strided=st.booleans(),
)
@settings(max_examples=examples(12), deadline=None)
def test_a_gated_mlp_has_both_halves_in_one_weight(sizes, chunk, strided):
    b, s = sizes
    x, w_in, w_out = torch.randn(b, s, 16).double(), torch.randn(24, 16).double(), torch.randn(8, 12).double()
    stream, gate = torch.randn(b, s, 8).double(), torch.randn(b, 1, 8).double()
    want = linear(linear_pair(x, w_in), w_out, residual=stream, gate=gate)
    torch.testing.assert_close(mlp(x, w_in, w_out, gated=True, residual=stream, gate=gate, chunk_bytes=chunk), want)
    room = torch.zeros(b, s + 3, 8).double()
    out = room[:, 1 : s + 1] if strided else torch.empty(b, s, 8).double()
    out.copy_(stream)
    mlp(x, w_in, w_out, gated=True, residual=out, gate=gate, out=out, chunk_bytes=chunk)
    torch.testing.assert_close(out, want)
    assert not room[:, 0].any() and not room[:, s + 1 :].any()


def test_a_saturating_mlp_stays_finite():
    """Both what lies between, and what comes out."""
    x, w = torch.full((1, 2, 16), 30.0).half(), torch.full((32, 16), 30.0).half()
    w_out = torch.full((8, 16), 30.0).half()
    plain, kept = (mlp(x, w, w_out, gated=True, residual=x[..., :8], saturate=kept) for kept in (False, True))
    assert plain.isinf().all() and (kept == 65504).all()
    assert (mlp(x, w, -w_out, gated=True, residual=x[..., :8], saturate=True) == -65504).all()


def test_chunks_are_whole_tiles():
    assert mlp_file.most_rows(8960, 256 * 2**20) % mlp_file.CHUNK_ROWS == 0
    assert mlp_file.most_rows(13824, 1) == mlp_file.CHUNK_ROWS
    assert mlp_file.most_rows(13824, 256 * 2**20) * 13824 * 2 <= 256 * 2**20


@given(batches=st.integers(0, 9), tokens=st.integers(0, 9000), tiles=st.integers(1, 6))
def test_parts_cover_each_token_once_and_lie_in_one_piece(batches, tokens, tiles):
    most = tiles * mlp_file.CHUNK_ROWS
    seen = torch.zeros(batches, tokens, 1, dtype=torch.int32)
    parts = mlp_file.parts_of(batches, tokens, most)
    for part in parts:
        assert seen[part].is_contiguous() and seen[part].numel() <= most
        seen[part] += 1
    assert bool((seen == 1).all())
    if tokens > most:
        assert len(parts) == batches * -(-tokens // most), "no more chunks than needed"
