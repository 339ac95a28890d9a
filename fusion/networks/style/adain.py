"""Adaptive instance normalisation (Huang and Belongie 2017): any look, taken from a picture.

The picture and the look pass through the first layers of a VGG network. Then each channel of the
picture gets the mean and the spread of the look's channel, and a decoder turns the result into a
picture. Pixels go from 0 to 1. Layers are numbered as in the published files: both networks are
nn.Sequential, and the encoder is used up to `relu4_1`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ....kernels_cuda import KernelPolicy, instance_norm
from ....kernels_cuda.modules import Table, fuse
from ....kernels_cuda.modules.graphs import attach
from .bands import in_parts

# Numbers of the convolutions in the files, in order; some are followed by a pool or an upsampling.
ENCODER = (0, 2, 5, 9, 12, 16, 19, 22, 25, 29)
POOLED = (5, 12, 25)
DECODER = (1, 5, 8, 11, 14, 18, 21, 25, 28)
UPSAMPLED = (1, 14, 21)
DOWN = 8  # factor by which features are smaller
# Rows beyond its own that a result depends on: 30 of the picture, four of the features.
HALO, FEATURE_HALO = 32, 4
EPS = 1e-5
LEAST = 16


def encoder(widths: Sequence[int]) -> nn.Sequential:
    """widths: output channels of each convolution of ENCODER. The first one converts colours, 1x1
    and without a ReLU."""
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 1)]
    channels = widths[0]
    for number, width in zip(ENCODER[1:], widths[1:], strict=True):
        layers += [nn.ReflectionPad2d(1), nn.Conv2d(channels, width, 3), nn.ReLU()]
        layers += [nn.MaxPool2d(2, 2, ceil_mode=True)] if number in POOLED else []
        channels = width
    return nn.Sequential(*layers)


def decoder(channels: int, widths: Sequence[int]) -> nn.Sequential:
    """channels: of the features. widths: output channels of each convolution of DECODER; the last
    has three, and no ReLU after it."""
    layers: list[nn.Module] = []
    for number, width in zip(DECODER, widths, strict=True):
        layers += [nn.ReflectionPad2d(1), nn.Conv2d(channels, width, 3), nn.ReLU()]
        layers += [nn.Upsample(scale_factor=2)] if number in UPSAMPLED else []
        channels = width
    return nn.Sequential(*layers[:-1])


class AdaIN(nn.Module):
    """The encoder, the decoder, and the norm between them."""

    def __init__(self, encoder_widths: Sequence[int], decoder_widths: Sequence[int]) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder(encoder_widths), decoder(encoder_widths[-1], decoder_widths)
        self.widest = max(encoder_widths[1], decoder_widths[-2])
        self.policy = KernelPolicy()

    def fused(self, policy: KernelPolicy) -> Table:
        """Put our layers in place of torch's. Calls with a whole picture are captured if that
        pays."""
        self.policy = policy
        table = fuse(self, policy)
        for part in (self.encoder, self.decoder):
            attach(part)
        return table

    def features(self, x: Tensor, rows: int | None = None) -> Tensor:
        """x [1, 3, h, w] from 0 to 1 -> [1, c, h / 8, w / 8], rounded up. rows: of x at a time;
        None: all."""
        if rows is None:
            made: Tensor = self.encoder(x)
            return made
        return in_parts(x, self.encoder, max(rows // DOWN, 1) * DOWN, HALO, DOWN, 1)

    def look(self, pictures: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and spread of each channel, [c] fp32, over pictures as `features` takes them; for
        several pictures, the averages of both."""
        found = []
        for picture in pictures:
            value = self.features(picture).flatten(2).float()
            found.append(torch.stack((value.mean(2)[0], (value.var(2)[0] + EPS).sqrt())))
        mean, spread = torch.stack(found).mean(0)
        return mean, spread

    def given(self, features: Tensor, look: tuple[Tensor, Tensor], strength: float) -> Tensor:
        """The features with that look, blended with their own below a strength of 1."""
        mean, spread = look
        count = features.shape[2] * features.shape[3]
        # The norm divides by the spread of the population, but these networks were trained with
        # that of a sample.
        share = (count - 1) / count
        made = instance_norm(features, spread * share**0.5, mean, eps=EPS * share, policy=self.policy)
        return made if strength == 1 else torch.lerp(features, made, strength)

    def picture(self, features: Tensor, rows: int | None = None) -> Tensor:
        """[1, c, h, w] -> [1, 3, 8 h, 8 w]. rows: of the features' picture at a time; None: all."""
        if rows is None:
            made: Tensor = self.decoder(features)
            return made
        return in_parts(features, self.decoder, max(rows // DOWN, 1), FEATURE_HALO, 1, DOWN)

    def bytes_of(self, height: int, width: int, element: int) -> int:
        """About the most bytes that a whole picture takes: the inputs and outputs of convolutions
        at full size."""
        return height * width * element * 3 * self.widest
