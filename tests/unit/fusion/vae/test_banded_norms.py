"""Group norms of bands: a smaller version of a picture, its statistics, and what bands make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusestream.fusion.vae.banded import install
from fusestream.fusion.vae.banded.norms import Norms
from fusestream.fusion.vae.banded.plan import Plan
from fusestream.fusion.vae.banded.reduced import reduced, size_of
from fusestream.fusion.vae.banded.rehearsal import Job
from fusestream.fusion.vae.banded.tensor import Banded, Unreadable

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def as_comfyui_runs(one_thread: None) -> Iterator[None]:
    with torch.inference_mode():
        yield


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.double().mean((-2, -1)), x.double().std((-2, -1), correction=0)


@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("factor", [2.0, 3.3])
def test_a_smaller_picture_has_the_colours_of_the_whole(unit: int, factor: float) -> None:
    """Of each channel of each frame; in whole cells, whose pixels stay neighbours."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 2, 40, 72).cumsum(-1) + 30
    size = size_of(40, 72, factor, unit)
    got = reduced(x, size, unit)
    assert got.shape == (2, 3, 2, *size) and size[0] % unit == size[1] % unit == 0
    assert 0.6 < 40 * 72 / (size[0] * size[1]) / factor**2 < 1.8
    for ours, whole in zip(moments(got), moments(x), strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-4)
    columns = torch.arange(72.0).expand(1, 1, 40, 72)
    steps = reduced(columns, size, unit)[0, 0, 0].diff().reshape(-1)
    assert steps.min() > 0, "in the order of the picture"
    within = [step for at, step in enumerate(steps.tolist()) if (at + 1) % unit]
    assert all(step == pytest.approx(min(steps.tolist()), rel=1e-3) for step in within)


def test_a_channel_of_one_value_keeps_it() -> None:
    x = torch.full((1, 2, 9, 9), 0.3)
    torch.testing.assert_close(reduced(x, (4, 4), 1), torch.full((1, 2, 4, 4), 0.3))


def test_a_picture_of_few_cells_is_not_made_smaller_than_these() -> None:
    assert size_of(3, 64, 100.0, 1) == (3, 4)
    assert size_of(24, 640, 100.0, 8) == (24, 32)


def banded(x: Tensor, low: int, high: int) -> Banded:
    return Banded(x.narrow(-1, low, high - low), x.ndim - 1, (low, high), x.shape[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 8, 3, 6, 10), (3, 8, 6, 10)])
@pytest.mark.parametrize("affine", [True, False])
def test_bands_are_normed_by_what_was_recorded(shape: tuple[int, ...], dtype: torch.dtype, affine: bool) -> None:
    """With the statistics of the whole picture a band has the numbers of one pass; numbers far from zero, too."""
    torch.manual_seed(1)
    x = (torch.randn(shape) * 2 + torch.randn(1, 8, *[1] * (len(shape) - 2)) * 9).to(dtype)
    weight, bias = (torch.randn(8).to(dtype), torch.randn(8).to(dtype)) if affine else (None, None)
    want = F.group_norm(x, 4, weight, bias, 1e-6)
    with Norms(None) as whole:
        F.group_norm(banded(x, 0, 10), 4, weight, bias, 1e-6)
    with Norms(whole.met) as norms:
        got: Any = F.group_norm(banded(x, 3, 9), 4, weight, bias, 1e-6)
    norms.end()
    assert got.shape == want.shape and got.span == (3, 9) and got.held.dtype is dtype
    torch.testing.assert_close(got.held, want[..., 3:9], atol=2e-5 if dtype is torch.float32 else 1e-2, rtol=1e-3)


@pytest.mark.parametrize(
    "calls",
    [
        lambda x: (F.group_norm(x, 2), F.group_norm(x, 4), F.group_norm(x, 4)),
        lambda x: (F.group_norm(x, 4), F.group_norm(x, 4)),
        lambda x: F.group_norm(x, 2),
    ],
    ids=["more", "others", "fewer"],
)
def test_other_norms_than_recorded_are_refused(calls: Callable[[Any], Any]) -> None:
    x = torch.randn(1, 8, 4, 6)
    with Norms(None) as whole:
        F.group_norm(banded(x, 0, 6), 2)
        F.group_norm(banded(x, 0, 6), 4)

    def run() -> None:
        with Norms(whole.met) as norms:
            calls(banded(x, 1, 5))
        norms.end()

    with pytest.raises(Unreadable, match="group norms"):
        run()


def test_a_norm_whose_channels_are_cut_is_refused() -> None:
    x = torch.randn(1, 4, 8)
    with pytest.raises(Unreadable, match="channels"), Norms(None):
        F.group_norm(Banded(x[:, :2], 1, (0, 2), 4), 2)


@pytest.mark.parametrize(
    "kernel, stride, padding, more", [(4, 2, 1, 0), (2, 2, 0, 0), (3, 2, 1, 1), (2, 3, 0, 0), (5, 1, 2, 0)]
)
def test_rows_of_a_transposed_convolution_are_one_passes(kernel: int, stride: int, padding: int, more: int) -> None:
    torch.manual_seed(2)
    x, weight, bias = torch.randn(1, 4, 3, 12), torch.randn(4, 5, 1, kernel), torch.randn(5)
    options = {"stride": (1, stride), "padding": (0, padding), "output_padding": (0, more)}
    want = F.conv_transpose2d(x, weight, bias, **options)
    ends = 0
    for low, high in ((0, 5), (3, 9), (7, 12), (0, 12)):
        got: Any = F.conv_transpose2d(banded(x, low, high), weight, bias, **options)
        assert got.shape == want.shape
        torch.testing.assert_close(got.held, want[..., got.span[0] : got.span[1]], atol=1e-5, rtol=1e-5)
        assert got.span[1] - got.span[0] >= (high - low - 1) * stride - kernel
        ends += (got.span[0] == 0) + (got.span[1] == want.shape[-1])
    assert ends == 4


class Conditioned(nn.Module):
    """A decoder whose late norms are scaled by the latent, as CogVideoX's are."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(3, 4, 1)
        self.first, self.last = Block(), Block()
        self.out = nn.Conv2d(16, 3, 3, padding=1)

    def decode(self, z: Tensor) -> Tensor:
        x = self.first(F.interpolate(z.repeat(1, 4, 1, 1), scale_factor=2.0), z)
        x = x + x.mean((-2, -1), keepdim=True)  # bands begin behind this
        return self.out(self.last(F.interpolate(x, scale_factor=2.0), z))  # type: ignore[no-any-return]

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"norm": nn.GroupNorm(4, 16), "scale": nn.Conv2d(4, 16, 1)})
        self.conv = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        scale = self.parts["scale"](F.interpolate(z, size=x.shape[-2:]))
        return x + self.conv(F.silu(self.parts["norm"](x) * (1 + scale)))  # type: ignore[no-any-return]


def test_what_passes_beside_the_module_where_bands_begin_is_made_again() -> None:
    """The latent is there for bands and for the smaller picture, enlarged as the network does it."""
    torch.manual_seed(3)
    net: Any = Conditioned().eval()
    z = torch.randn(1, 4, 12, 40)
    want = net.decode(z)
    install.fuse(net)
    call, job = net._call(True), Job(tuple(z.shape), z.dtype, CPU, CPU)
    whole = net.fusestream_plans.find(call, job, 1 << 60)
    room = int(0.7 * whole.peak)
    plan = net.fusestream_plans.find(call, job, room)
    assert isinstance(plan, Plan) and plan.begin == "last" and plan.norms == 1 and len(plan.bands) > 1
    got = net.decode(z, room=room)
    # The norm reads what enters the bands, so its statistics are those of one pass.
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)


def test_only_the_first_and_the_last_band_reach_an_edge() -> None:
    """An inner band that enters at the edge of the picture makes all up to it, and takes more than a broader one."""
    torch.manual_seed(4)
    net: Any = nn.Module()
    net.encoder = nn.Conv2d(3, 4, 1)
    net.decoder = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(8)), nn.Upsample(scale_factor=4))
    decode: Callable[[Tensor], Tensor] = net.decoder.forward
    kind = type("Net", (nn.Module,), {"decode": lambda _self, z: decode(z), "encode": lambda _self, x: x})
    net.__class__ = kind
    z = torch.randn(1, 4, 8, 80)
    want = net.decode(z)
    install.fuse(net)
    call, job = net._call(True), Job(tuple(z.shape), z.dtype, CPU, CPU)
    plan = net.fusestream_plans.find(call, job, 1)
    assert isinstance(plan, Plan) and len(plan.bands) == 8
    assert all(band.enters[0] > 0 for band in plan.bands[1:]) and all(band.enters[1] < 80 for band in plan.bands[:-1])
    torch.testing.assert_close(net.decode(z, room=1), want, atol=1e-5, rtol=1e-4)
