"""gated_residual and gated_residual_ without a GPU: the reference against float64, shapes, compile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bed.depth import examples
from fusestream.kernels_cuda import OPS, KernelPolicy, KernelRefused, gated_residual, gated_residual_
from fusestream.kernels_cuda.ops.views.checks import overlap

OFF = KernelPolicy.of("off")
FORMS = ("none", "row", "batch", "frame", "token", "video")


def gate_of(form, b, frames, run, d, dtype):
    """A gate as the models hand it over, and as [b, s, d] written with plain indexing."""
    s = frames * run
    shapes = {
        "row": (d,),
        "batch": (b, 1, 6, d),
        "frame": (b, frames, 6, d),
        "token": (b, s, 6, d),
        "video": (b, frames, 1, 6, d),
    }
    if form == "none":
        return None, torch.ones(b, s, d, dtype=torch.float64)
    wide = torch.randn(shapes[form]).to(dtype)
    gate = wide if form == "row" else wide[..., 2, :]
    plain = (gate[:, :, 0] if form == "video" else gate).double()
    index = {"frame": torch.arange(s) // run, "video": torch.arange(s) // run, "token": torch.arange(s)}.get(form)
    return gate, plain[:, index] if index is not None else plain.expand(b, s, d)


@settings(max_examples=examples(60), deadline=None)
@given(
    b=st.integers(1, 3),
    frames=st.integers(2, 4),
    run=st.integers(1, 3),
    d=st.sampled_from([1, 3, 8, 127]),
    form=st.sampled_from(FORMS),
    types=st.sampled_from(["hhh", "fhh", "ffh", "hhf"]),
    seed=st.integers(0, 2**31),
)
def test_reference_is_the_definition(b, frames, run, d, form, types, seed):
    torch.manual_seed(seed)
    x_type, y_type, gate_type = ({"h": torch.float16, "f": torch.float32}[t] for t in types)
    x, y = torch.randn(b, frames * run, d).to(x_type), torch.randn(b, frames * run, d).to(y_type)
    gate, by = gate_of(form, b, frames, run, d, gate_type)
    want = x.double() + by * y.double()
    got = gated_residual(x, y, gate)
    assert got.dtype is x_type
    torch.testing.assert_close(got.double(), want, rtol=2**-11 if x_type is torch.float16 else 1e-6, atol=1e-6)
    torch.testing.assert_close(gated_residual(x, y, gate, policy=OFF).double(), want, rtol=4e-3, atol=4e-3)
    for policy in (KernelPolicy(), OFF):
        there = x.clone()
        gated_residual_(there, y, gate, policy=policy)
        assert torch.equal(there, gated_residual(x, y, gate, policy=policy))


def test_video_shapes():
    x, y, gate = torch.randn(2, 3, 4, 8).half(), torch.randn(2, 3, 4, 8).half(), torch.randn(2, 3, 1, 8).half()
    want = (x.double() + gate.double() * y.double()).half()
    assert torch.equal(gated_residual(x, y, gate), want)
    for policy in (KernelPolicy(), OFF):
        there = x.clone()
        gated_residual_(there, y, gate, policy=policy)
        torch.testing.assert_close(there, want, rtol=2e-3, atol=2e-3)


def test_wrong_shapes_are_value_errors():
    x = torch.zeros(2, 6, 8).half()
    with pytest.raises(ValueError, match="y: "):
        gated_residual(x, x[:, :5])
    with pytest.raises(ValueError, match="gate: "):
        gated_residual(x, x, torch.zeros(2, 1, 9).half())
    with pytest.raises(ValueError, match="no rows"):
        gated_residual(x[0, 0], x[0, 0], x[0, 0])


@pytest.mark.parametrize(
    ("operand", "x", "y", "gate"),
    [
        ("y", (2, 6, 8), (2, 5, 8), None),
        ("y", (2, 6, 8), (1, 6, 8), None),
        ("y", (2, 6, 8), (6, 8), (8,)),
        ("y", (2, 6, 8), (2, 6, 1), None),
        ("y", (), (1,), None),
        ("x", (8,), (8,), (8,)),
        ("gate", (2, 6, 8), (2, 6, 8), ()),
        ("gate", (2, 6, 8), (2, 6, 8), (1,)),
        ("gate", (2, 6, 8), (2, 6, 8), (2, 1, 9)),
        ("gate", (2, 6, 8), (2, 6, 8), (2, 6, 1)),
        ("gate", (2, 6, 8), (2, 6, 8), (3, 1, 8)),
        ("gate", (2, 6, 8), (2, 6, 8), (2, 7, 8)),
        ("gate", (2, 6, 8), (2, 6, 8), (2, 0, 8)),
        ("gate", (2, 6, 8), (2, 6, 8), (2, 3, 2, 8)),
        ("gate", (2, 3, 2, 8), (2, 3, 2, 8), (1, 2, 3, 1, 8)),
        ("gate", (6, 8), (6, 8), (2, 6, 8)),
        ("gate", (0, 6, 8), (0, 6, 8), (1, 1, 9)),
    ],
)
def test_wrong_operands_are_named(operand, x, y, gate):
    tensors = [None if shape is None else torch.zeros(shape).half() for shape in (x, y, gate)]
    for op in (gated_residual, gated_residual_):
        for policy in (KernelPolicy(), OFF):
            with pytest.raises(ValueError, match=rf"^{op.__name__}: {operand}: "):
                op(*tensors, policy=policy)


@pytest.mark.parametrize(
    "shape", [(8,), (1, 8), (4, 8), (6, 8), (1, 1, 8), (2, 1, 8), (2, 4, 8), (1, 6, 8), (2, 3, 1, 8), (1, 6, 1, 8)]
)
def test_forms_that_broadcast(shape):
    for x in (torch.zeros(2, 6, 8).half(), torch.zeros(2, 3, 2, 8).half()):
        for policy in (KernelPolicy(), OFF):
            assert gated_residual(x, x, torch.zeros(shape).half(), policy=policy).shape == x.shape
            gated_residual_(x.clone(), x, torch.zeros(shape).half(), policy=policy)


def test_in_place_needs_a_place_of_its_own():
    OPS["gated_residual_"].forget()  # a plan is asked for once: another test may have had these shapes
    x = torch.ones(4, 6, 8).half()
    for policy in (KernelPolicy(), OFF):
        with pytest.raises(ValueError, match=r"x: .* share memory"):
            gated_residual_(x[:1].expand(4, 6, 8), x, policy=policy)
        with pytest.raises(ValueError, match=r"x: .* overlaps y"):
            gated_residual_(x[:3], x[1:], policy=policy)
        with pytest.raises(ValueError, match=r"x: .* overlaps gate"):
            gated_residual_(x, x.clone(), x[:, :1], policy=policy)
        gated_residual_(x[::2], x[1::2], policy=policy)
        there = torch.ones(2, 6, 8).half()
        gated_residual_(there, there, policy=policy)  # itself, element for element
        assert (there == 2).all()


def strided(data):
    """Two views of one buffer, any strides, and the bytes each covers."""
    buffer = torch.zeros(4096, dtype=torch.uint8)
    views, bytes_of = [], []
    for _ in range(2):
        dtype = data.draw(st.sampled_from([torch.float16, torch.float32]))
        sizes = data.draw(st.lists(st.integers(1, 4), max_size=3))
        strides = [data.draw(st.integers(0, 12)) for _ in sizes]
        typed = buffer.view(dtype)
        view = typed.as_strided(sizes, strides, data.draw(st.integers(0, 40)))
        places = torch.arange(typed.numel()).as_strided(sizes, strides, view.storage_offset()).flatten().tolist()
        unit = view.element_size()
        views.append(view)
        bytes_of.append({place * unit + byte for place in places for byte in range(unit)})
    return views, bytes_of


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_overlap_is_exact(data):
    (a, b), (of_a, of_b) = strided(data)
    assert overlap(a, b) == overlap(b, a) == bool(of_a & of_b)


def test_overlap_of_thirds_is_found_fast():
    packed = torch.empty(2, 32760, 3, 40, 128, dtype=torch.float16)
    q, k, _ = packed.unbind(2)
    assert not overlap(q, k) and overlap(q, packed) and overlap(q[:, 5:], q[:, :6])
    assert not overlap(q.transpose(1, 2), k) and not overlap(q[:, :5], q[:, 5:])
    assert not overlap(packed[..., :64], packed[..., 64:])


def test_special_values_and_empty():
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 65504, 1.0]]).half()
    y = torch.tensor([[1.0, -torch.inf, 1.0, 65504, torch.nan]]).half()
    for gate in (None, torch.ones(5).half(), torch.zeros(5).half()):
        torch.testing.assert_close(gated_residual(x, y, gate), gated_residual(x, y, gate, policy=OFF), equal_nan=True)
    assert gated_residual(x[:0], y[:0], torch.ones(5).half()).shape == (0, 5)


def test_a_saturating_stream_stays_finite():
    """Flux in fp16: what its blocks add does not always fit. A NaN is no large number, and an fp32 stream holds all of it."""
    x = torch.tensor([[60000, -60000, 60000, 1.0, torch.nan, 60000]]).half()
    y = torch.tensor([[60000, -60000, torch.inf, 1.0, 1.0, -60000]]).half()
    want = torch.tensor([[65504, -65504, 65504, 2.0, torch.nan, 0.0]]).half()
    for policy in (KernelPolicy(), OFF):
        for gate in (None, torch.ones(6).half()):
            got = gated_residual(x, y, gate, saturate=True, policy=policy)
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
            there = x.clone()
            gated_residual_(there, y, gate, saturate=True, policy=policy)
            torch.testing.assert_close(there, want, rtol=0, atol=0, equal_nan=True)
        assert gated_residual(x.float(), y.float(), saturate=True, policy=policy)[0, 0] == 120000


def test_modes_and_compile():
    def block(x, y, gate):
        z = gated_residual(x, y, gate)
        gated_residual_(z, y)
        return z

    x, y = torch.randn(2, 5, 16).half(), torch.randn(2, 5, 16).half()
    gate = torch.randn(2, 6, 16).half()[:, 2:3]
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, y, gate), block(x, y, gate), rtol=0, atol=0)
    with pytest.raises(KernelRefused, match=r"forced on but cannot serve .*on the CPU"):
        gated_residual(x, y, policy=KernelPolicy.of("on"))


@pytest.mark.parametrize("name", ["gated_residual", "gated_residual_"])
def test_registration_is_sound(name):
    """torch's own checks of the schema and the fake."""
    x = torch.randn(2, 5, 16).half()
    torch.library.opcheck(OPS[name].traced, (x, x.clone(), x[:, :1].clone(), True, KernelPolicy().token))
