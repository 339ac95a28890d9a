"""The VAEs of SD 1.5, Flux and Flux.2, with CompVis' tensor names.

    encoder   conv_in (3 -> c); down.{0..3}, c * (1, 2, 4, 4) wide, with block.{0,1} and, but for the last, downsample.conv
              (stride 2); mid.block_1, mid.attn_1, mid.block_2; norm_out, conv_out -> mean and log variance
    decoder   conv_in; mid; up.{3..0} with block.{0,1,2} and, but for up.0, upsample.conv; norm_out, conv_out (c -> 3)

    block     .norm1, .conv1, .norm2, .conv2 (3x3), SiLU before either; .nin_shortcut (1x1) where the width changes
    attn_1    .norm, .q, .k, .v, .proj_out (1x1), one head

Norms are GroupNorms of 32 groups. SD 1.5 has 4 latent channels, and quant_conv and post_quant_conv (1x1) between either half and
the latents; Flux has 16, and neither. Flux.2 has 32 and both, named as parts of its halves, and folds 2x2 of its latents into
channels, with a batch norm of them: bn.running_mean, .running_var.

Stock reads the decoder's width from the file, but fixes the encoder's c at 128, which makes 68 MB: these load while `narrow` is
open.
"""

from __future__ import annotations

from dataclasses import dataclass

from .storage import PLAIN, Cast, Storage
from .weights import Table, conv, layer_norm, scale

MULTIPLIERS = (1, 2, 4, 4)
STAGES = len(MULTIPLIERS)
SQUARE = (3, 3)
ONE = (1, 1)
FOLDED = 4  # latents in one, where they are folded

# As in Wan's VAEs: pixels are expected in [-1, 1], and SiLU halves what the last norm makes.
PIXEL_GAIN = 0.5
LATENT_GAIN = 2.0


@dataclass(frozen=True)
class KlSize:
    """The sizes of one VAE."""

    latent: int
    quantised: bool
    folded: bool = False
    width: int = 32


SIZES = {
    "sd_vae": KlSize(latent=4, quantised=True),
    "flux_vae": KlSize(latent=16, quantised=False),
    "flux2_vae": KlSize(latent=32, quantised=True, folded=True),
}


def table(size: KlSize) -> Table:
    """Every tensor of one VAE."""
    widths = [size.width * m for m in (1, *MULTIPLIERS)]
    out = conv("encoder.conv_in", widths[0], 3, SQUARE)
    for stage in range(STAGES):
        for index, into in enumerate((widths[stage], widths[stage + 1])):
            out |= _residual(f"encoder.down.{stage}.block.{index}", into, widths[stage + 1])
        if stage < STAGES - 1:
            out |= conv(f"encoder.down.{stage}.downsample.conv", widths[stage + 1], widths[stage + 1], SQUARE)
    last = widths[-1]
    out |= _middle("encoder.mid", last) | layer_norm("encoder.norm_out", last)
    out |= conv("encoder.conv_out", 2 * size.latent, last, SQUARE, gain=LATENT_GAIN)
    if size.quantised:
        encoder, decoder = ("encoder.", "decoder.") if size.folded else ("", "")
        out |= conv(f"{encoder}quant_conv", 2 * size.latent, 2 * size.latent, ONE)
        out |= conv(f"{decoder}post_quant_conv", size.latent, size.latent, ONE)
    if size.folded:
        out |= scale("bn.running_mean", FOLDED * size.latent, mean=0.5) | scale("bn.running_var", FOLDED * size.latent)
    out |= conv("decoder.conv_in", last, size.latent, SQUARE) | _middle("decoder.mid", last)
    into = last
    for stage in reversed(range(STAGES)):
        width = widths[stage + 1]
        for index in range(3):
            out |= _residual(f"decoder.up.{stage}.block.{index}", into, width)
            into = width
        if stage:
            out |= conv(f"decoder.up.{stage}.upsample.conv", width, width, SQUARE)
    return out | layer_norm("decoder.norm_out", into) | conv("decoder.conv_out", 3, into, SQUARE, gain=PIXEL_GAIN)


def _residual(name: str, into: int, width: int) -> Table:
    out = layer_norm(f"{name}.norm1", into) | conv(f"{name}.conv1", width, into, SQUARE)
    out |= layer_norm(f"{name}.norm2", width) | conv(f"{name}.conv2", width, width, SQUARE)
    return out | conv(f"{name}.nin_shortcut", width, into, ONE) if into != width else out


def _middle(name: str, width: int) -> Table:
    out = _residual(f"{name}.block_1", width, width) | layer_norm(f"{name}.attn_1.norm", width)
    for part in ("q", "k", "v", "proj_out"):
        out |= conv(f"{name}.attn_1.{part}", width, width, ONE)
    return out | _residual(f"{name}.block_2", width, width)


# Stock casts what it finds into its own VAE dtype, plain fp8 included; scaled fp8 it does not know here.
STORAGES: dict[str, Storage] = PLAIN | {"fp8_e4m3fn": Cast()}
