"""linear, linear_pair and mlp without a GPU: what cuBLAS makes of products, and chunks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bed.depth import examples
from fusestream.kernels_cuda import KernelPolicy, linear, linear_, linear_pair, mlp
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.matmul import linear as op
from fusestream.kernels_cuda.ops.matmul import mlp as mlp_file
from fusestream.kernels_cuda.ops.matmul.linear_operands import Operands
from fusestream.kernels_cuda.ops.matmul.linear_torch import (
    CublasFused,
    CublasPair,
    CublasWide,
)

OFF = KernelPolicy.of("off")


def halves(*shape):
    return torch.zeros(*shape, dtype=torch.float16)


def call(x=None, weight=None, bias=None, residual=None, gate=None, options=("none", 1.0, False, None)):
    x = halves(4, 32) if x is None else x
    weight = halves(16, 32) if weight is None else weight
    return Call("linear", (x, weight, bias, residual, gate), options)


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


def test_rows_with_gaps_are_rounded_as_torch_rounds_them():
    """torch's Linear adds the bias to a rounded product there, and to the sums elsewhere."""
    x, weight, bias = torch.randn(2, 8, 7).half()[:, ::2], torch.randn(6, 7).half(), torch.randn(6).half()
    for given_x in (x, x.contiguous()):
        out = torch.full((2, 4, 6), torch.nan, dtype=torch.float16)
        linear_(out, given_x, weight, bias, policy=KernelPolicy.of("off"))
        assert torch.equal(out, torch.nn.functional.linear(given_x, weight, bias))


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


def test_cublas_refuses_what_the_pass_behind_it_would():
    """A winner is known by sizes and types: with operands that lie elsewhere its pass would refuse in the middle of a call."""
    x, stream = halves(2, 3, 4, 32), halves(2, 3, 4, 32)
    apart = halves(4, 6, 8, 20)[::2, ::2, ::2, :16]  # rows in three axes with gaps
    for residual, gate, reason in (
        (halves(2, 3, 4, 16), None, None),
        (halves(2, 3, 4, 16), halves(16), None),
        (apart, None, "do not fold into three"),
        (halves(2, 3, 16, 4).transpose(2, 3), halves(16), "elements of a row are 4 apart"),
        (halves(2, 3, 4, 16), halves(16).bfloat16(), "gate is bfloat16"),
    ):
        asked = call(stream, residual=residual, gate=gate, options=("gelu", 1.0, False, None))
        found = CublasFused().obstacle(Operands.of_call(asked))
        assert found is None if reason is None else reason in (found or "")
    for out, reason in ((halves(2, 3, 4, 16), None), (apart, "do not fold into three")):
        asked = Call("linear_pair_", (out, x, halves(32, 32), None), ("silu", 1.0, False))
        found = CublasPair().obstacle(Operands.of_call(asked))
        assert found is None if reason is None else reason in (found or "")


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


@given(batches=st.integers(0, 9), tokens=st.integers(0, 9000), tiles=st.integers(1, 6))
def test_parts_cover_each_token_once_and_lie_in_one_piece(batches, tokens, tiles):
    most = tiles * mlp_file.CHUNK_ROWS
    seen = torch.zeros(batches, tokens, 1, dtype=torch.int32)
    parts = mlp_file.parts_of(batches, tokens, most)
    for part in parts:
        assert seen[part].is_contiguous() and seen[part].numel() <= most
        seen[part] += 1
    assert bool((seen == 1).all())
    assert mlp_file.most_rows(13824, most * 13824 * 2) == most, "as many rows as fit"
    if tokens > most:
        assert len(parts) == batches * -(-tokens // most), "no more chunks than needed"
