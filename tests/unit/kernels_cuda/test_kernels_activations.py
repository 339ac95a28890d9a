"""silu, gelu, silu_mul, silu_mul_ and gelu_mul without a GPU: references against the formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bed.depth import examples
from fusestream.kernels_cuda import OPS, KernelPolicy, KernelRefused, gelu, gelu_mul, silu, silu_mul, silu_mul_
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.elementwise import activations
from fusestream.kernels_cuda.ops.views.tiles import Tiles, packed, tiles

OFF = KernelPolicy.of("off")
KINDS = ("silu", "tanh", "erf", "quick")


def by_hand(x, kind):
    """The formulas, in float64."""
    x = x.double()
    if kind == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if kind == "erf":
        return x * 0.5 * torch.erfc(-x / math.sqrt(2))
    return x / (1 + torch.exp(-x * (1.0 if kind == "silu" else 1.702)))


def plain(x, kind, **options):
    return silu(x, **options) if kind == "silu" else gelu(x, kind, **options)


def gated(gate, up, kind, **options):
    return silu_mul(gate, up, **options) if kind == "silu" else gelu_mul(gate, up, kind, **options)


@settings(max_examples=examples(60), deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    layout=st.sampled_from(["pair", "split", "interleaved"]),
    power=st.integers(-10, 4),
    size=st.sampled_from([0.1, 3.0, 100.0]),
    seed=st.integers(0, 2**31),
)
def test_reference_is_the_definition(shape, kind, dtype, layout, power, size, seed):
    torch.manual_seed(seed)
    gate, up = ((torch.randn(shape) * size).to(dtype) for _ in range(2))
    step = 2**-11 if dtype is torch.float16 else 2e-6
    want = by_hand(gate, kind)
    # In fp32 1 + erf(x) cancels near x = -4: what is left of it is a few ulps of 1, times x / 2.
    torch.testing.assert_close(plain(gate, kind).double(), want, rtol=step, atol=4e-7 * size + 2**-25)
    both = {
        "pair": (gate, up),
        "split": (torch.cat((gate, up), -1), None),
        "interleaved": (torch.stack((gate, up), -1).flatten(-2), None),
    }[layout]
    options = {} if layout == "pair" else {"layout": layout}
    want = want * up.double() * 2.0**power
    got = gated(*both, kind, scale=2.0**power, **options)
    assert got.shape == gate.shape and got.dtype is dtype and got.is_contiguous()
    fits = want.abs() < 65504
    allowed = 1e-6 * size * size * 2.0**power + 2**-25
    torch.testing.assert_close(got.double()[fits], want[fits], rtol=step, atol=allowed)
    torch.testing.assert_close(
        gated(*both, kind, policy=OFF, **options), gated(*both, kind, **options), rtol=4e-3, atol=1e-2 * size
    )


def test_scale_keeps_what_would_overflow():
    """T5: gate and up fit fp16, their product does not, its 1/16 does, with the same digits."""
    gate = torch.tensor([1000.0, 3.0, 60000.0, 60000.0]).half()
    up = torch.tensor([900.0, 5.0, 60000.0, -60000.0]).half()
    assert gelu_mul(gate, up).tolist()[0] == math.inf
    small = gelu_mul(gate, up, scale=1 / 16)
    assert small[0] == 56250 and small[2] == math.inf
    assert gelu_mul(gate, up, scale=1 / 16, saturate=True).tolist()[2:] == [65504, -65504]
    assert small[1] * 16 == gelu_mul(gate, up)[1]
    nan = torch.tensor([math.nan]).half()
    assert silu_mul(nan, nan, saturate=True).isnan().all()


@pytest.mark.parametrize("layout", ["pair", "split", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_into_a_part_of_a_buffer(layout, dtype):
    gate, up = torch.randn(2, 5, 8).half(), torch.randn(2, 5, 8).half()
    both = {
        "pair": (gate, up),
        "split": (torch.cat((gate, up), -1), None),
        "interleaved": (torch.stack((gate, up), -1).flatten(-2), None),
    }[layout]
    options = {"layout": "split" if layout == "pair" else layout, "scale": 0.5, "saturate": True}
    for policy in (KernelPolicy(), OFF):
        room = torch.zeros(2, 7, 20, dtype=dtype)
        silu_mul_(room[:, 1:6, 8:16], *both, **options, policy=policy)
        assert torch.equal(room[:, 1:6, 8:16], silu_mul(*both, **options, out_dtype=dtype, policy=policy))
        assert int((room != 0).sum()) == 2 * 5 * 8
    call = Call("silu_mul_", (room[:, 1:6, 8:16], *both), ("silu", options["layout"], 0.5, True))
    assert next(activations.obstacles(call), None) is None


def test_a_place_of_its_own():
    x = torch.zeros(2, 6, 8).half()
    OPS["silu_mul_"].forget()
    with pytest.raises(ValueError, match=r"silu_mul_: out: \[2, 6, 4\] is written, and overlaps gate"):
        silu_mul_(x[..., :4], x)
    with pytest.raises(ValueError, match=r"silu_mul_: out: \[2, 6, 8\] is not the result's shape \[2, 6, 4\]"):
        silu_mul_(x.clone(), x)


@settings(max_examples=examples(100), deadline=None)
@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=5), order=st.randoms(), gap=st.integers(0, 3))
def test_tiles_address_every_element(shape, order, gap):
    """The merged view meets the same addresses in the same order as the shape and strides it was made from."""
    dims = list(range(len(shape)))
    order.shuffle(dims)
    wide = torch.empty([*(shape[i] for i in dims[:-1]), shape[dims[-1]] + gap])[..., : shape[dims[-1]]]
    back = [dims.index(i) for i in range(len(shape))]
    x = wide.permute(back)
    shared = torch.empty([n if order.random() < 0.5 else 1 for n in shape]).expand(shape)
    view = tiles(shape, x.stride(), shared.stride(), packed(shape))
    if isinstance(view, str):
        assert "do not fold" in view
        return
    for t, place in zip((x, shared), view.places, strict=False):
        met = [
            sum(i * s for i, s in zip(index, place, strict=True))
            for index in torch.cartesian_prod(
                *(torch.arange(n) for n in (view.batches, view.rows, view.width))
            ).tolist()
        ]
        index = torch.cartesian_prod(*(torch.arange(n) for n in shape)).view(-1, len(shape)).tolist()
        assert met == [sum(i * s for i, s in zip(each, t.stride(), strict=True)) for each in index]


def test_contiguous_tensors_are_one_row():
    assert tiles((2, 3, 8), packed((2, 3, 8))) == Tiles(1, 1, 48, ((0, 0, 1),))
    assert tiles((2, 3, 8), (48, 16, 1)) == Tiles(1, 6, 8, ((0, 16, 1),))
    assert tiles((2, 4, 6, 6), (144, 36, 6, 1), (0, 1, 0, 0)) == Tiles(2, 4, 36, ((144, 36, 1), (0, 1, 0)))
    assert tiles((1, 1), (1, 1)).width == 1
    assert tiles((2, 4, 8), (64, 16, 2)).wide((2,)) and not tiles((2, 4, 8), (64, 15, 1)).wide()


@pytest.mark.parametrize(
    ("width", "grid", "threads"),
    [(1, (1, 1, 1), 32), (8960, (3, 1, 1), 192), (8192, (2, 1, 1), 256), (2**34, (2**22, 1, 1), 256)],
)
def test_chunks(width, grid, threads):
    assert Tiles(1, 1, width, ()).grid(wide=width > 8) == (grid, threads)


def test_wrong_shapes_are_value_errors():
    x = torch.zeros(2, 6).half()
    with pytest.raises(ValueError, match="up: "):
        silu_mul(x, x[:1])
    with pytest.raises(ValueError, match="two halves"):
        silu_mul(x[:, :5])
    with pytest.raises(ValueError, match="power of two"):
        silu_mul(x, scale=3.0)
    with pytest.raises(ValueError, match="expected tanh, erf or quick"):
        gelu(x, "exact")
    with pytest.raises(ValueError, match="layout"):
        silu_mul(x, layout="columns")


def half(*shape):
    return torch.zeros(shape).half()


@pytest.mark.parametrize(
    ("operand", "op", "tensors", "options"),
    [
        ("kind", gelu, [half(4)], {"kind": "exact"}),
        ("up", silu_mul, [half(2, 6), half(1, 6)], {}),
        ("up", silu_mul, [half(2, 6), half(6)], {}),
        ("up", silu_mul, [half(2, 6), half(2, 7)], {}),
        ("up", gelu_mul, [half(0, 6), half(0, 5)], {}),
        ("gate", silu_mul, [half(2, 5)], {}),
        ("gate", gelu_mul, [half()], {}),
        ("gate", gelu_mul, [half(2, 5)], {"layout": "interleaved"}),
        ("kind", gelu_mul, [half(2, 6)], {"kind": "exact"}),
        ("layout", silu_mul, [half(2, 6)], {"layout": "columns"}),
        *(("scale", silu_mul, [half(2, 6)], {"scale": s}) for s in (0.0, -1.0, 3.0, math.inf, math.nan, 2.0**-150)),
    ],
)
def test_wrong_operands_are_named(operand, op, tensors, options):
    for policy in (KernelPolicy(), OFF):
        with pytest.raises(ValueError, match=rf"^{op.__name__}: {operand}\b"):
            op(*tensors, **options, policy=policy)


def test_forms_that_serve():
    for policy in (KernelPolicy(), OFF):
        assert silu(half(), policy=policy).shape == ()
        assert silu_mul(half(0, 6), policy=policy).shape == (0, 3)
        assert silu_mul(half(2, 0), policy=policy).shape == (2, 0)
        assert silu_mul(half(), half(), scale=2.0**-3, policy=policy).shape == ()


def test_special_values_and_empty():
    """Infinities apart. -inf: infinitely much of what is left of 1 + erf(-inf), which is nothing or a last digit, by the CPU. inf:
    torch's own GELU makes NaN of it on some CPUs, which is theirs."""
    x = torch.tensor([math.nan, 65504, -65504, 0.0, -0.0]).half()
    for kind in KINDS:
        for a, b in ((plain(x, kind), plain(x, kind, policy=OFF)), (gated(x, x, kind), gated(x, x, kind, policy=OFF))):
            assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf()), (kind, a, b)
        assert not (plain(torch.tensor([-math.inf]).half(), kind) > 0).any()
        assert (plain(torch.tensor([math.inf]).half(), kind) == math.inf).all()
        assert plain(torch.zeros(3, 0).half(), kind).shape == (3, 0)


def test_modes():
    with pytest.raises(KernelRefused, match=r"forced on but cannot serve .*on the CPU"):
        silu(torch.zeros(4).half(), policy=KernelPolicy.of("on"))


def test_compile_keeps_the_ops_whole():
    def block(x):
        return silu_mul(gelu(x, "tanh"), layout="interleaved", scale=0.5), gelu_mul(silu(x))

    x = torch.randn(3, 16).half()
    for got, want in zip(torch.compile(block, fullgraph=True, backend="aot_eager")(x), block(x), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("silu", ("silu", None)),
        ("gelu", ("gelu_erf", torch.float32)),
        ("silu_mul", ("silu", "split", 0.5, True, None)),
        ("gelu_mul", ("gelu_tanh", "interleaved", 1.0, False, None)),
        ("silu_mul_", ("silu", "split", 1.0, True)),
    ],
)
def test_registration_is_sound(name, arguments):
    """torch's own checks of the schema and the fake."""
    x = torch.randn(3, 16).half()
    tensors = {"silu_mul": (x, x), "gelu_mul": (x, None), "silu_mul_": (x[:, :8].clone(), x, None)}.get(name, (x,))
    torch.library.opcheck(OPS[name].traced, (*tensors, *arguments, KernelPolicy().token))
