"""diffusion_step at latents of Wan 2.1 and Flux, and at a size where the card's bandwidth decides."""

from __future__ import annotations

import torch

from ...kernels_cuda.ops.elementwise.diffusion_step import stock
from ..row import Row, Tensors

CFG = (6.0, "velocity", "euler", 1.0, None, None)
DENOISED = (6.0, "denoised", "euler", 1.0, None, None)
DDIM = (6.0, "eps", "ddim", 1.0, -4.0, 4.0)


def guided(*shape: int, dtype: torch.dtype = torch.float32, blended: bool = False) -> Tensors:
    """An fp32 latent, both halves of the model's output, and perhaps the latent to keep with its mask."""
    x, cond, uncond = torch.randn(3, *shape, device="cuda").unbind(0)
    previous = torch.randn_like(x) if blended else None
    mask = torch.rand(shape[0], 1, *shape[2:], device="cuda") if blended else None
    return x, cond.to(dtype), uncond.to(dtype), previous, mask, torch.tensor([0.7, 0.6], device="cuda")


ROWS = [
    Row("diffusion_step", "Wan 480x832x81: 16x21x60x104", lambda: guided(1, 16, 21, 60, 104), CFG, stock),
    Row("diffusion_step", "Wan 720x1280x81: 16x21x90x160", lambda: guided(1, 16, 21, 90, 160), CFG, stock),
    Row(
        "diffusion_step",
        "the same, half model output",
        lambda: guided(1, 16, 21, 90, 160, dtype=torch.float16),
        CFG,
        stock,
    ),
    Row("diffusion_step", "the same, denoised", lambda: guided(1, 16, 21, 90, 160), DENOISED, stock),
    Row("diffusion_step", "the same, masked", lambda: guided(1, 16, 21, 90, 160, blended=True), CFG, stock),
    Row("diffusion_step", "the same, DDIM and clamp", lambda: guided(1, 16, 21, 90, 160), DDIM, stock),
    Row("diffusion_step", "16 clips: 16x16x21x90x160", lambda: guided(16, 16, 21, 90, 160), CFG, stock),
    Row("diffusion_step", "16 clips, masked", lambda: guided(16, 16, 21, 90, 160, blended=True), CFG, stock),
]
