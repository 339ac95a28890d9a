"""The KL VAEs of SD 1.5, Flux and Flux.2.

Stock fixes the encoder's base width at 128: smaller ones load while `narrow.opened` is open.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ..weights import Rows, Table, Tree, conv, gain, norm, tree
from .stages import LATENT_GAIN, MULTIPLIERS, PIXEL_GAIN, STAGES, down, up


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
    widths = down(size.width)
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
    widths = up(size.width)
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
