"""VAEs, with their authors' tensor names.

    wan      Wan 2.1   8x8x4, 16 channels. One flat list per half. Causal 3D convolutions; an
                       upsampling halves the width
             Wan 2.2   16x16x4, 48 channels, pixels folded 2x2 into 12 channels. A list of stages
                       with a list of layers in each
    kl       8x8, 4, 16 or 32 channels; Flux.2 folds 2x2 of its latents into channels, with a batch
             norm of them
    hunyuan  HunyuanVideo 1.5's
    minimax  MiniMax H3's of videos, whose decoder is a transformer, and of sounds
    ltx      LTX-2.3's of videos and of sounds, and the net that doubles its latents
    vocoder  how those of sounds end

Those of Wan and the KL VAEs have four stages in either half, `width * (1, 2, 4, 4)` wide, with SiLU
before each convolution.
"""

from __future__ import annotations

from .hunyuan import HUNYUAN_VAE, HUNYUAN_VAE_PUBLISHED, HunyuanVaeSize, hunyuan_vae
from .kl import KL_VAES, KlSize, kl_vae
from .ltx import (
    LATENT_WIDTH,
    LTX_VIDEO,
    LTX_VIDEO_PUBLISHED,
    LtxVideoSize,
    ltx_upsampler,
    ltx_upsampler_config,
    ltx_vae_config,
    ltx_vaes,
    ltx_video_vae,
    ltx_video_vae_metadata,
)
from .minimax import (
    MINIMAX_AUDIO,
    MINIMAX_VIDEO,
    MINIMAX_VIDEO_PUBLISHED,
    MiniMaxAudioSize,
    MiniMaxVideoSize,
    minimax_audio,
    minimax_video,
)
from .stages import STAGES
from .wan import (
    LATENT_21,
    LATENT_MEANS,
    LATENT_SPREADS,
    WAN21,
    WAN22,
    WAN22_PUBLISHED,
    VaeSize,
    wan21_vae,
    wan22_vae,
)

__all__ = [
    "HUNYUAN_VAE",
    "HUNYUAN_VAE_PUBLISHED",
    "KL_VAES",
    "LATENT_21",
    "LATENT_MEANS",
    "LATENT_SPREADS",
    "LATENT_WIDTH",
    "LTX_VIDEO",
    "LTX_VIDEO_PUBLISHED",
    "MINIMAX_AUDIO",
    "MINIMAX_VIDEO",
    "MINIMAX_VIDEO_PUBLISHED",
    "STAGES",
    "WAN21",
    "WAN22",
    "WAN22_PUBLISHED",
    "HunyuanVaeSize",
    "KlSize",
    "LtxVideoSize",
    "MiniMaxAudioSize",
    "MiniMaxVideoSize",
    "VaeSize",
    "hunyuan_vae",
    "kl_vae",
    "ltx_upsampler",
    "ltx_upsampler_config",
    "ltx_vae_config",
    "ltx_vaes",
    "ltx_video_vae",
    "ltx_video_vae_metadata",
    "minimax_audio",
    "minimax_video",
    "wan21_vae",
    "wan22_vae",
]
