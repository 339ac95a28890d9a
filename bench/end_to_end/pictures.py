"""The models of pictures that rows are for: their sizes, and what a step, a decoded and an encoded picture cost. Standard library
only: rows and bounds read it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...fusion.base.cost import Cost
from ...fusion.families.flux2 import cost as flux
from ...fusion.families.z_image import cost as z_image

HALF = 2.0  # bytes
MULTIPLIERS = (1, 2, 4, 4)  # of a VAE's width, from pixels down


@dataclass(frozen=True)
class Klein:
    """A Flux.2's sizes. text: width of the prompt, three layers of a language model one beside the other."""

    dim: int
    double: int
    single: int
    text: int
    tokens: int = 512  # stock fills a prompt up to them
    channels: int = 128


@dataclass(frozen=True)
class ZImage:
    """A Z-Image's sizes. refiners: blocks before the others, as many for the picture as for the prompt."""

    dim: int
    layers: int
    text: int
    ffn: int
    refiners: int = 2
    tokens: int = 256  # of a long prompt: stock fills none up
    channels: int = 16
    patch: int = 2


@dataclass(frozen=True)
class Unet:
    """A U-Net's sizes, level by level. depth: transformer blocks behind each residual block. labels: width of what goes with the
    prompt."""

    mult: tuple[int, ...]
    depth: tuple[int, ...]
    middle: int
    text: int
    labels: int = 0
    linear: bool = False
    width: int = 320
    residuals: int = 2
    tokens: int = 77  # stock fills a prompt up to them
    channels: int = 4


@dataclass(frozen=True)
class ImageVae:
    """A picture VAE's sizes. channels: of its own latents, of which some fold 2x2 into one. quantised: 1x1 convolutions lie between
    its halves and the latents."""

    channels: int
    folded: bool
    quantised: bool
    width: int = 128


KLEIN = {"klein4": Klein(3072, 5, 20, 3 * 2560), "klein9": Klein(4096, 8, 24, 3 * 4096)}
Z_IMAGE = ZImage(dim=3840, layers=30, text=2560, ffn=10240)
UNETS = {
    "sd15": Unet((1, 2, 4, 4), (1, 1, 1, 0), middle=1, text=768),
    "sdxl": Unet((1, 2, 4), (0, 2, 10), middle=10, text=2048, labels=2816, linear=True),
}
IMAGE_VAES = {
    "flux2_vae": ImageVae(channels=32, folded=True, quantised=True),
    "flux_vae": ImageVae(channels=16, folded=False, quantised=False),
    "sdxl_vae": ImageVae(channels=4, folded=False, quantised=True),
}


def klein_forward(size: Klein, pixels: int) -> Cost:
    """One forward. pixels: of the latent, a token each. A double block has the matrices of a block for either stream."""
    block = 13.0 * size.dim**2  # q, k, v and the projection; both halves of the MLP's way in, and its way out
    return flux.forward(size.dim, size.double, size.single, block, pixels, size.channels, size.text, size.tokens)


def z_image_forward(size: ZImage, pixels: int) -> Cost:
    """One forward. pixels: of the latent, four in a token. The pixels, the prompt and both pass blocks of their own number."""
    ends = float(size.channels * size.patch**2)
    picture = pixels // size.patch**2
    return z_image.forward(size.dim, size.ffn, size.layers, size.refiners, picture, ends, size.text, size.tokens)


def _square(into: int, out: int, pixels: float) -> float:
    """A 3x3 convolution."""
    return 18.0 * pixels * into * out


def _residual(into: int, out: int, pixels: float) -> float:
    """Two 3x3 convolutions, and one of 1x1 where the width changes."""
    return _square(into, out, pixels) + _square(out, out, pixels) + (2.0 * pixels * into * out if into != out else 0.0)


def _middle(width: int, pixels: float) -> Cost:
    """Two residual blocks, and attention of one head between them."""
    return Cost(2 * _residual(width, width, pixels) + 8.0 * pixels * width * width, 4.0 * pixels * pixels * width)


def decode_image(vae: ImageVae, pixels: float) -> Cost:
    """Latents to pixels. pixels: of the picture."""
    pixels /= 4 ** (len(MULTIPLIERS) - 1)
    into = vae.width * MULTIPLIERS[-1]
    middle = _middle(into, pixels)
    gemm = middle.gemm + _square(vae.channels, into, pixels)
    for stage in reversed(range(len(MULTIPLIERS))):
        out = vae.width * MULTIPLIERS[stage]
        gemm += _residual(into, out, pixels) + 2 * _residual(out, out, pixels)
        if stage:
            pixels *= 4
            gemm += _square(out, out, pixels)
        into = out
    return Cost(gemm + _square(into, 3, pixels), middle.attention)


def encode_image(vae: ImageVae, pixels: float) -> Cost:
    """Pixels to latents: means and log variances."""
    gemm, into = _square(3, vae.width, pixels), vae.width
    for stage, multiplier in enumerate(MULTIPLIERS):
        out = vae.width * multiplier
        gemm += _residual(into, out, pixels) + _residual(out, out, pixels)
        if stage < len(MULTIPLIERS) - 1:
            pixels /= 4
            gemm += _square(out, out, pixels)
        into = out
    middle = _middle(into, pixels)
    return Cost(gemm + middle.gemm + _square(into, 2 * vae.channels, pixels), middle.attention)
