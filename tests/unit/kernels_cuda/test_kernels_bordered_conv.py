"""bordered_conv2d and bordered_upsample_conv2d without a GPU: borders, what is refused and why, the names."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from bed.depth import examples
from fusestream.kernels_cuda import OPS, KernelPolicy, bordered_upsample_conv2d, fold_upsample
from fusestream.kernels_cuda.build import matrix
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.conv import bordered_conv as op
from fusestream.kernels_cuda.ops.conv import conv
from fusestream.kernels_cuda.ops.conv.borders import border_obstacle, with_border

OFF = KernelPolicy.of("off")
LAST = torch.channels_last


@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(4, 7), st.integers(4, 7)),
    padding=st.tuples(*[st.integers(0, 3)] * 4),
    mode=st.sampled_from(["reflect", "replicate", "circular"]),
    last=st.booleans(),
)
@settings(max_examples=examples(80), deadline=None)
def test_a_border_is_torchs_in_one_format(sizes, padding, mode, last):
    x = torch.randn(sizes).contiguous(memory_format=LAST if last else torch.contiguous_format)
    got = with_border(x, padding, mode)
    assert torch.equal(got, functional.pad(x, padding, mode)) and got.is_contiguous(memory_format=LAST)
    assert border_obstacle(x, padding, mode) is None


@pytest.mark.parametrize(("mode", "most"), [("reflect", 3), ("circular", 4), ("replicate", 9)])
def test_borders_that_torch_has_no_pixels_for(mode, most):
    x = torch.zeros(1, 1, 6, 4)
    assert border_obstacle(x, (most, 0, 0, 0), mode) is None and functional.pad(x, (most, 0, 0, 0), mode) is not None
    if mode != "replicate":
        assert "too small for a border" in border_obstacle(x, (0, most + 1, 0, 0), mode)
        with pytest.raises(RuntimeError):
            functional.pad(x, (0, most + 1, 0, 0), mode)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize("size", [(1, 1), (1, 4), (3, 5)])
def test_upsampled_either_border_is_the_edges_own_pixels(mode, size):
    x, weight, bias = torch.randn(2, 3, *size).contiguous(memory_format=LAST), torch.randn(4, 3, 3, 3), torch.randn(4)
    larger = functional.pad(functional.interpolate(x.double(), scale_factor=2), (1, 1, 1, 1), mode)
    want = functional.conv2d(larger, weight.double(), bias.double()).relu()
    for policy in (KernelPolicy(), OFF):
        got = bordered_upsample_conv2d(x, weight, bias, activation="relu", policy=policy)
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)
    # And so are the phases of the folded weight, which the kernel computes.
    around = functional.pad(x.double(), (1, 1, 1, 1), "replicate")
    phases = functional.conv2d(around, fold_upsample(weight.double()))
    _, n, h, w = want.shape
    for row in (0, 1):
        for column in (0, 1):
            part = phases[:, (2 * row + column) * n :][:, :n, row : row + h // 2, column : column + w // 2]
            got = (part + bias.double().view(-1, 1, 1)).relu()
            torch.testing.assert_close(got, want[:, :, row::2, column::2], atol=2e-5, rtol=2e-5)


def half(*shape):
    return torch.zeros(*shape).half().contiguous(memory_format=LAST)


def call(x, weight, bias=None, stride=1, precision="precise", border="reflect"):
    options = ("none", stride, 1, 1, 1, 1, border)
    return Call("bordered_conv", (x, weight, bias), options, KernelPolicy.of("on", precision=precision))


def test_the_kernels_say_what_they_do_not_serve():
    x, weight = half(1, 8, 6, 6), half(16, 8, 3, 3)

    def why_not(*arguments, **options):
        return next(op.obstacles(call(*arguments, **options)), None)

    assert why_not(x, weight) is None and why_not(half(1, 3, 6, 6), half(16, 3, 3, 3)) is None
    assert "x is float32" in why_not(x.float(), weight)
    assert "x is not channels-last" in why_not(x.contiguous(), weight)
    assert "weight is not in torch.channels_last" in why_not(x, weight.contiguous())
    assert "bias is not contiguous" in why_not(x, weight, torch.zeros(32)[::2])
    assert "stride 3: the kernels have 1 and 2" in why_not(x, weight, stride=3)
    unfolded = Call("bordered_upsample_conv", (x, weight, None, None), ("none",))
    assert "fold_upsample" in next(op.upsample_obstacles(unfolded))
    folded = Call("bordered_upsample_conv", (x, weight, None, fold_upsample(weight)), ("none",))
    assert next(op.upsample_obstacles(folded), None) is None


def test_torchs_convolution_with_our_pass_behind_it_where_there_is_something_to_fuse():
    x, weight = half(1, 8, 6, 6), half(16, 8, 3, 3)
    assert next(op.fused_obstacles(call(x, weight, torch.zeros(16))), None) is None
    assert "nothing to fuse" in next(op.fused_obstacles(call(x, weight)))
    assert [one.name for one in op.BORDERED_CONV.candidates] == ["cuda", "stock", "cudnn + fused pass"]


def test_every_kernel_named_is_compiled():
    source = (matrix.SOURCES / "bordered_conv.cu").read_text(encoding="utf-8")
    named = {*OPS["bordered_conv"].kernels["bordered_conv"], *OPS["bordered_upsample_conv"].kernels["bordered_conv"]}
    assert named == {line.split("(")[1].split(",")[0] for line in source.splitlines() if line.startswith("CONV(")}
    assert [name.removeprefix("k").lower() for name in ("kReflect", "kReplicate")] == list(op.BORDERS)
    assert "enum Border { kReflect, kReplicate };" in (matrix.SOURCES / "conv_params.cuh").read_text(encoding="utf-8")


@pytest.mark.parametrize("n", [1, 16, 17, 96, 200])
@pytest.mark.parametrize("precision", ["precise", "fast", "turbo"])
def test_every_tactic_has_its_kernel(n, precision):
    for stride, name in ((1, "3x3"), (2, "3x3_stride_2")):
        tactics = op.ways(call(half(1, 8, 9, 9), half(n, 8, 3, 3), stride=stride, precision=precision))
        names = {f"bordered_{name}_{tactic.cut}_{tactic.precision}" for tactic in tactics}
        assert names and names <= set(OPS["bordered_conv"].kernels["bordered_conv"])


class Recorded:
    """A card and its kernel: what is launched, and with what."""

    index, cut = 0, (16, 96, 128, 1000)

    def kernel(self, *name):
        self.name = name
        return self

    def prepare(self, params, *, grid, block, shape, shared_bytes):
        self.params, self.grid = params, grid
        return self

    def filler(self, places, behind):
        assert places.keys() == {"x", "weight", "out"}

    def send(self):
        pass


def test_what_the_kernels_are_told(monkeypatch):
    monkeypatch.setattr(conv, "output_in_format", lambda *_: lambda: None)
    card = Recorded()
    one = Call("bordered_conv", (half(2, 8, 20, 40), half(100, 8, 3, 3), None), ("relu", 2, 1, 0, 2, 1, "replicate"))
    op.plan(one, card, op.Tactic("4x96", "fast"))
    p = card.params
    assert card.name == ("bordered_conv", "bordered_3x3_stride_2_4x96_fast")
    assert (p.height, p.width, p.out_height, p.out_width, p.top, p.left, p.border, p.n) == (
        20,
        40,
        11,
        20,
        2,
        1,
        1,
        100,
    )
    assert card.grid == (2 * 2 * 1, 2, 1)
    weight = half(100, 8, 3, 3)
    two = Call("bordered_upsample_conv", (half(1, 8, 20, 40), weight, None, fold_upsample(weight)), ("none",))
    op.upsample_plan(two, card)
    p = card.params
    assert (p.out_height, p.out_width, p.top, p.left, p.border) == (20, 40, 1, 1, 1)
    assert card.grid == (2 * 3 * 2, 1, 4) and card.name[1].startswith("bordered_2x2_")
