"""Style networks in miniature, with the names and layers that the published ones have: for the
tests and the bench.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

Weights = dict[str, Tensor]

# Of the published nets: (32, 64, 128, 64, 32), 5 blocks; VGG of 64 to 512.
SMALL = (4, 6, 8, 6, 4)
PUBLISHED = (32, 64, 128, 64, 32)
VGG = (3, 64, 64, 128, 128, 256, 256, 256, 256, 512)


def transformer(widths: tuple[int, ...] = SMALL, blocks: int = 2, seed: int = 0) -> Weights:
    """A net as PyTorch's fast_neural_style saves it."""
    one, two, three, four, five = widths
    made = _Maker(seed)
    into, out, taps = (3, one, two, three, four, five), (*widths, 3), (9, 3, 3, 3, 3, 9)
    for name, c, n, k in zip(
        ("conv1", "conv2", "conv3", "deconv1", "deconv2", "deconv3"), into, out, taps, strict=True
    ):
        made.convolution(f"{name}.conv2d", c, n, k)
    made.weights["deconv3.conv2d.weight"] *= 30
    made.weights["deconv3.conv2d.bias"] += 120  # a picture of 0 to 255
    for number, n in enumerate(widths, 1):
        made.norm(f"in{number}", n)
    for number in range(1, blocks + 1):
        for half in (1, 2):
            made.convolution(f"res{number}.conv{half}.conv2d", three, three, 3)
            made.norm(f"res{number}.in{half}", three)
    return made.weights


def vgg(widths: tuple[int, ...] = (3, 4, 4, 6, 6, 8, 8, 8, 8, 12), beyond: bool = True, seed: int = 1) -> Weights:
    """The encoder of an AdaIN network; its file goes on with layers that nobody uses."""
    made, c = _Maker(seed), 3
    for number, n in zip((0, 2, 5, 9, 12, 16, 19, 22, 25, 29), widths, strict=True):
        made.convolution(str(number), c, n, 3 if number else 1)
        c = n
    if beyond:
        made.convolution("32", c, c, 3)
    return made.weights


def decoder(channels: int = 12, widths: tuple[int, ...] = (8, 8, 8, 8, 6, 6, 4, 4, 3), seed: int = 2) -> Weights:
    """Of features of so many channels."""
    made, c = _Maker(seed), channels
    for number, n in zip((1, 5, 8, 11, 14, 18, 21, 25, 28), widths, strict=True):
        made.convolution(str(number), c, n, 3)
        c = n
    made.weights["28.bias"] += 0.5
    return made.weights


def transformed(x: Tensor, w: Weights) -> Tensor:
    """PyTorch's fast_neural_style of x [b, 3, h, w] from 0 to 255, by a net's state dict."""
    for n, step in ((1, 1), (2, 2), (3, 2)):
        x = _normed(convolved(x, w, f"conv{n}.conv2d", step), w, f"in{n}").relu()
    for n in range(1, 1 + sum(name.endswith("in1.weight") and name.startswith("res") for name in w)):
        y = _normed(convolved(x, w, f"res{n}.conv1.conv2d"), w, f"res{n}.in1").relu()
        x = _normed(convolved(y, w, f"res{n}.conv2.conv2d"), w, f"res{n}.in2") + x
    for layer, behind in (("deconv1", "in4"), ("deconv2", "in5")):
        x = _normed(convolved(functional.interpolate(x, scale_factor=2), w, f"{layer}.conv2d"), w, behind).relu()
    return convolved(x, w, "deconv3.conv2d")


def convolved(x: Tensor, w: Weights, name: str, step: int = 1) -> Tensor:
    """Reflected by half of the taps, and convolved."""
    border = w[f"{name}.weight"].shape[2] // 2
    around = functional.pad(x, (border,) * 4, "reflect")
    return functional.conv2d(around, w[f"{name}.weight"], w[f"{name}.bias"], step)


def _normed(x: Tensor, w: Weights, name: str) -> Tensor:
    return functional.instance_norm(x, weight=w[f"{name}.weight"], bias=w[f"{name}.bias"])


class _Maker:
    def __init__(self, seed: int) -> None:
        self.weights: Weights = {}
        self.generator = torch.Generator().manual_seed(seed)

    def convolution(self, name: str, c: int, n: int, taps: int) -> None:
        spread = (2 / (c * taps * taps)) ** 0.5
        self.weights[f"{name}.weight"] = torch.randn(n, c, taps, taps, generator=self.generator) * spread
        self.weights[f"{name}.bias"] = torch.randn(n, generator=self.generator) * 0.1

    def norm(self, name: str, n: int) -> None:
        self.weights[f"{name}.weight"] = 1 + 0.2 * torch.randn(n, generator=self.generator)
        self.weights[f"{name}.bias"] = 0.2 * torch.randn(n, generator=self.generator)
