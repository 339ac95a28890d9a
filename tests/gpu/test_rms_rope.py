"""rms_rope_ on the GPU, in both instruction classes."""

from __future__ import annotations

import pytest
import torch
from gpu.support import WAYS, assert_no_worse_than, assert_rounded_once, assert_same_special, on, shifted

from fusestream.kernels_cuda import OPS, KernelPolicy, rms_rope_
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.norm.rms_rope import PIECES, PIECES_OF_BF16, Tactic, reference

EPS = 1e-6
OFF = KernelPolicy.of("off")
# (heads, d): Wan 1.3B and 14B, Flux, Qwen3, and sizes only the `any` kernel serves.
SIZES = (
    (12, 128),
    (40, 128),
    (24, 128),
    (32, 128),
    (16, 64),
    (3, 256),
    (5, 32),
    (7, 16),
    (1, 1),
    (1, 3),
    (1, 127),
    (3, 6),
    (2, 96),
    (16, 128),
    (17, 256),
    (40, 256),
    (65, 256),
)
FORMS = ("none", "matrix", "batch", "cos")
PLACES = ("flux", "wan", "plain")
of_two_bytes = pytest.mark.parametrize("of_x", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


def rms_rope(q, k=None, *rest, **options):
    """rms_rope_ of copies, each contiguous, which it returns."""
    copies = tuple(None if t is None else t.clone(memory_format=torch.contiguous_format) for t in (q, k))
    rms_rope_(*copies, *rest, **options)
    return copies


def rotations(form, b, s, d, place="flux", dtype=torch.float32):
    """(rotation, sin) as the models hand them over."""
    if form == "none" or d % 2:
        return None, None
    angle = torch.rand(b if form == "batch" else 1, s, d // 2, device="cuda") * 6.28
    c, n = angle.cos().to(dtype), angle.sin().to(dtype)
    if form == "cos":
        return c.unsqueeze(1), n.unsqueeze(1)
    m = torch.stack((c, -n, n, c), -1).unflatten(-1, (2, 2))
    if place == "plain":
        return m, None
    return (m.unsqueeze(1) if place == "flux" else m.unsqueeze(2)), None


def inputs(b, s, h, d, norm="token", dtype=torch.float16, k_heads=None, k_tokens=None, of_x=torch.float16):
    q = torch.randn(b, s, h, d, device="cuda").to(of_x) * 3
    k = torch.randn(b, k_tokens or s, k_heads or h, d, device="cuda").to(of_x)
    weights = (
        (None, None)
        if norm == "none"
        else (
            (1 + 0.3 * torch.randn(t.shape[2] * d if norm == "token" else d, device="cuda")).to(dtype) for t in (q, k)
        )
    )
    return q, k, *weights


def exact(q, k, qw, kw, rotation, sin, norm, interleaved):
    """The reference in float64."""
    wide = [None if t is None else t.double() for t in (q, k, qw, kw, rotation, sin)]
    return reference(*wide, EPS, norm, interleaved)


def compare(got, q, k, qw, kw, rotation, sin, norm, interleaved, what):
    for a, b in zip(got, exact(q, k, qw, kw, rotation, sin, norm, interleaved), strict=True):
        assert a.is_contiguous()
        assert_rounded_once(a.flatten(2), b.flatten(2), what=what, dtype=q.dtype)


@pytest.mark.parametrize("norm", ["token", "head", "none"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("h", "d"), SIZES)
@of_two_bytes
def test_rms_rope(isa, h, d, form, norm, of_x):
    for interleaved, dtype in ((True, torch.float32), (False, of_x), (False, torch.float32)):
        tensors = inputs(2, 11, h, d, norm, dtype, of_x=of_x)
        table = rotations(form, 2, 11, d, dtype=dtype)
        got = rms_rope(*tensors, *table, eps=EPS, norm=norm, interleaved=interleaved, policy=on(isa))
        what = f"{h}x{d} {form} {norm} {interleaved} {dtype}"
        compare(got, *tensors, *table, norm, interleaved, what)
        eager = rms_rope(*tensors, *table, eps=EPS, norm=norm, interleaved=interleaved, policy=OFF)
        want = exact(*tensors, *table, norm, interleaved)
        if dtype is torch.float32:
            for a, b, c in zip(got, eager, want, strict=True):
                assert_no_worse_than(a, b, c, what, peak=of_x is torch.float16)


@pytest.mark.sanitize
@pytest.mark.parametrize(("h", "d"), [(1, 1), (12, 128), (40, 128), (3, 42), (6, 64)])
@pytest.mark.parametrize("norm", ["token", "head"])
@of_two_bytes
def test_packed_in_place(isa, h, d, norm, of_x):
    """q and k inside packed rows: the bits of the separate ones, and v as it was."""
    packed = torch.randn(2, 21, 3, h, d, device="cuda").to(of_x)
    before = packed.clone()
    q, k, v = packed.unbind(2)
    _, _, qw, kw = inputs(1, 1, h, d, norm, of_x)
    table = rotations("matrix", 1, 21, d, "wan")
    want = rms_rope(q.contiguous(), k.contiguous(), qw, kw, *table, eps=EPS, norm=norm, policy=on(isa))
    rms_rope_(q, k, qw, kw, *table, eps=EPS, norm=norm, policy=on(isa))
    compare(want, before[:, :, 0], before[:, :, 1], qw, kw, *table, norm, True, "contiguous")
    for a, b in zip(want, (q, k), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(v, before[:, :, 2])
    rms_rope_(v, None, qw, eps=EPS, norm=norm, policy=on(isa))
    assert torch.equal(packed[:, :, 0], want[0]) and torch.equal(packed[:, :, 1], want[1])
    assert torch.equal(v, rms_rope(before[:, :, 2], None, qw, eps=EPS, norm=norm, policy=on(isa))[0])


@pytest.mark.parametrize("layout", ["shifted", "gaps", "odd gaps", "every other row", "turned"])
@pytest.mark.parametrize(("h", "d"), [(12, 128), (5, 64), (2, 10)])
@of_two_bytes
def test_layouts(isa, h, d, layout, of_x):
    for norm, place, interleaved in (("token", "wan", True), ("head", "flux", False)):
        q, k, qw, kw = inputs(2, 13, h, d, norm, of_x, of_x=of_x)
        q, k = WAYS[layout](q), WAYS[layout](k)
        rotation, _ = rotations("batch", 2, 13, d, place)
        if layout == "shifted":
            qw, kw, rotation = shifted(qw, 3), shifted(kw), shifted(rotation)
        before = q.clone(), k.clone()
        rms_rope_(q, k, qw, kw, rotation, eps=EPS, norm=norm, interleaved=interleaved, policy=on(isa))
        compare([q.contiguous(), k.contiguous()], *before, qw, kw, rotation, None, norm, interleaved, layout)


@pytest.mark.sanitize
@pytest.mark.parametrize(("s", "k_tokens"), [(37, 5), (3, 40), (1, 1), (8, 9)])
@pytest.mark.parametrize(("h", "k_heads", "d"), [(12, 12, 128), (32, 8, 128), (4, 1, 48), (1, 16, 64)])
def test_other_tokens_and_grouped_heads(isa, h, k_heads, d, s, k_tokens):
    for norm in ("token", "head"):
        tensors = inputs(2, s, h, d, norm, k_heads=k_heads, k_tokens=k_tokens)
        table = rotations("matrix", 1, max(s, k_tokens) + 2, d)  # a longer table than tokens
        for t in (table, (None, None)):
            got = rms_rope(*tensors, *t, eps=EPS, norm=norm, policy=on(isa))
            compare(got, *tensors, *t, norm, True, f"{norm} {s} {k_tokens}")


def test_language_model_tables(isa):
    """Cosines of [b, 1, s, d] that repeat for the upper half, cut to d/2: rows with gaps."""
    q, k, qw, kw = inputs(1, 33, 32, 128, "head", k_heads=8)
    angle = torch.rand(1, 33, 64, device="cuda") * 100
    cos, sin = torch.cat((angle, angle), -1).cos().unsqueeze(1)[..., :64], angle.sin().unsqueeze(1)
    got = rms_rope(q, k, qw, kw, cos, sin, eps=EPS, norm="head", interleaved=False, policy=on(isa))
    compare(got, q, k, qw, kw, cos, sin, "head", False, "tables")


def test_general_matrices(isa):
    """Not only rotations: every entry of the matrix has its place."""
    q, k, qw, kw = inputs(1, 9, 12, 128)
    for interleaved in (True, False):
        m = torch.randn(1, 1, 9, 64, 2, 2, device="cuda")
        got = rms_rope(q, k, qw, kw, m, eps=EPS, interleaved=interleaved, policy=on(isa))
        compare(got, q, k, qw, kw, m, None, "token", interleaved, "general")


@pytest.mark.parametrize("shape", [(0, 4, 2, 64), (2, 0, 2, 64), (2, 4, 0, 64), (2, 4, 2, 0), (1, 1, 1, 1)])
def test_empty_and_tiny(isa, shape):
    q = torch.randn(shape, device="cuda").half()
    for norm in ("token", "head"):
        got, _ = rms_rope(q, eps=EPS, norm=norm, policy=on(isa))
        assert got.shape == q.shape
    got, other = rms_rope(
        torch.empty(1, 0, 2, 64, device="cuda").half(),
        torch.ones(1, 3, 2, 64, device="cuda").half(),
        eps=EPS,
        policy=on(isa),
    )
    assert got.numel() == 0 and torch.equal(other, torch.ones_like(other))


@pytest.mark.parametrize(("h", "d"), [(12, 128), (1, 127), (40, 128)])
def test_outliers(isa, h, d):
    """Values near fp16's largest: the squares stay finite."""
    q, k, qw, kw = inputs(1, 8, h, d)
    q[:, ::2, :, ::7], k[:, 1::4] = 65504, -65000
    table = rotations("matrix", 1, 8, d)
    got = rms_rope(q, k, qw, kw, *table, eps=EPS, policy=on(isa))
    compare(got, q, k, qw, kw, *table, "token", True, "outliers")


@pytest.mark.parametrize(("h", "d"), [(12, 128), (2, 10)])
@pytest.mark.parametrize("interleaved", [True, False])
@of_two_bytes
def test_special_values(isa, h, d, interleaved, of_x):
    for norm in ("token", "head"):
        q, k, qw, kw = inputs(1, 12, h, d, norm, of_x, of_x=of_x)
        for i, value in enumerate((torch.nan, torch.inf, -torch.inf)):
            q[0, i, 0, i], k[0, i + 6, h - 1, d - 1 - i] = value, value
        qw[5] = torch.inf
        table = rotations("matrix", 1, 12, d)
        got = rms_rope(q, k, qw, kw, *table, eps=EPS, norm=norm, interleaved=interleaved, policy=on(isa))
        # Judged by the plain arithmetic, which the reference runs on the CPU: around one Inf torch's fused RMSNorm
        # makes a whole row NaN, but only where the row is no multiple of four.
        plain = [t if t is None else t.cpu() for t in (q, k, qw, kw, *table)]
        like = rms_rope(*plain, eps=EPS, norm=norm, interleaved=interleaved)
        for a, b in zip(got, like, strict=True):
            assert_same_special(a, b.cuda(), norm)


@pytest.mark.parametrize("norm", ["token", "head"])
@pytest.mark.parametrize(("h", "k_heads", "d"), [(12, 12, 128), (9, 2, 128), (5, 5, 64), (24, 24, 128), (17, 17, 256)])
@of_two_bytes
def test_every_tactic(isa, h, k_heads, d, norm, of_x):
    """However the rows are cut, the result is right; a row that a piece holds exactly, and one with room to spare. Where there is
    no piece of bf16 for a row, it is the `any` kernel's."""
    pieces = PIECES if of_x is torch.float16 else PIECES_OF_BF16
    for s, form, interleaved in ((1, "matrix", True), (90, "matrix", True), (7, "matrix", False), (8, "cos", False)):
        tensors, table = inputs(2, s, h, d, norm, of_x, k_heads=k_heads, of_x=of_x), rotations(form, 2, s, d)
        call = Call("rms_rope_", (*tensors, *table), (EPS, norm, interleaved), on(isa))
        tactics = OPS["rms_rope_"].candidates[0].tactics(call)
        there = [
            len(packs)
            if norm == "head"
            else max(Tactic(kind, holder, each).width for each in packs) >= max(h, k_heads) * d
            for (kind, holder), packs in pieces.items()
            if kind == norm + ("" if interleaved else "_sines" if form == "cos" and norm == "head" else "_halves")
        ]
        assert len(tactics) == max(sum(there), 1) and (sum(there) or of_x is torch.bfloat16)
        for tactic in tactics:
            got = tensors[0].clone(), tensors[1].clone()
            tactic.prepare(call)(*got, *call.tensors[2:])
            compare(got, *tensors, *table, norm, interleaved, tactic.name)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 24 * 2**30, reason="needs 24 GB")
def test_products_beyond_32_bits():
    room = torch.zeros(2**31 + 2**14, device="cuda", dtype=torch.float16)
    q = room.as_strided((1, 3, 12, 128), (0, 2**30, 128, 1))
    q[0, 2] = torch.randn(12, 128, device="cuda").half()
    before = q.contiguous()
    rms_rope_(q, eps=EPS, policy=on(None))
    compare([q.contiguous()], before, None, None, None, None, None, "token", True, "far apart")
    assert room.count_nonzero() == q.count_nonzero(), "written where nothing of q is"
