"""HunyuanVideo 1.5's VAE: 16x16x4, 32 channels. Five stages of causal convolutions in either half, with
foldings between them that change the width.

Stock fixes the widths: smaller ones load while `narrow.opened` is open.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..weights import Rows, Spec, Table, Tree, conv, gain, tree
from .stages import CUBE, LATENT_GAIN, ONE, PIXEL_GAIN

LATENT_HUNYUAN = 32
BLOCKS = 2  # of a stage of the encoder; of the decoder one more
IN_TIME = 2  # of the four foldings, how many are of frames, too: those next to the latents


@dataclass(frozen=True)
class HunyuanVaeSize:
    """The widths of the stages, from the pixels down: multiples of 32."""

    stages: tuple[int, ...] = (32, 32, 64, 64, 64)


HUNYUAN_VAE, HUNYUAN_VAE_PUBLISHED = HunyuanVaeSize(), HunyuanVaeSize((128, 256, 512, 1024, 1024))


def hunyuan_vae(size: HunyuanVaeSize) -> Table:
    """Every tensor of one VAE."""
    widths = size.stages
    return tree(
        {
            "encoder.conv_in.conv": conv(widths[0], 3, *CUBE),
            "encoder.down": _stages(widths, BLOCKS, "downsample"),
            "(encoder|decoder).mid": _middle(widths[-1]),
            "encoder.norm_out.gamma": _gamma(widths[-1]),
            "encoder.conv_out.conv": conv(2 * LATENT_HUNYUAN, widths[-1], *CUBE, factor=LATENT_GAIN),
            "decoder.conv_in.conv": conv(widths[-1], LATENT_HUNYUAN, *CUBE),
            "decoder.up": _stages(widths[::-1], BLOCKS + 1, "upsample"),
            "decoder.norm_out.gamma": _gamma(widths[0]),
            "decoder.conv_out.conv": conv(3, widths[0], *CUBE, factor=PIXEL_GAIN),
        }
    )


def _stages(widths: tuple[int, ...], blocks: int, folding: str) -> Tree:
    """A half's, in the order of its computation."""
    goes_down = folding == "downsample"
    rows, last = Rows(), len(widths) - 1
    for stage, width in enumerate(widths):
        rows[f"{stage}.block.[{blocks}]"] = _residual(width)
        if stage < last:
            folded = 8 if (last - 1 - stage if goes_down else stage) < IN_TIME else 4
            out = widths[stage + 1]
            rows[f"{stage}.{folding}.conv.conv"] = conv(out // folded if goes_down else out * folded, width, *CUBE)
    return rows


def _residual(width: int) -> Tree:
    return {"(norm1|norm2).gamma": _gamma(width), "(conv1|conv2).conv": conv(width, width, *CUBE)}


def _middle(width: int) -> Tree:
    return {
        "(block_1|block_2)": _residual(width),
        "attn_1.norm.gamma": _gamma(width),
        "attn_1.(q|k|v|proj_out)": conv(width, width, *ONE),
    }


def _gamma(width: int) -> Spec:
    return gain(width, 1, 1, 1)
