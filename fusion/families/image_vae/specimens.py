"""Small specimens of stock's VAEs of pictures.

With and without the products next to the latent, with Flux.2's batch norm of folded latents, and
the small ones for previews.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import comfy.ldm.models.autoencoder as stock
import comfy.ldm.modules.diffusionmodules.model as parts
import comfy.taesd.taesd as stocks_tiny

from ....kernels_cuda import KernelPolicy
from ...base.specimen import Draw, Options, Specimen
from .fused import Fused, FusedDecoder, FusedEncoder, fuse, unserved
from .tiny import FusedTiny, obstacle
from .tiny import fuse as fuse_tiny

Z = 4
CONFIG = {
    "double_z": True, "z_channels": Z, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32, "ch_mult": [1, 2],
    "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip
RATIO = 2  # pixels of one of its latents, on a side
MODEL = "comfy.ldm.modules.diffusionmodules.model."
REGULARIZER = "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"
INSIDE = (parts.ResnetBlock, parts.AttnBlock, parts.Upsample, parts.Downsample, parts.Decoder, parts.Encoder)
SOURCE = (stock, parts, stock.DiagonalGaussianRegularizer, *INSIDE)


def specimens() -> Sequence[Specimen]:
    return (
        _specimen("VAE of Stable Diffusion", partial(_built_kl, folds=False), Z, stock.AutoencoderKL),
        _specimen("VAE of Flux", _built_bare, Z, stock.AutoencodingEngine),
        _specimen("VAE of Flux.2", partial(_built_kl, folds=True), 4 * Z, stock.AutoencoderKL),
    )


def tiny_specimens() -> Sequence[Specimen]:
    return (_tiny("TAESD", 4), _tiny("TAESD of Flux.2", 128))


def _specimen(name: str, build: Callable[[Draw], Any], channels: int, kind: type) -> Specimen:
    replaces: dict[type, type] = {Fused: kind, FusedEncoder: parts.Encoder, FusedDecoder: parts.Decoder}
    return Specimen(name, build, partial(_called, channels), _fused, replaces, SOURCE)


def _fused(vae: Any, policy: KernelPolicy) -> int:
    if unserved(vae) is not None:
        return 0
    fuse(vae, policy)
    return 1


def _built_kl(draw: Draw, *, folds: bool) -> Any:
    vae = stock.AutoencoderKL(ddconfig={**CONFIG, "batch_norm_latent": folds}, embed_dim=Z)
    if folds:
        vae.bn.running_mean = 0.3 * draw(4 * Z).float()
        vae.bn.running_var = 0.5 + draw(4 * Z).float().abs()
    return vae.to(draw.dtype)


def _built_bare(draw: Draw) -> Any:
    return stock.AutoencodingEngine(
        regularizer_config={"target": REGULARIZER},
        encoder_config={"target": f"{MODEL}Encoder", "params": CONFIG},
        decoder_config={"target": f"{MODEL}Decoder", "params": CONFIG},
    ).to(draw.dtype)


def _called(channels: int, vae: Any, draw: Draw, _options: Options) -> Any:
    fold = 1 if channels == Z else 2
    z, pixels = draw(2, channels, 4 // fold, 6 // fold), draw(2, 3, 4 * RATIO, 6 * RATIO)
    return vae.decode(z), vae.encode(pixels)


# ------------------------------------------------------------------------------------------------------- the small ones


def _tiny(name: str, channels: int) -> Specimen:
    kinds = (stocks_tiny.Block, stocks_tiny.Clamp, stocks_tiny.Encoder, stocks_tiny.Decoder)
    kinds += (stocks_tiny.EncoderFlux2, stocks_tiny.DecoderFlux2) if channels == 128 else ()
    build, call = partial(_built_tiny, channels), partial(_called_tiny, channels)
    return Specimen(name, build, call, _fused_tiny, {FusedTiny: stocks_tiny.TAESD}, (stocks_tiny, *kinds))


def _fused_tiny(vae: Any, policy: KernelPolicy) -> int:
    if obstacle(vae) is not None:
        return 0
    fuse_tiny(vae, policy)
    return 1


def _built_tiny(channels: int, draw: Draw) -> Any:
    return stocks_tiny.TAESD(latent_channels=channels).to(draw.dtype)


def _called_tiny(channels: int, vae: Any, draw: Draw, _options: Options) -> Any:
    """Flux.2's has latents of 16x16 pixels, the others of 8x8."""
    z = draw(1, channels, 2, 1) if channels == 128 else draw(1, channels, 4, 2)
    return vae.decode(z), vae.encode(draw(1, 3, 32, 16))
