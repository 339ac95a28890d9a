"""LTX-2.3's VAEs, as parts of its checkpoint, and the net that doubles latents.

    video      32x32x8, 128 channels. Pixels are folded 4x4; residual blocks between foldings
    audio      spectrograms of 64 bands, 8 channels, 16 latent bands
    vocoder    BigVGAN from spectrograms to 16000 samples a second, and another, which makes the
               third of 48000 of them that is above
    upsampler  a file of its own

Stock reads all sizes from the metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from ..weights import Rows, Table, Tree, conv, gain, norm, normal, tree
from .stages import CUBE, PIXEL_GAIN
from .vocoder import Vocoder, vocoder

CHANNELS = 128
FOLD = 4
WIDTH = 8  # of both halves, next to the pixels
DEEP = 8 * WIDTH  # next to the latents, of the decoder
DOWN = (("compress_space_res", 4), ("compress_time_res", 2), ("compress_all_res", 8), ("compress_all_res", 8))
UPS = 3
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
            "vae": _video(),
            "audio_vae": _audio(),
            "vocoder.vocoder": vocoder(FIRST),
            "vocoder.bwe_generator": vocoder(SECOND),
            "vocoder.mel_stft": spectrogram,
        }
    )


def _statistics() -> Tree:
    return {"std-of-means": gain(CHANNELS), "mean-of-means": normal(0.2, CHANNELS)}


def _video() -> Tree:
    encoder: Rows = {"0.res_blocks.0": _block(WIDTH)}
    width = WIDTH
    for place, (_, folded) in enumerate(DOWN, 1):
        encoder[f"{place}.conv.conv"] = conv(2 * width // folded, width, *CUBE)
        width *= 2
    encoder[f"{len(DOWN) + 1}.res_blocks.0"] = _block(width)
    decoder: Rows = {"0.res_blocks.0": _block(DEEP)}
    for place in range(UPS):
        decoder[f"{place + 1}.conv.conv"] = conv(4 * (DEEP >> place), DEEP >> place, *CUBE)
    decoder[f"{UPS + 1}.res_blocks.0"] = _block(WIDTH)
    pixels = 3 * FOLD * FOLD
    return {
        "encoder.conv_in.conv": conv(WIDTH, pixels, *CUBE),
        "encoder.down_blocks": encoder,
        "encoder.conv_out.conv": conv(CHANNELS + 1, width, *CUBE),
        "decoder.conv_in.conv": conv(DEEP, CHANNELS, *CUBE),
        "decoder.up_blocks": decoder,
        "decoder.conv_out.conv": conv(pixels, WIDTH, *CUBE, factor=PIXEL_GAIN),
        "per_channel_statistics": _statistics(),
    }


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
    doubled = {"residual": True, "multiplier": 2}
    block = ["res_x", {"num_layers": 1}]
    spectrogram = {
        **{"double_z": True, "mel_bins": BANDS, "z_channels": SOUND_CHANNELS, "resolution": 256},
        **{"downsample_time": False, "in_channels": EARS, "out_ch": EARS, "ch": SOUND, "ch_mult": SOUND_WIDTHS},
        **{"num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0, "mid_block_add_attention": False},
        **{"norm_type": "pixel", "causality_axis": "height"},
    }
    return {
        "vae": {
            **{"dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": CHANNELS, "patch_size": FOLD},
            **{"norm_layer": "pixel_norm", "latent_log_var": "uniform", "spatial_padding_mode": "zeros"},
            **{"causal_decoder": False, "timestep_conditioning": False},
            **{"encoder_base_channels": WIDTH, "decoder_base_channels": WIDTH},
            "encoder_blocks": [block, *([name, {"multiplier": 2}] for name, _ in DOWN), block],
            "decoder_blocks": [block, *([["compress_all", doubled]] * UPS), block],
        },
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
