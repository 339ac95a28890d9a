"""rms_rope_ without a GPU: the references against float64 written with plain indexing, shapes, compile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bed.depth import examples
from fusestream.kernels_cuda import OPS, KernelPolicy, KernelRefused, rms_rope_
from fusestream.kernels_cuda.ops.norm.rms_rope import reference

EPS = 1e-6
OFF = KernelPolicy.of("off")
FORMS = ("none", "flux", "wan", "batch", "plain", "cos", "cos heads")


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


def by_hand(x, weight, rotation, sin, norm, interleaved):
    """The definition in float64, element by element."""
    s, d = x.shape[1], x.shape[3]
    value = x.double()
    if norm != "none":
        mean = value.pow(2).mean((-2, -1) if norm == "token" else -1, keepdim=True)
        value = value / torch.sqrt(mean + EPS)
    if weight is not None:
        value = value * weight.double().reshape(-1, d)
    if rotation is None:
        return value
    if sin is not None:
        c, n = (t.double().reshape(-1, t.shape[-2], d // 2) for t in (rotation, sin))
        m = torch.stack((c, -n, n, c), -1).unflatten(-1, (2, 2))
    else:
        m = rotation.double().reshape(-1, s, d // 2, 2, 2)
    out = torch.empty_like(value)
    for j in range(d // 2):
        e0, e1 = (2 * j, 2 * j + 1) if interleaved else (j, j + d // 2)
        turn = m[:, :s, j, None]
        out[..., e0] = turn[..., 0, 0] * value[..., e0] + turn[..., 0, 1] * value[..., e1]
        out[..., e1] = turn[..., 1, 0] * value[..., e0] + turn[..., 1, 1] * value[..., e1]
    return out


@settings(max_examples=examples(80), deadline=None)
@given(
    b=st.integers(1, 3),
    s=st.integers(2, 9),
    h=st.integers(1, 4),
    grouped=st.booleans(),
    d=st.sampled_from([2, 6, 16, 64]),
    form=st.sampled_from(FORMS),
    norm=st.sampled_from(["token", "head", "none"]),
    interleaved=st.booleans(),
    weighted=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    seed=st.integers(0, 2**31),
)
def test_reference_is_the_definition(b, s, h, grouped, d, form, norm, interleaved, weighted, dtype, seed):
    torch.manual_seed(seed)
    q, k = torch.randn(b, s, h, d).half() * 3, torch.randn(b, s, 1 if grouped else h, d).half()
    weights = [
        torch.randn(t.shape[2] * d if norm == "token" else d).to(dtype) if weighted and norm != "none" else None
        for t in (q, k)
    ]
    rotation, sin = tables(form, angles(b, s, d), dtype)
    got = rms_rope(q, k, *weights, rotation, sin, eps=EPS, norm=norm, interleaved=interleaved)
    stock = rms_rope(q, k, *weights, rotation, sin, eps=EPS, norm=norm, interleaved=interleaved, policy=OFF)
    plain = reference(q, k, *weights, rotation, sin, EPS, norm, interleaved)
    for x, weight, out, other, there in zip((q, k), weights, got, stock, plain, strict=True):
        want = by_hand(x, weight, rotation, sin, norm, interleaved)
        assert out.dtype is torch.float16 and out.shape == x.shape and out.is_contiguous()
        torch.testing.assert_close(out.double(), want, rtol=2**-10, atol=2e-6 * want.abs().max().item() + 2**-24)
        torch.testing.assert_close(other.double(), want, rtol=4e-3, atol=4e-3 * want.abs().max().item())
        assert torch.equal(there, out)


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


def test_wrong_shapes_are_value_errors():
    q = torch.zeros(2, 6, 2, 16).half()
    with pytest.raises(ValueError, match="q_weight"):
        rms_rope(q, None, torch.zeros(16).half(), eps=EPS)
    with pytest.raises(ValueError, match="rotation"):
        rms_rope(q, rotation=torch.zeros(1, 1, 5, 8, 2, 2), eps=EPS)
    with pytest.raises(ValueError, match="rotation"):
        rms_rope(q, rotation=torch.zeros(3, 6, 8), sin=torch.zeros(3, 6, 8), eps=EPS)
    with pytest.raises(ValueError, match="no pairs"):
        rms_rope(q[..., :15], rotation=torch.zeros(6, 7, 2, 2), eps=EPS)
    with pytest.raises(ValueError, match="k: "):
        rms_rope(q, torch.zeros(2, 6, 2, 8).half(), eps=EPS)
    with pytest.raises(ValueError, match=r"sin: .* without"):
        rms_rope(q, sin=torch.zeros(6, 8), eps=EPS)
    with pytest.raises(ValueError, match="norm is"):
        rms_rope(q, eps=EPS, norm="row")


H = torch.float16
BOTH = (KernelPolicy(), OFF)


def zeros(*shape):
    return torch.zeros(shape, dtype=H)


@pytest.mark.parametrize(
    ("operand", "tensors", "options"),
    [
        ("q", {"q": zeros(6, 2, 16)}, {}),
        ("q", {"q": zeros(1, 2, 6, 2, 16)}, {}),
        ("q", {"q": zeros(2, 6, 2, 15), "rotation": zeros(6, 7, 2, 2)}, {}),
        ("k", {"k": zeros(1, 6, 2, 16)}, {}),
        ("k", {"k": zeros(2, 6, 2, 8)}, {}),
        ("k", {"k": zeros(2, 6, 32)}, {}),
        ("q_weight", {"q_weight": zeros(16)}, {}),
        ("q_weight", {"q_weight": zeros(1)}, {}),
        ("q_weight", {"q_weight": zeros(2, 16)}, {}),
        ("q_weight", {"q_weight": zeros(32)}, {"norm": "head"}),
        ("q_weight", {"q_weight": zeros(0)}, {"norm": "none"}),
        ("k_weight", {"k_weight": zeros(32)}, {}),
        ("k_weight", {"k": zeros(2, 6, 1, 16), "k_weight": zeros(32)}, {}),
        ("rotation", {"rotation": zeros(5, 8, 2, 2)}, {}),
        ("rotation", {"rotation": zeros(6, 7, 2, 2)}, {}),
        ("rotation", {"rotation": zeros(6, 8, 2)}, {}),
        ("rotation", {"rotation": zeros(8)}, {}),
        ("rotation", {"rotation": zeros(3, 6, 8, 2, 2)}, {}),
        ("rotation", {"rotation": zeros(1, 2, 6, 8, 2, 2)}, {}),  # a table per head
        ("rotation", {"k": zeros(2, 9, 2, 16), "rotation": zeros(6, 8, 2, 2)}, {}),  # k is longer
        ("rotation", {"rotation": zeros(6, 8, 2, 2), "sin": zeros(6, 8)}, {}),
        ("sin", {"sin": zeros(6, 8)}, {}),
        ("sin", {"rotation": zeros(6, 8), "sin": zeros(5, 8)}, {}),
        ("sin", {"rotation": zeros(6, 8), "sin": zeros(6, 16)}, {}),
        ("norm", {}, {"norm": "row"}),
        ("eps", {}, {"eps": -1.0}),
        ("eps", {}, {"eps": float("nan")}),
    ],
)
def test_wrong_operands_are_named(operand, tensors, options):
    for policy in BOTH:
        with pytest.raises(ValueError, match=rf"^rms_rope_: {operand}\b"):
            rms_rope_(**{"q": zeros(2, 6, 2, 16), **tensors}, **{"eps": EPS, **options}, policy=policy)


@pytest.mark.parametrize("lead", [(6,), (9,), (1,), (1, 6), (2, 6), (1, 1, 6), (2, 6, 1), (2, 1, 1), (1, 9, 1)])
@pytest.mark.parametrize("heads", [1, 2])
def test_forms_that_broadcast(lead, heads):
    q, k = zeros(2, 6, 2, 16), zeros(2, 3, heads, 16)
    for norm, weights in (("token", (zeros(32), zeros(16 * heads))), ("head", (zeros(16),) * 2), ("none", (None,) * 2)):
        for table in ((zeros(*lead, 8, 2, 2), None), (zeros(*lead, 8), zeros(*lead, 8))):
            out = rms_rope(q, k, *weights, *table, eps=EPS, norm=norm)
            assert [t.shape for t in out] == [q.shape, k.shape]


def test_in_place_needs_places_of_its_own():
    OPS["rms_rope_"].forget()  # a plan is asked for once: another test may have had these shapes
    q = zeros(2, 6, 2, 16)
    for policy in BOTH:
        with pytest.raises(ValueError, match=r"q: .* share memory"):
            rms_rope_(q[:, :1].expand(2, 6, 2, 16), eps=EPS, policy=policy)
        with pytest.raises(ValueError, match=r"k: .* share memory"):
            rms_rope_(q, zeros(2, 6, 1, 16).expand(2, 6, 2, 16), eps=EPS, policy=policy)
        with pytest.raises(ValueError, match=r"q: .* overlaps k"):
            rms_rope_(q, q, eps=EPS, policy=policy)
        with pytest.raises(ValueError, match=r"q: .* overlaps k"):
            rms_rope_(q[:, :4], q[:, 3:], eps=EPS, policy=policy)
        with pytest.raises(ValueError, match=r"q: .* overlaps q_weight"):
            rms_rope_(q, None, q.flatten()[8:40], eps=EPS, policy=policy)
        rms_rope_(q[:, :3], q[:, 3:], eps=EPS, policy=policy)
        rms_rope_(q[:, 0::2], q[:, 1::2], eps=EPS, policy=policy)


def test_empty():
    out, other = rms_rope(torch.zeros(2, 0, 2, 16).half(), torch.zeros(2, 3, 2, 16).half(), eps=EPS)
    assert out.shape == (2, 0, 2, 16) and other.shape == (2, 3, 2, 16)


def test_special_values():
    q = torch.randn(1, 6, 2, 16).half()
    q[0, 0, 0, 3], q[0, 1, 1, 4], q[0, 2, 0, 5] = torch.nan, torch.inf, -torch.inf
    table = tables("wan", angles(1, 6, 16))
    for norm in ("token", "head"):
        ours, _ = rms_rope(q, rotation=table[0], eps=EPS, norm=norm)
        stock, _ = rms_rope(q, rotation=table[0], eps=EPS, norm=norm, policy=OFF)
        assert torch.equal(ours.isnan(), stock.isnan()) and torch.equal(ours.isinf(), stock.isinf())
        assert ours.isnan().any() and not ours[0, 3:].isnan().any()


def test_modes():
    with pytest.raises(KernelRefused, match=r"forced on but cannot serve .*on the CPU"):
        rms_rope(torch.zeros(1, 2, 2, 16).half(), eps=EPS, policy=KernelPolicy.of("on"))


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


def test_registration_is_sound():
    """torch's own checks of the schema and the fake."""
    q, k = torch.randn(2, 5, 2, 16).half(), torch.randn(2, 5, 2, 16).half()
    w = torch.rand(32).half()
    table, _ = tables("flux", angles(1, 5, 16))
    torch.library.opcheck(OPS["rms_rope_"].traced, (q, k, w, w, table, None, EPS, "token", True, KernelPolicy().token))
