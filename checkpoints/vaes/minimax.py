"""MiniMax H3's VAEs.

    video   16x16 and about 17 frames to 5, 24 channels. Six stages of causal convolutions; the
            decoder is a transformer over latents
    audio   32000 samples a second to 40, 32 channels, each ear by itself. DAC's encoder, BigVGAN's
            decoder

Stock fixes all sizes: smaller ones load while `narrow.opened` is open. Every group norm has 32
groups, the attention of sounds 8 heads, and seven upsamplings halve the width of sounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ..weights import Rows, Table, Tree, conv, gain, linear, norm, normal, tree
from .stages import CUBE, LATENT_GAIN, ONE, PIXEL_GAIN
from .vocoder import MINIMAX, Vocoder, vocoder

LATENT_VIDEO, LATENT_AUDIO = 24, 32
HEAD = 64  # of the decoder
PATCH = 3 * 4 * 16 * 16  # numbers that a latent becomes
SHRINKS = 4  # after the first stages of the encoder; stock has six
REGISTERS = 4


@dataclass(frozen=True)
class MiniMaxVideoSize:
    """The sizes of one VAE. stages: the encoder's widths, each a multiple of 32."""

    stages: tuple[int, ...] = (32, 32, 32, 64, 64, 64)
    heads: int = 2
    layers: int = 2


MINIMAX_VIDEO = MiniMaxVideoSize()
MINIMAX_VIDEO_PUBLISHED = MiniMaxVideoSize((128, 256, 256, 512, 512, 1024), heads=32, layers=36)


def minimax_video(size: MiniMaxVideoSize) -> Table:
    """Every tensor of one VAE of videos."""
    dim, latent = size.heads * HEAD, LATENT_VIDEO
    encoder = Rows()
    for stage, (into, width) in enumerate(pairwise((size.stages[0], *size.stages))):
        encoder[str(stage)] = {
            "block.0": _residual(into, width),
            "block.1": _residual(width, width),
            "downsample.conv": conv(width, width, *CUBE) if stage < SHRINKS else None,
        }
    block: Rows = {
        "(norm1|norm2).weight": gain(dim),
        "(scale1|scale2)": gain(dim, mean=0.5),
        "attn.to_qkv": linear(3 * dim, dim),
        "attn.to_out": linear(dim, dim),
        "ff.w1": linear(8 * dim, dim),  # both halves of a SwiGLU
        "ff.w2": linear(dim, 4 * dim),
    }
    return tree(
        {
            "encoder.conv_in": conv(size.stages[0], 3, *CUBE),
            "encoder.down": encoder,
            "encoder.norm_out": norm(size.stages[-1]),
            "encoder.conv_out": conv(2 * latent, size.stages[-1], *CUBE, factor=LATENT_GAIN),
            "quant_conv": conv(2 * latent, 2 * latent, *ONE),
            "post_quant_conv": conv(latent, latent, *ONE),
            "decoder.x_embedder": linear(dim, latent),
            "decoder.register_tokens": normal(1.0, 1, REGISTERS, dim),
            "decoder.mask_token": normal(1.0, 1, 1, dim),  # which nobody reads
            f"decoder.transformer_blocks.[{size.layers}]": block,
            "decoder.norm_out": norm(dim),
            "decoder.proj_out": linear(PATCH, dim, PIXEL_GAIN),
            "latents_mean": normal(0.5, latent),
            "latents_std": gain(latent, mean=1.5),
        }
    )


def _residual(into: int, width: int) -> Tree:
    return {
        "norm1": norm(into),
        "conv1": conv(width, into, *CUBE),
        "norm2": norm(width),
        "conv2": conv(width, width, *CUBE),
        "nin_shortcut": conv(width, into, *ONE) if into != width else None,
    }


STRIDES = (2, 4, 4, 5, 5)  # of the encoder of sounds
RATES, KERNELS = (5, 5, 2, 2, 2, 2, 2), (9, 9, 4, 4, 4, 4, 4)  # of the decoder's upsamplings


@dataclass(frozen=True)
class MiniMaxAudioSize:
    """The sizes of one VAE: of the encoder's first layer, between the halves, and of the decoder's
    first.
    """

    encoder: int = 8
    between: int = 256
    decoder: int = 2 ** len(KERNELS)


MINIMAX_AUDIO = MiniMaxAudioSize()


def minimax_audio(size: MiniMaxAudioSize) -> Table:
    """Every tensor of one VAE of sounds, weight norms folded in."""
    wide, latent = size.between, LATENT_AUDIO
    encoder: Rows = {"0": conv(size.encoder, 1, 7)}
    width = size.encoder
    for place, stride in enumerate(STRIDES, 1):
        encoder[f"{place}.block"] = {
            "(0|1|2).block": {
                "(0|2).alpha": gain(1, width, 1),
                "1": conv(width, width, 7, factor=0.5),
                "3": conv(width, width, 1, factor=0.5),
            },
            "3.alpha": gain(1, width, 1),
            "4": conv(2 * width, width, 2 * stride, factor=0.5),
        }
        width *= 2
    last = len(STRIDES) + 1
    encoder |= {f"{last}.alpha": gain(1, width, 1), str(last + 1): conv(wide, width, 3, factor=0.5)}
    return tree(
        {
            "encoder.block": encoder,
            "pre_block": {
                "(norm1|norm3)": norm(wide),
                "norm2": norm(latent),
                "attn.qkv": linear(3 * wide, wide, bias=False),
                "attn.(q_bias|v_bias|zero_k_bias)": normal(0.05, wide),
                "attn.proj": linear(latent, latent),
                "proj": linear(latent, wide),
                "mlp.norm": norm(latent),
                "mlp.(w0|w1)": linear(2 * latent, latent),
                "mlp.w2": linear(latent, 2 * latent),
            },
            "(mean_proj|logs_proj)": conv(latent, latent, 1),
            "dec_in_proj": conv(wide, latent, 1),
            "decoder": vocoder(Vocoder(RATES, KERNELS, wide, size.decoder, ears=1), MINIMAX),
            "latents_mean": normal(0.5, latent),
            "latents_std": gain(latent),
        }
    )
