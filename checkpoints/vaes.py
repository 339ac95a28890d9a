"""VAEs: Wan 2.1's and Wan 2.2's of videos, and the KL VAEs of SD 1.5, Flux and Flux.2, with their
authors' tensor names.

All have four stages in either half, `width * (1, 2, 4, 4)` wide, with SiLU before each convolution:

    Wan 2.1   8x8x4, 16 channels. One flat list per half. Causal 3D convolutions; an upsampling
              halves the width
    Wan 2.2   16x16x4, 48 channels, pixels folded 2x2 into 12 channels. A list of stages with a list
              of layers in each
    KL        8x8, 4, 16 or 32 channels; Flux.2 folds 2x2 of its latents into channels, with a batch
              norm of them

Stock reads the width of a Wan 2.1 VAE from the file. That of Wan 2.2 it fixes at 160 and 256, a KL
VAE's encoder at 128: smaller ones load while `narrow.wan22_widths` or `narrow.opened` are open.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, pairwise

from .weights import Rows, Table, Tree, conv, gain, norm, tree

MULTIPLIERS = (1, 2, 4, 4)
STAGES = len(MULTIPLIERS)
CUBE, ONE = (3, 3, 3), (1, 1, 1)

# Pixels are expected in [-1, 1]; this keeps most of them inside, so that clamping hides nothing.
PIXEL_GAIN = 0.5
# SiLU halves what the last norm makes; this gives latents of size one.
LATENT_GAIN = 2.0


def _down(width: int) -> list[int]:
    return [width * m for m in (1, *MULTIPLIERS)]


def _up(width: int) -> list[int]:
    return [width * m for m in (MULTIPLIERS[-1], *MULTIPLIERS[::-1])]


# ---------------------------------------------------------------------------------------------- Wan

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
    widths, place, encoder = _down(size.encoder), count(), Rows()
    for stage, (into, width) in enumerate(pairwise(widths)):
        encoder |= {str(next(place)): row for row in (_wan_residual(into, width), _wan_residual(width, width))}
        if stage < STAGES - 1:
            encoder[str(next(place))] = _resampling(width, width, int(stage > 0))
    widths, place, decoder = _up(size.decoder), count(), Rows()
    for stage, (before, width) in enumerate(pairwise(widths)):
        into = before // (2 if stage else 1)
        decoder |= {str(next(place)): _wan_residual(source, width) for source in (into, width, width)}
        if stage < STAGES - 1:
            decoder[str(next(place))] = _resampling(width, width // 2, 2 * (stage < 2))
    return tree(_wan_halves(size, 3, LATENT_21, encoder, decoder))


def wan22_vae(size: VaeSize) -> Table:
    """Every tensor of a Wan 2.2 VAE."""
    widths, encoder = _down(size.encoder), Rows()
    for stage, (into, width) in enumerate(pairwise(widths)):
        encoder[f"{stage}.downsamples"] = {
            "0": _wan_residual(into, width),
            "1": _wan_residual(width, width),
            "2": _resampling(width, width, int(stage > 0)) if stage < STAGES - 1 else None,
        }
    widths, decoder = _up(size.decoder), Rows()
    for stage, (into, width) in enumerate(pairwise(widths)):
        decoder[f"{stage}.upsamples"] = {
            "0": _wan_residual(into, width),
            "(1|2)": _wan_residual(width, width),
            "3": _resampling(width, width, 2 * (stage < 2)) if stage < STAGES - 1 else None,
        }
    return tree(_wan_halves(size, 12, LATENT_22, encoder, decoder))


def _wan_halves(size: VaeSize, pixels: int, latent: int, encoder: Tree, decoder: Tree) -> Tree:
    first, last = _down(size.encoder)[-1], _up(size.decoder)[0]
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


# ----------------------------------------------------------------------------------------------- KL


@dataclass(frozen=True)
class KlSize:
    """The sizes of one VAE. quantised: 1x1 convolutions between the halves and the latents."""

    latent: int
    quantised: bool
    folded: bool = False
    width: int = 32


KL_VAES = {
    "sd_vae": KlSize(latent=4, quantised=True),
    "flux_vae": KlSize(latent=16, quantised=False),
    "flux2_vae": KlSize(latent=32, quantised=True, folded=True),
}


def kl_vae(size: KlSize) -> Table:
    """Every tensor of one VAE. Norms are GroupNorms of 32 groups; attention has one head."""
    latent, last = size.latent, size.width * MULTIPLIERS[-1]
    encoder, decoder = ("encoder.", "decoder.") if size.folded else ("", "")
    rows: Rows = {"encoder.conv_in": conv(size.width, 3, 3, 3)}
    widths = _down(size.width)
    for stage, (into, width) in enumerate(pairwise(widths)):
        rows[f"encoder.down.{stage}"] = {
            "block.0": _kl_residual(into, width),
            "block.1": _kl_residual(width, width),
            "downsample.conv": conv(width, width, 3, 3) if stage < STAGES - 1 else None,
        }
    rows |= {
        "(encoder|decoder).mid": _kl_middle(last),
        "encoder.norm_out": norm(last),
        "encoder.conv_out": conv(2 * latent, last, 3, 3, factor=LATENT_GAIN),
        f"{encoder}quant_conv": conv(2 * latent, 2 * latent, 1, 1) if size.quantised else None,
        f"{decoder}post_quant_conv": conv(latent, latent, 1, 1) if size.quantised else None,
        "bn.running_mean": gain(4 * latent, mean=0.5) if size.folded else None,
        "bn.running_var": gain(4 * latent) if size.folded else None,
        "decoder.conv_in": conv(last, latent, 3, 3),
    }
    widths = _up(size.width)
    for stage, (into, width) in zip(reversed(range(STAGES)), pairwise(widths), strict=True):
        rows[f"decoder.up.{stage}"] = {
            "block.0": _kl_residual(into, width),
            "block.(1|2)": _kl_residual(width, width),
            "upsample.conv": conv(width, width, 3, 3) if stage else None,
        }
    ends = {"norm_out": norm(size.width), "conv_out": conv(3, size.width, 3, 3, factor=PIXEL_GAIN)}
    return tree(rows | {f"decoder.{name}": row for name, row in ends.items()})


def _kl_residual(into: int, width: int) -> Tree:
    return {
        "norm1": norm(into),
        "conv1": conv(width, into, 3, 3),
        "norm2": norm(width),
        "conv2": conv(width, width, 3, 3),
        "nin_shortcut": conv(width, into, 1, 1) if into != width else None,
    }


def _kl_middle(width: int) -> Tree:
    return {
        "(block_1|block_2)": _kl_residual(width, width),
        "attn_1.norm": norm(width),
        "attn_1.(q|k|v|proj_out)": conv(width, width, 1, 1),
    }
