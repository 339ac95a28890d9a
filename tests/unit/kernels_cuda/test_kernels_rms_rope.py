"""rms_rope_ without a GPU: packed buffers, tables of all forms, compile."""

from __future__ import annotations

import pytest
import torch

from fusestream.kernels_cuda import KernelPolicy, rms_rope_

EPS = 1e-6
OFF = KernelPolicy.of("off")


def rms_rope(q, k=None, *rest, **options):
    """rms_rope_ of copies, each contiguous, which it returns."""
    copies = tuple(None if t is None else t.clone(memory_format=torch.contiguous_format) for t in (q, k))
    rms_rope_(*copies, *rest, **options)
    return copies


def angles(b, s, d):
    return torch.rand(b, s, d // 2, dtype=torch.float64) * 6.28


def matrices(angle):
    c, s = angle.cos(), angle.sin()
    return torch.stack((c, -s, s, c), -1).unflatten(-1, (2, 2))


def tables(form, angle, dtype=torch.float32):
    """(rotation, sin) as the models hand them over, and the same as float64 matrices."""
    if form == "none":
        return None, None
    if form.startswith("cos"):
        c, s = angle.cos().to(dtype), angle.sin().to(dtype)
        return (c, s) if form == "cos" else (c.unsqueeze(1), s.unsqueeze(1))
    m = matrices(angle).to(dtype)
    return {"flux": m[:1].unsqueeze(1), "wan": m[:1].unsqueeze(2), "batch": m.unsqueeze(1), "plain": m[0]}[form], None


def test_packed_buffers():
    """The thirds of a packed projection are served where they lie, and the values between them stay."""
    packed = torch.randn(2, 5, 3, 4, 16).half()
    before = packed.clone()
    q, k, v = packed.unbind(2)
    w = torch.rand(64).half()
    angle = angles(1, 5, 16)
    want = rms_rope(q.clone(), k.clone(), w, w, *tables("wan", angle), eps=EPS)
    rms_rope_(q, k, w, w, *tables("wan", angle), eps=EPS)
    assert torch.equal(q, want[0]) and torch.equal(k, want[1])
    assert torch.equal(v, before[:, :, 2])


def test_one_stream_and_other_lengths():
    q, k = torch.randn(2, 7, 2, 16).half(), torch.randn(2, 3, 2, 16).half()
    w = torch.rand(32).half()
    alone, nothing = rms_rope(q, None, w, eps=EPS)
    assert nothing is None
    both = rms_rope(q, k, w, w, eps=EPS)
    assert torch.equal(both[0], alone) and both[1].shape == k.shape
    long, short = tables("cos", angles(1, 9, 16)), angles(1, 9, 16)
    assert short.shape[1] > 7
    first = rms_rope(q, k, w, w, *long, eps=EPS)  # the first of nine rotations
    assert torch.equal(first[0], rms_rope(q, k, w, w, *(t[:, :7] for t in long), eps=EPS)[0])


H = torch.float16
BOTH = (KernelPolicy(), OFF)


def zeros(*shape):
    return torch.zeros(shape, dtype=H)


@pytest.mark.parametrize("lead", [(6,), (9,), (1,), (1, 6), (2, 6), (1, 1, 6), (2, 6, 1), (2, 1, 1), (1, 9, 1)])
@pytest.mark.parametrize("heads", [1, 2])
def test_forms_that_broadcast(lead, heads):
    q, k = zeros(2, 6, 2, 16), zeros(2, 3, heads, 16)
    for norm, weights in (("token", (zeros(32), zeros(16 * heads))), ("head", (zeros(16),) * 2), ("none", (None,) * 2)):
        for table in ((zeros(*lead, 8, 2, 2), None), (zeros(*lead, 8), zeros(*lead, 8))):
            out = rms_rope(q, k, *weights, *table, eps=EPS, norm=norm)
            assert [t.shape for t in out] == [q.shape, k.shape]


def test_rows_between_others_are_places_of_their_own():
    q = zeros(2, 6, 2, 16)
    for policy in BOTH:
        rms_rope_(q[:, :3], q[:, 3:], eps=EPS, policy=policy)
        rms_rope_(q[:, 0::2], q[:, 1::2], eps=EPS, policy=policy)


def test_compile_keeps_the_ops_whole():
    w = torch.rand(32).half()
    table, _ = tables("wan", angles(1, 5, 16))

    def block(packed):
        q, k, v = packed.unflatten(-1, (3, 2, 16)).unbind(2)
        q2, k2 = rms_rope(q, k, w, w, table, eps=EPS)
        rms_rope_(q, k, w, w, table, eps=EPS)
        return q2 + v, k2, packed

    packed = torch.randn(2, 5, 96).half()
    want = block(packed.clone())
    for a, b in zip(torch.compile(block, fullgraph=True, backend="aot_eager")(packed.clone()), want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_what_nothing_is_done_to_stays_whatever_its_strides() -> None:
    """Stock's way hands it back. Of one row torch counts other strides as another tensor in the same memory."""
    q = torch.randn(64, dtype=torch.float16).as_strided((1, 1, 1, 4), (40, 30, 20, 1))
    before = q.clone()
    for policy in (KernelPolicy.of("off"), KernelPolicy()):
        rms_rope_(q, eps=1e-6, norm="none", policy=policy)
        assert torch.equal(q, before)
