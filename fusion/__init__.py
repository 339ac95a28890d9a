"""How a stock model is loaded and, step by step, becomes a streamed and fused one."""

from ..kernels_cuda import KernelPolicy
from ..kernels_cuda.policy import Mode, Precision
from .load import load_diffusion_model, load_text_encoder, load_vae
from .policies import all_off
from .recognise import WrongFile

__all__ = [
    "KernelPolicy",
    "Mode",
    "Precision",
    "WrongFile",
    "all_off",
    "load_diffusion_model",
    "load_text_encoder",
    "load_vae",
]
