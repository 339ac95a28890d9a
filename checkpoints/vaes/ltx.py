"""LTX-2.3's VAEs, as parts of its checkpoint, and the net that doubles latents.

    video      32x32x8, 128 channels. Pixels are folded 4x4; residual blocks between foldings
    audio      spectrograms of 64 bands, 8 channels, 16 latent bands
    vocoder    BigVGAN from spectrograms to 16000 samples a second, and another, which makes the
               third of 48000 of them that is above
    upsampler  a file of its own

Stock reads all sizes from the metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..weights import Rows, Table, Tree, conv, gain, norm, normal, tree
from .stages import CUBE, PIXEL_GAIN
from .vocoder import Vocoder, vocoder

CHANNELS = 128
FOLD = 4
RESIDUAL = "res_x"
FOLDED = {"space": 4, "time": 2, "all": 8}  # pixels and frames that become one, by the name of a folding


@dataclass(frozen=True)
class LtxVideoSize:
    """The sizes of one VAE of videos.

    width             of both halves, next to the pixels
    encoder, decoder  blocks from the pixels down, by stock's names: residual ones, with how many there are,
                      and foldings, with how many times as wide the latents' side is
    residual          whether the decoder's unfoldings add their input
    """

    width: int = 8
    encoder: tuple[tuple[str, int], ...] = (
        (RESIDUAL, 1),
        ("compress_space_res", 2),
        ("compress_time_res", 2),
        ("compress_all_res", 2),
        ("compress_all_res", 2),
        (RESIDUAL, 1),
    )
    decoder: tuple[tuple[str, int], ...] = ((RESIDUAL, 1), *(3 * (("compress_all", 2),)), (RESIDUAL, 1))
    residual: bool = True


LTX_VIDEO = LtxVideoSize()
LTX_VIDEO_PUBLISHED = LtxVideoSize(
    128,
    (
        *((RESIDUAL, 4), ("compress_space_res", 2), (RESIDUAL, 6), ("compress_time_res", 2), (RESIDUAL, 4)),
        *(("compress_all_res", 2), (RESIDUAL, 2), ("compress_all_res", 1), (RESIDUAL, 2)),
    ),
    (
        *((RESIDUAL, 4), ("compress_space", 2), (RESIDUAL, 6), ("compress_time", 2), (RESIDUAL, 4)),
        *(("compress_all", 1), (RESIDUAL, 2), ("compress_all", 2), (RESIDUAL, 2)),
    ),
    residual=False,
)
SOUND, SOUND_CHANNELS, EARS = 8, 8, 2
SOUND_WIDTHS = (1, 2, 4)
BASES, TAPS, BANDS = 514, 512, 64  # of the second vocoder's spectrogram
FIRST = Vocoder(rates=(5, 4, 2, 2, 2), kernels=(11, 8, 4, 4, 4))
SECOND = Vocoder(rates=(6, 5, 2, 2, 2), kernels=(12, 11, 4, 4, 4))
LATENT_WIDTH = 32  # of the upsampler


def ltx_vaes() -> Table:
    """Every tensor of a checkpoint's VAEs."""
    spectrogram: Tree = {
        "mel_basis": gain(BANDS, BASES // 2, mean=1 / BASES),
        "stft_fn.(forward_basis|inverse_basis)": normal(0.05, BASES, 1, TAPS),
    }
    return tree(
        {
            "vae": _video(LTX_VIDEO),
            "audio_vae": _audio(),
            "vocoder.vocoder": vocoder(FIRST),
            "vocoder.bwe_generator": vocoder(SECOND),
            "vocoder.mel_stft": spectrogram,
        }
    )


def _statistics() -> Tree:
    return {"std-of-means": gain(CHANNELS), "mean-of-means": normal(0.2, CHANNELS)}


def ltx_video_vae(size: LtxVideoSize) -> Table:
    """Every tensor of the VAE of videos in a file of its own."""
    return tree(_video(size))


def ltx_video_vae_metadata(size: LtxVideoSize) -> dict[str, str]:
    """The configuration that stock reads with it."""
    return {"config": json.dumps({"vae": _video_config(size)})}


def _video(size: LtxVideoSize) -> Tree:
    encoder, decoder = Rows(), Rows()
    width = size.width
    for place, (name, count) in enumerate(size.encoder):
        if name == RESIDUAL:
            encoder[f"{place}.res_blocks.[{count}]"] = _block(width)
        else:
            encoder[f"{place}.conv.conv"] = conv(count * width // _folded(name), width, *CUBE)
            width *= count
    last = width
    width = deep = size.width * math.prod(count for name, count in size.decoder if name != RESIDUAL)
    for place, (name, count) in enumerate(reversed(size.decoder)):
        if name == RESIDUAL:
            decoder[f"{place}.res_blocks.[{count}]"] = _block(width)
        else:
            decoder[f"{place}.conv.conv"] = conv(_folded(name) * width // count, width, *CUBE)
            width //= count
    pixels = 3 * FOLD * FOLD
    return {
        "encoder.conv_in.conv": conv(size.width, pixels, *CUBE),
        "encoder.down_blocks": encoder,
        "encoder.conv_out.conv": conv(CHANNELS + 1, last, *CUBE),
        "decoder.conv_in.conv": conv(deep, CHANNELS, *CUBE),
        "decoder.up_blocks": decoder,
        "decoder.conv_out.conv": conv(pixels, size.width, *CUBE, factor=PIXEL_GAIN),
        "per_channel_statistics": _statistics(),
    }


def _folded(name: str) -> int:
    return FOLDED[name.split("_")[1]]


def _block(width: int) -> Tree:
    return {"(conv1|conv2).conv": conv(width, width, *CUBE)}


def _audio() -> Tree:
    widths = [SOUND * many for many in SOUND_WIDTHS]
    last, encoder, decoder = widths[-1], Rows(), Rows()
    for stage, (into, width) in enumerate(pairwise((SOUND, *widths))):
        shrinks = stage < len(widths) - 1
        encoder[str(stage)] = {
            "block.0": _sound_block(into, width),
            "downsample.conv": conv(width, width, 3, 3) if shrinks else None,
        }
    for stage, (width, into) in enumerate(pairwise((*widths, last))):
        decoder[str(stage)] = {
            "block.0": _sound_block(into, width),
            "block.1": _sound_block(width, width),
            "upsample.conv.conv": conv(width, width, 3, 3) if stage else None,
        }
    return {
        "encoder.conv_in.conv": conv(SOUND, EARS, 3, 3),
        "encoder.down": encoder,
        "(encoder|decoder).mid.(block_1|block_2)": _sound_block(last, last),
        "encoder.conv_out.conv": conv(2 * SOUND_CHANNELS, last, 3, 3),
        "decoder.conv_in.conv": conv(last, SOUND_CHANNELS, 3, 3),
        "decoder.up": decoder,
        "decoder.conv_out.conv": conv(EARS, SOUND, 3, 3),
        "per_channel_statistics": _statistics(),
    }


def _sound_block(into: int, width: int) -> Tree:
    return {
        "conv1.conv": conv(width, into, 3, 3),
        "conv2.conv": conv(width, width, 3, 3),
        "nin_shortcut.conv": conv(width, into, 1, 1) if into != width else None,
    }


def ltx_vae_config() -> Mapping[str, Any]:
    """The parts of a checkpoint's configuration that stock reads."""
    spectrogram = {
        **{"double_z": True, "mel_bins": BANDS, "z_channels": SOUND_CHANNELS, "resolution": 256},
        **{"downsample_time": False, "in_channels": EARS, "out_ch": EARS, "ch": SOUND, "ch_mult": SOUND_WIDTHS},
        **{"num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0, "mid_block_add_attention": False},
        **{"norm_type": "pixel", "causality_axis": "height"},
    }
    return {
        "vae": _video_config(LTX_VIDEO),
        "audio_vae": {
            "model": {"params": {"ddconfig": spectrogram, "sampling_rate": 16000}},
            "preprocessing": {"stft": {"filter_length": 1024, "hop_length": 160}},
        },
        "vocoder": {
            "vocoder": FIRST.config(),
            "bwe": {
                **SECOND.config(),
                **{"input_sampling_rate": 16000, "output_sampling_rate": 48000},
                **{"hop_length": 80, "n_fft": TAPS, "num_mels": BANDS},
            },
        },
    }


def _video_config(size: LtxVideoSize) -> Mapping[str, Any]:
    def told(blocks: tuple[tuple[str, int], ...], more: Mapping[str, Any]) -> list[Any]:
        return [
            [name, {"num_layers": count} if name == RESIDUAL else {**more, "multiplier": count}]
            for name, count in blocks
        ]

    return {
        **{"dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": CHANNELS, "patch_size": FOLD},
        **{"norm_layer": "pixel_norm", "latent_log_var": "uniform", "spatial_padding_mode": "zeros"},
        **{"causal_decoder": False, "timestep_conditioning": False},
        **{"encoder_base_channels": size.width, "decoder_base_channels": size.width},
        "encoder_blocks": told(size.encoder, {}),
        "decoder_blocks": told(size.decoder, {"residual": True} if size.residual else {}),
    }


def ltx_upsampler(width: int) -> Table:
    """Every tensor of a net that makes latents twice as high and wide."""
    block: Tree = {"(conv1|conv2)": conv(width, width, *CUBE), "(norm1|norm2)": norm(width)}
    return tree(
        {
            "initial_conv": conv(width, CHANNELS, *CUBE),
            "initial_norm": norm(width),
            "res_blocks.0": block,
            "upsampler.0": conv(4 * width, width, 3, 3),
            "post_upsample_res_blocks.0": block,
            "final_conv": conv(CHANNELS, width, *CUBE),
        }
    )


def ltx_upsampler_config(width: int) -> Mapping[str, Any]:
    return {
        **{"in_channels": CHANNELS, "mid_channels": width, "num_blocks_per_stage": 1, "dims": 3},
        **{"spatial_upsample": True, "temporal_upsample": False},
    }
