"""The rows of kernels that bench/results.md shows, and the whole models that README shows. Standard library only."""

from __future__ import annotations

# One or two rows that stand for each op: the shapes a Wan, UMT5 or VAE run meets most.
CHOSEN = (
    "norm_modulate|Wan 1.3B 480x832x81: 32760x1536",
    "norm_modulate|Wan 14B 480x832x81: 32760x5120",
    "rms_rope_|Wan 1.3B 480x832x81",
    "gated_residual_|Wan 1.3B 480x832x81: 32760x1536",
    "gelu|Wan 1.3B feed-forward, tanh: 32760x8960",
    "gelu_mul|UMT5, scaled and saturated: 512x10240",
    "channel_rms_silu|480p: 96x4x480x832 channels-last",
    "channel_rms_silu|480p: 384x4x120x208 channels-last",
    "group_norm_silu|image VAE 1024: 1x128x1024x1024 channels-last",
    "diffusion_step|Wan 720x1280x81: 16x21x90x160",
    "to_half|",
)

# Matrix work: what a user gets is what `auto` chose, so that is what is shown.
CHOSEN_MATRIX = (
    "attention|Wan 1.3B 480x832x81, self",
    "attention|Wan 1.3B 480x832x81, cross",
    "attention|UMT5, relative bias",
    "attention|Wan VAE 480x832",
    "linear|Wan 1.3B 480x832x81, ffn in with GELU",
    "linear|Wan 1.3B 480x832x81, ffn out with gate and residual",
    "linear|Wan 14B 480x832x81, ffn in with GELU",
    "linear_pair|UMT5, GeGLU",
    "conv|3x3x3, 96 to 96, 4x480x832",
    "conv|3x3x3, 192 to 192, 4x240x416",
    "conv|3x3x3, 384 to 384, 2x120x208",
    "conv|3x3x3, 96 to 3, 4x480x832",
    "conv|3x3 stride 2, 96, 4x480x832",
    "upsample_conv2d|192 to 96, 4x240x416",
    "VAE residual block|96, 4x480x832",
    "VAE residual block|192, 4x240x416",
    "VAE residual block|384, 4x120x208",
)

# Attention in every tier, and visiting a part: what our kernels reach, and how far the result is off.
CHOSEN_TIERS = (
    "attention|Wan 1.3B 480x832x81, self",
    "attention|Wan 14B 480x480x33, self, cond and uncond",
    "attention|image of 1024x1024 with its prompt, self",
    "sparse attention|Wan 1.3B 480x832x81, 50% of the blocks",
    "sparse attention|Wan 1.3B 480x832x81, 30% of the blocks",
    "sparse attention|Wan 14B 480x480x33, cond and uncond, 30% of the blocks",
)

# What says most to somebody who asks how fast it is: the README has no more.
CHOSEN_MODELS = (
    "1.3B 480x832x81",
    "14B 480x832x81",
    "14B 720x1280x81",
    "14B 480x480x17, 2 GiB free",
    "14B 480x480x17, as on Windows",
    "14B 480x480x17, Q4_K_M",
    "VAE decode 720x1280x81",
    "klein 4B 1024x1024",
    "Z-Image 1024x1024",
    "Flux.2 VAE decode 2048x2048",
    "SDXL 1024x1024",
    "SD 1.5 live 512x512 through TAESD",
    "Qwen3-VL 4B write a token",
)
