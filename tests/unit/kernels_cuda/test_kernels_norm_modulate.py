"""norm_modulate and residual_gate_norm_modulate without a GPU: the references against float64, shapes, compile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bed.depth import examples
from fusestream.kernels_cuda import LEDGER, OPS, KernelPolicy, KernelRefused, norm_modulate, residual_gate_norm_modulate
from fusestream.kernels_cuda.ops.norm.norm_modulate import best_tactic, tactics, threads_for
from fusestream.kernels_cuda.ops.views.rows import rows, tokens_per_frame

EPS = 1e-6
OFF = KernelPolicy.of("off")

FORMS = ("none", "batch", "frame", "token", "video")


def modulation(form, batch, frames, run, d, dtype, seed):
    """One broadcast operand, as a chunk of a wider tensor."""
    shapes = {
        "batch": (batch, 6, d),
        "frame": (batch, frames, 6, d),
        "token": (batch, frames * run, 6, d),
        "video": (batch, frames, 1, 6, d),
    }
    if form == "none":
        return None
    wide = torch.randn(shapes[form], generator=torch.Generator().manual_seed(seed)).to(dtype)
    return wide[:, 1:2] if form == "batch" else wide[..., 1, :]


def spread_by_index(t, tokens, run, form):
    """Broadcasting written independently of the op: token i reads frame i // run."""
    if t is None:
        return 0.0
    wide = t.double()
    if form == "video":
        wide = wide[:, :, 0]
    index = torch.arange(tokens) // run if form in ("frame", "video") else torch.arange(tokens)
    return wide if form == "batch" else wide[:, index]


@settings(max_examples=examples(60), deadline=None)
@given(
    batch=st.integers(1, 3),
    frames=st.integers(2, 4),
    run=st.integers(1, 3),
    d=st.sampled_from([1, 3, 8, 127, 160]),
    form=st.sampled_from(FORMS),
    kind=st.sampled_from(["layer", "rms"]),
    affine=st.booleans(),
    residual=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    seed=st.integers(0, 2**31),
)
def test_reference_is_the_definition(batch, frames, run, d, form, kind, affine, residual, dtype, seed):
    """Against the formula in float64, written with plain indexing."""
    make = torch.Generator().manual_seed(seed)
    tokens = frames * run
    x = (torch.randn(batch, tokens, d, generator=make) * 3 + 1).half()
    y = torch.randn(batch, tokens, d, generator=make).half()
    scale, shift, gate = (modulation(form, batch, frames, run, d, dtype, seed + i) for i in range(3))
    weight, bias = (
        (torch.randn(d, generator=make).to(dtype), torch.randn(d, generator=make).to(dtype)) if affine else (None, None)
    )

    wide = x.double()
    if residual:
        by = spread_by_index(gate, tokens, run, form) if gate is not None else 1.0
        wide = (wide + by * y.double()).half().double()
    value = wide - wide.mean(-1, keepdim=True) if kind == "layer" else wide
    value = value / torch.sqrt(value.pow(2).mean(-1, keepdim=True) + EPS)
    if affine:
        value = value * weight.double() + bias.double()
    value = value * (1 + spread_by_index(scale, tokens, run, form)) + spread_by_index(shift, tokens, run, form)

    if residual:
        x_new, out = residual_gate_norm_modulate(x, y, gate, scale, shift, weight, bias, eps=EPS, kind=kind)
        assert (x_new.double() - wide).abs().max() <= 2**-10 * wide.abs().max()
    else:
        out = norm_modulate(x, scale, shift, weight, bias, eps=EPS, kind=kind)
    assert out.dtype is torch.float16
    if residual:  # another rounding of x_new moves the whole row a little
        torch.testing.assert_close(out.double(), value, rtol=2**-9, atol=2e-2)
    else:
        torch.testing.assert_close(out.double(), value, rtol=2**-10, atol=1e-4 * value.abs().max().item())


@pytest.mark.parametrize("form", FORMS)
def test_stock_and_reference_agree(form):
    x = torch.randn(2, 6, 64).half()
    y = torch.randn(2, 6, 64).half()
    scale, shift, gate = (modulation(form, 2, 3, 2, 64, torch.float16, i) for i in range(3))
    for a, b in zip(
        residual_gate_norm_modulate(x, y, gate, scale, shift, eps=EPS),
        residual_gate_norm_modulate(x, y, gate, scale, shift, eps=EPS, policy=OFF),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=4e-3, atol=8e-3)


def test_frames_are_spread_as_stock_does():
    assert tokens_per_frame(12, 3, "scale") == 4
    assert tokens_per_frame(13, 3, "scale") == 5  # repeat_e rounds up and cuts
    assert tokens_per_frame(13, 13, "scale") == 1
    assert tokens_per_frame(7, 1, "scale") == 7
    with pytest.raises(ValueError, match="8 rows of modulation cannot be spread over 5 tokens"):
        tokens_per_frame(5, 8, "scale")


def test_row_views():
    x = torch.zeros(2, 3, 4, 8)
    assert rows(x).tokens == 12
    assert rows(x[:, :, :2]) == "dimensions (3, 2) with strides (32, 8) do not fold into rows"
    assert rows(x[:, :, 1:2]).row_stride == 32
    assert "not adjacent" in rows(x.transpose(-1, -2))
    assert rows(torch.zeros(3)) == "a tensor of rank 1 has no rows"


@pytest.mark.parametrize(
    ("d", "packs", "threads"),
    [(1, 2, 32), (1536, 3, 64), (3072, 3, 128), (4096, 4, 128), (5120, 4, 160), (8192, 4, 256), (9216, 2, 576)],
)
def test_a_row_fits_its_block(d, packs, threads):
    assert threads_for(d, packs) == threads
    if d <= 8192:
        assert best_tactic(d).packs == packs
    assert all(threads_for(d, t.packs) <= 384 and threads_for(d, t.packs) * t.packs * 8 >= d for t in tactics(d))


def test_wrong_shapes_are_value_errors():
    x = torch.zeros(2, 6, 8).half()
    with pytest.raises(ValueError, match="scale"):
        norm_modulate(x, torch.zeros(2, 1, 9).half(), None, eps=EPS)
    with pytest.raises(ValueError, match="scale"):
        norm_modulate(x, torch.zeros(3, 1, 8).half(), None, eps=EPS)
    with pytest.raises(ValueError, match="8 rows of modulation cannot be spread over 6 tokens"):
        norm_modulate(x, torch.zeros(2, 8, 8).half(), None, eps=EPS)
    with pytest.raises(ValueError, match=r"weight \[7\] is not \[8\]"):
        norm_modulate(x, weight=torch.zeros(7).half(), eps=EPS)
    for policy in (KernelPolicy(), OFF):  # stock would broadcast it, a kernel would read beyond it
        with pytest.raises(ValueError, match=r"y \[2, 1, 8\] has not the shape of x \[2, 6, 8\]"):
            residual_gate_norm_modulate(x, x[:, :1], eps=EPS, policy=policy)


def test_empty_and_one():
    for shape in ((2, 0, 8), (0, 4, 8), (2, 4, 0), (0, 8)):
        x, row = torch.zeros(shape).half(), torch.zeros(1, 1, shape[-1]).half()
        for policy in (KernelPolicy(), OFF):
            assert norm_modulate(x, row, row, eps=EPS, policy=policy).shape == shape
            assert [t.shape for t in residual_gate_norm_modulate(x, x, row, row, row, eps=EPS, policy=policy)] == [
                shape
            ] * 2
    assert norm_modulate(torch.ones(1, 1, 1).half(), eps=EPS).item() == 0


def test_modes():
    x = torch.randn(1, 4, 16).half()
    LEDGER.clear()
    norm_modulate(x, eps=EPS, kind="rms", policy=KernelPolicy.of("auto", norm_modulate="auto"))
    assert [(r.op, r.candidate, r.reason, r.served_by) for r in LEDGER.refusals] == [
        ("norm_modulate", "cuda", "tensor is on the CPU", "the reference")
    ]
    with pytest.raises(KernelRefused, match=r"forced on but cannot serve \(float16\[1, 4, 16\].*on the CPU"):
        norm_modulate(x, eps=EPS, policy=KernelPolicy.of("on"))
    torch.testing.assert_close(
        norm_modulate(x, eps=EPS, policy=OFF), torch.nn.functional.layer_norm(x, (16,), eps=EPS), rtol=0, atol=0
    )


def test_compile_keeps_the_op_whole():
    def block(x, y, gate, scale, shift):
        x, n = residual_gate_norm_modulate(x, y, gate, scale, shift, eps=EPS)
        return x, norm_modulate(n, weight=gate[0, 0], eps=EPS, kind="rms", policy=KernelPolicy.of("off"))

    x, y = torch.randn(2, 5, 32).half(), torch.randn(2, 5, 32).half()
    gate, scale, shift, *_ = torch.randn(2, 6, 32).half().chunk(6, dim=1)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(x, y, gate, scale, shift), block(x, y, gate, scale, shift), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["norm_modulate", "residual_gate_norm_modulate"])
def test_registration_is_sound(name):
    """torch's own checks of the schema and the fake."""
    x, row = torch.randn(2, 5, 32).half(), torch.randn(2, 1, 32).half()
    tensors = (x, row, row, None, None) if name == "norm_modulate" else (x, x, row, row, row, None, None)
    torch.library.opcheck(OPS[name].traced, (*tensors, EPS, "layer", None, KernelPolicy().token))
