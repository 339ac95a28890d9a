"""The feed-forward style network of Johnson et al. (2016) with instance norm, as in the files of
PyTorch's own example.

Three convolutions make the picture a quarter as large in each direction, residual blocks work on
that, and two upsampling convolutions and a last one make it large again. All padding reflects.
Parts are named as in the files; pixels go from 0 to 255.

It is written in torch's layers, which `fuse` replaces by ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ....kernels_cuda.modules import FusedConvNormAct2d, Table, fuse
from ....kernels_cuda.policy import KernelPolicy
from .bands import Rows, convolved, normed, padded, upsampled

PIXELS = 255.0
# Pixels of a side, so that reflection works at a quarter of the size, too.
LEAST = 16


class ConvLayer(nn.Module):
    """Reflection by half of the taps, then a convolution."""

    def __init__(self, channels: int, out: int, taps: int, stride: int = 1) -> None:
        super().__init__()
        self.reflection_pad = nn.ReflectionPad2d(taps // 2)
        self.conv2d = nn.Conv2d(channels, out, taps, stride)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.conv2d(self.reflection_pad(x))
        return made


class UpsampleConvLayer(nn.Module):
    """An enlargement to twice the size, each pixel repeated, then as ConvLayer."""

    def __init__(self, channels: int, out: int, taps: int) -> None:
        super().__init__()
        self.upsample = nn.Upsample(scale_factor=2)
        self.reflection_pad = nn.ReflectionPad2d(taps // 2)
        self.conv2d = nn.Conv2d(channels, out, taps)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.conv2d(self.reflection_pad(self.upsample(x)))
        return made


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.conv1, self.in1 = ConvLayer(channels, channels, taps), nn.InstanceNorm2d(channels, affine=True)
        self.conv2, self.in2 = ConvLayer(channels, channels, taps), nn.InstanceNorm2d(channels, affine=True)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.in2(self.conv2(self.relu(self.in1(self.conv1(x)))))
        return value + x


@dataclass(frozen=True)
class Sizes:
    """The sizes that a file's shapes tell. widths: of the three convolutions and the two after the
    blocks; taps: of those and the last one; block_taps: of the blocks."""

    widths: tuple[int, int, int, int, int]
    taps: tuple[int, int, int, int, int, int]
    block_taps: int
    blocks: int


class TransformerNet(nn.Module):
    """One look. x [1, 3, h, w] from 0 to 255 -> [1, 3, h', w'], where h' and w' are h and w rounded
    up to multiples of 4."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        one, two, three, four, five = sizes.widths
        taps = sizes.taps
        self.sizes = sizes
        self.conv1, self.in1, self.relu1 = ConvLayer(3, one, taps[0]), _norm(one), nn.ReLU()
        self.conv2, self.in2, self.relu2 = ConvLayer(one, two, taps[1], 2), _norm(two), nn.ReLU()
        self.conv3, self.in3, self.relu3 = ConvLayer(two, three, taps[2], 2), _norm(three), nn.ReLU()
        for number in range(1, sizes.blocks + 1):
            self.add_module(f"res{number}", ResidualBlock(three, sizes.block_taps))
        self.deconv1, self.in4, self.relu4 = UpsampleConvLayer(three, four, taps[3]), _norm(four), nn.ReLU()
        self.deconv2, self.in5, self.relu5 = UpsampleConvLayer(four, five, taps[4]), _norm(five), nn.ReLU()
        self.deconv3 = ConvLayer(five, 3, taps[5])
        self.in_bands: _InBands | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu2(self.in2(self.conv2(self.relu1(self.in1(self.conv1(x))))))
        return self.ending(self.middle(self.smaller(x)))

    def smaller(self, x: Tensor) -> Tensor:
        """[1, c, h / 2, w / 2] -> [1, c', h / 4, w / 4]."""
        made: Tensor = self.relu3(self.in3(self.conv3(x)))
        return made

    def middle(self, x: Tensor) -> Tensor:
        """[1, c, h / 4, w / 4] -> [1, c', h / 2, w / 2]."""
        for number in range(1, self.sizes.blocks + 1):
            x = self.get_submodule(f"res{number}")(x)
        made: Tensor = self.relu4(self.in4(self.deconv1(x)))
        return made

    def ending(self, x: Tensor) -> Tensor:
        made: Tensor = self.deconv3(self.relu5(self.in5(self.deconv2(x))))
        return made

    def fused(self, policy: KernelPolicy) -> Table:
        """Put our layers in place of torch's. Calls with a whole picture are captured if that
        pays."""
        self.__dict__["in_bands"] = _InBands(self, policy)
        return fuse(self, policy, graphs=True)

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        if self.in_bands is not None:
            self.in_bands.forget()
        return super()._apply(*arguments, **options)  # type: ignore[no-untyped-call]

    def bytes_of(self, height: int, width: int, element: int) -> int:
        """About the most bytes that a whole picture takes: for a large one, the inputs and outputs
        of the last convolutions."""
        one, _, _, four, five = self.sizes.widths
        return height * width * element * max(3 * one, 2 * four + 2 * five, 3 * five)


def _norm(channels: int) -> nn.InstanceNorm2d:
    return nn.InstanceNorm2d(channels, affine=True)


class _InBands:
    """The same output, up to rounding, with full-size feature maps made some rows at a time.

    An instance norm needs the statistics of all rows: a first pass sums them, and a second one
    makes the rows again and goes on. So the first and the second last convolution are computed
    twice.
    """

    def __init__(self, net: TransformerNet, policy: KernelPolicy) -> None:
        self.net, self.policy = net, policy
        layers = {name: net.get_submodule(name) for name in ("conv1", "conv2", "deconv2", "deconv3")}
        # Made of the layers before `fuse` replaces them.
        self.bare = {name: FusedConvNormAct2d.of(layer.conv2d, policy=policy) for name, layer in layers.items()}  # type: ignore[arg-type]
        self.norms = {"in1": net.in1, "in5": net.in5}

    def forget(self) -> None:
        """Forget laid-out weights, because `.to()` is meant to free memory."""
        for layer in self.bare.values():
            layer.forget()

    def __call__(self, x: Tensor, rows: int) -> Tensor:
        """x as the net takes it; rows: of the picture, at a time."""
        bare = self.bare
        first = convolved(bare["conv1"], padded(Rows.of(x), bare["conv1"].conv))
        behind = normed(first, self.norms["in1"], rows, self.policy)
        half = convolved(bare["conv2"], padded(behind, bare["conv2"].conv)).all(max(rows // 2, 1))
        del first, behind
        half = self.net.relu2(self.net.in2(half))
        small = self.net.smaller(half)
        del half  # before full-size feature maps are made
        small = self.net.middle(small)
        larger = convolved(bare["deconv2"], padded(upsampled(Rows.of(small)), bare["deconv2"].conv))
        behind = normed(larger, self.norms["in5"], rows, self.policy)
        return convolved(bare["deconv3"], padded(behind, bare["deconv3"].conv)).all(rows)
