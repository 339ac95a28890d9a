"""Wan 2.1's and Wan 2.2's VAEs.

Stock reads the width of a Wan 2.1 VAE from the file. That of Wan 2.2 it fixes at 160 and 256:
smaller ones load while `narrow.wan22_widths` is open.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, pairwise

from ..weights import Rows, Table, Tree, conv, gain, tree
from .stages import CUBE, LATENT_GAIN, ONE, PIXEL_GAIN, STAGES, down, up

LATENT_21, LATENT_22 = 16, 48
# What stock takes the latents of every Wan 2.1 VAE to have for mean and spread, by channel: its
# transformer sees them without.
LATENT_MEANS = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
LATENT_SPREADS = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)


@dataclass(frozen=True)
class VaeSize:
    """Base widths. Only the Wan 2.2 VAE has two of them."""

    encoder: int = 16
    decoder: int = 16


WAN21, WAN22, WAN22_PUBLISHED = VaeSize(), VaeSize(encoder=8), VaeSize(encoder=160, decoder=256)


def wan21_vae(size: VaeSize) -> Table:
    """Every tensor of a Wan 2.1 VAE."""
    widths, place, encoder = down(size.encoder), count(), Rows()
    for stage, (into, width) in enumerate(pairwise(widths)):
        encoder |= {str(next(place)): row for row in (_wan_residual(into, width), _wan_residual(width, width))}
        if stage < STAGES - 1:
            encoder[str(next(place))] = _resampling(width, width, int(stage > 0))
    widths, place, decoder = up(size.decoder), count(), Rows()
    for stage, (before, width) in enumerate(pairwise(widths)):
        into = before // (2 if stage else 1)
        decoder |= {str(next(place)): _wan_residual(source, width) for source in (into, width, width)}
        if stage < STAGES - 1:
            decoder[str(next(place))] = _resampling(width, width // 2, 2 * (stage < 2))
    return tree(_wan_halves(size, 3, LATENT_21, encoder, decoder))


def wan22_vae(size: VaeSize) -> Table:
    """Every tensor of a Wan 2.2 VAE."""
    widths, encoder = down(size.encoder), Rows()
    for stage, (into, width) in enumerate(pairwise(widths)):
        encoder[f"{stage}.downsamples"] = {
            "0": _wan_residual(into, width),
            "1": _wan_residual(width, width),
            "2": _resampling(width, width, int(stage > 0)) if stage < STAGES - 1 else None,
        }
    widths, decoder = up(size.decoder), Rows()
    for stage, (into, width) in enumerate(pairwise(widths)):
        decoder[f"{stage}.upsamples"] = {
            "0": _wan_residual(into, width),
            "(1|2)": _wan_residual(width, width),
            "3": _resampling(width, width, 2 * (stage < 2)) if stage < STAGES - 1 else None,
        }
    return tree(_wan_halves(size, 12, LATENT_22, encoder, decoder))


def _wan_halves(size: VaeSize, pixels: int, latent: int, encoder: Tree, decoder: Tree) -> Tree:
    first, last = down(size.encoder)[-1], up(size.decoder)[0]
    return {
        "encoder.conv1": conv(size.encoder, pixels, *CUBE),
        "encoder.downsamples": encoder,
        "encoder.middle": _wan_middle(first),
        "encoder.head": _wan_head(first, 2 * latent, LATENT_GAIN),  # mean and log variance
        "conv1": conv(2 * latent, 2 * latent, *ONE),
        "conv2": conv(latent, latent, *ONE),
        "decoder.conv1": conv(last, latent, *CUBE),
        "decoder.middle": _wan_middle(last),
        "decoder.upsamples": decoder,
        "decoder.head": _wan_head(size.decoder, pixels, PIXEL_GAIN),
    }


def _wan_residual(into: int, width: int) -> Tree:
    return {
        "residual.0.gamma": gain(into, *ONE),
        "residual.2": conv(width, into, *CUBE),
        "residual.3.gamma": gain(width, *ONE),
        "residual.6": conv(width, width, *CUBE),
        "shortcut": conv(width, into, *ONE) if into != width else None,
    }


def _wan_middle(width: int) -> Tree:
    attention: Tree = {
        "norm.gamma": gain(width, 1, 1),
        "to_qkv": conv(3 * width, width, 1, 1),
        "proj": conv(width, width, 1, 1),
    }
    return {"(0|2)": _wan_residual(width, width), "1": attention}


def _resampling(width: int, out: int, frames: int) -> Tree:
    """Of pixels; and of frames where these are halved (frames 1) or doubled (frames 2), not 0."""
    time = conv(frames * width, width, 3, 1, 1) if frames else None
    return {"resample.1": conv(out, width, 3, 3), "time_conv": time}


def _wan_head(width: int, channels: int, factor: float) -> Tree:
    return {"0.gamma": gain(width, *ONE), "2": conv(channels, width, *CUBE, factor=factor)}
