"""The Wan 2.1 and Wan 2.2 video VAEs, with the tensor names of the originals.

Both are causal 3D convolution nets of four stages with widths d * (1, 2, 4, 4):

    encoder.conv1, encoder.downsamples, encoder.middle, encoder.head -> conv1 -> mean and log variance
    conv2 -> decoder.conv1, decoder.middle, decoder.upsamples, decoder.head

    residual block    .residual.0.gamma, .residual.2 (3x3x3), .residual.3.gamma, .residual.6 (3x3x3); .shortcut (1x1x1)
                      where the width changes. RMS gammas [c, 1, 1, 1]; SiLU before each convolution
    middle            .0 residual, .1 attention (.norm.gamma [c, 1, 1], .to_qkv, .proj, 1x1), .2 residual
    head              .0.gamma, .2 (3x3x3)
    resampling        .resample.1 (3x3), and .time_conv (3x1x1) where time is resampled too: c -> c down, c -> 2c up

Wan 2.1: 8x8x4, 16 latent channels. One flat list per side, e.g. encoder.downsamples.{0..10}; an upsampling halves c.
Wan 2.2: 16x16x4, 48 latent channels, pixels folded 2x2 into 12 channels. A list of stages with a list of layers in each,
         e.g. encoder.downsamples.{0..3}.downsamples.{0..2}; c stays. Encoder and decoder have widths of their own.

Stock reads the width of a Wan 2.1 VAE from the file. That of Wan 2.2 it fixes at 160 and 256, in the arguments it gives to
`comfy.ldm.wan.vae2_2.WanVAE`, and no option changes them; a full-size file would have 1.4 GB. `wan22_widths` overrides
these two arguments, and nothing else, for the time of a load.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from .container import shapes
from .storage import PLAIN, Cast, Storage
from .weights import Table, conv, scale

MULTIPLIERS = (1, 2, 4, 4)
STAGES = len(MULTIPLIERS)
CUBE = (3, 3, 3)
ONE = (1, 1, 1)
LATENT_21 = 16
LATENT_22 = 48
FOLDED_PIXELS = 12

# What stock takes the latents of every Wan 2.1 VAE to have for mean and spread, by channel: its transformer sees them without.
LATENT_MEANS = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
LATENT_SPREADS = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)

# Pixels are expected in [-1, 1]; this keeps most of them inside, so that clamping hides nothing.
PIXEL_GAIN = 0.5

# SiLU halves what the last norm makes; this gives latents of size one.
LATENT_GAIN = 2.0


@dataclass(frozen=True)
class VaeSize:
    """Base widths. Only the Wan 2.2 VAE has two of them."""

    encoder: int = 16
    decoder: int = 16


WAN21 = VaeSize()
WAN22 = VaeSize(encoder=8, decoder=16)


def table_21(size: VaeSize) -> Table:
    """Every tensor of a Wan 2.1 VAE."""
    widths = [size.encoder * m for m in (1, *MULTIPLIERS)]
    out = conv("encoder.conv1", widths[0], 3, CUBE)
    place = 0
    for stage in range(STAGES):
        for into in (widths[stage], widths[stage + 1]):
            out |= _residual(f"encoder.downsamples.{place}", into, widths[stage + 1])
            place += 1
        if stage < STAGES - 1:
            out |= _down(f"encoder.downsamples.{place}", widths[stage + 1], time=stage > 0)
            place += 1
    out |= _middle("encoder.middle", widths[-1]) | _head("encoder.head", widths[-1], 2 * LATENT_21, LATENT_GAIN)
    out |= _bridge(LATENT_21)

    widths = [size.decoder * m for m in (MULTIPLIERS[-1], *MULTIPLIERS[::-1])]
    out |= conv("decoder.conv1", widths[0], LATENT_21, CUBE) | _middle("decoder.middle", widths[0])
    place = 0
    for stage in range(STAGES):
        into, width = widths[stage] // (2 if stage else 1), widths[stage + 1]
        for source in (into, width, width):
            out |= _residual(f"decoder.upsamples.{place}", source, width)
            place += 1
        if stage < STAGES - 1:
            out |= _up(f"decoder.upsamples.{place}", width, width // 2, time=stage < 2)
            place += 1
    return out | _head("decoder.head", widths[-1], 3, PIXEL_GAIN)


def table_22(size: VaeSize) -> Table:
    """Every tensor of a Wan 2.2 VAE."""
    widths = [size.encoder * m for m in (1, *MULTIPLIERS)]
    out = conv("encoder.conv1", widths[0], FOLDED_PIXELS, CUBE)
    for stage in range(STAGES):
        name = f"encoder.downsamples.{stage}.downsamples"
        for place, into in enumerate((widths[stage], widths[stage + 1])):
            out |= _residual(f"{name}.{place}", into, widths[stage + 1])
        if stage < STAGES - 1:
            out |= _down(f"{name}.2", widths[stage + 1], time=stage > 0)
    out |= _middle("encoder.middle", widths[-1]) | _head("encoder.head", widths[-1], 2 * LATENT_22, LATENT_GAIN)
    out |= _bridge(LATENT_22)

    widths = [size.decoder * m for m in (MULTIPLIERS[-1], *MULTIPLIERS[::-1])]
    out |= conv("decoder.conv1", widths[0], LATENT_22, CUBE) | _middle("decoder.middle", widths[0])
    for stage in range(STAGES):
        name, width = f"decoder.upsamples.{stage}.upsamples", widths[stage + 1]
        for place, into in enumerate((widths[stage], width, width)):
            out |= _residual(f"{name}.{place}", into, width)
        if stage < STAGES - 1:
            out |= _up(f"{name}.3", width, width, time=stage < 2)
    return out | _head("decoder.head", widths[-1], FOLDED_PIXELS, PIXEL_GAIN)


def _residual(name: str, into: int, width: int) -> Table:
    out = scale(f"{name}.residual.0.gamma", into, *ONE) | conv(f"{name}.residual.2", width, into, CUBE)
    out |= scale(f"{name}.residual.3.gamma", width, *ONE) | conv(f"{name}.residual.6", width, width, CUBE)
    return out | conv(f"{name}.shortcut", width, into, ONE) if into != width else out


def _middle(name: str, width: int) -> Table:
    out = _residual(f"{name}.0", width, width) | scale(f"{name}.1.norm.gamma", width, 1, 1)
    out |= conv(f"{name}.1.to_qkv", 3 * width, width, (1, 1)) | conv(f"{name}.1.proj", width, width, (1, 1))
    return out | _residual(f"{name}.2", width, width)


def _down(name: str, width: int, time: bool) -> Table:
    out = conv(f"{name}.resample.1", width, width, (3, 3))
    return out | conv(f"{name}.time_conv", width, width, (3, 1, 1)) if time else out


def _up(name: str, width: int, out_width: int, time: bool) -> Table:
    out = conv(f"{name}.resample.1", out_width, width, (3, 3))
    return out | conv(f"{name}.time_conv", 2 * width, width, (3, 1, 1)) if time else out


def _head(name: str, width: int, channels: int, gain: float) -> Table:
    return scale(f"{name}.0.gamma", width, *ONE) | conv(f"{name}.2", channels, width, CUBE, gain=gain)


def _bridge(latent: int) -> Table:
    return conv("conv1", 2 * latent, 2 * latent, ONE) | conv("conv2", latent, latent, ONE)


@contextmanager
def wan22_widths(vae2_2: ModuleType, path: Path) -> Iterator[None]:
    """While open, stock's `VAE` takes the widths of a Wan 2.2 VAE from the file. `vae2_2` is `comfy.ldm.wan.vae2_2`."""
    shape = shapes(path)
    widths = {"dim": shape["encoder.head.0.gamma"][0] // 4, "dec_dim": shape["decoder.head.0.gamma"][0]}
    # The class stays: who first imports it meanwhile derives from it.
    made: Any = vae2_2.WanVAE
    begin = made.__init__
    made.__init__ = lambda self, **options: begin(self, **(options | widths))
    try:
        yield
    finally:
        made.__init__ = begin


# Stock casts what it finds into its own VAE dtype, plain fp8 included; scaled fp8 it does not know here.
STORAGES: dict[str, Storage] = PLAIN | {"fp8_e4m3fn": Cast()}
