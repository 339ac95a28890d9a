"""How a stock model is loaded and, step by step, becomes a streamed and fused one.

Nodes are listed before anything runs, and ask for no more than `families`: what is exported here is imported when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..kernels_cuda import KernelPolicy
    from ..kernels_cuda.policy import Mode, Precision
    from .base.errors import WrongFile, WrongInput
    from .base.policy import all_off, policy_for_card
    from .identify.checkpoint_info import inspect_file
    from .identify.encoder_sets import inspect_text_encoders
    from .load.checkpoint import beside_the_model, load_checkpoint
    from .load.diffusion import load_diffusion_model
    from .load.draft_quality import at_quality
    from .load.text import load_text_encoder
    from .load.vae import load_vae, load_vae_in_parts

__all__ = [
    "KernelPolicy",
    "Mode",
    "Precision",
    "WrongFile",
    "WrongInput",
    "all_off",
    "at_quality",
    "beside_the_model",
    "inspect_file",
    "inspect_text_encoders",
    "load_checkpoint",
    "load_diffusion_model",
    "load_text_encoder",
    "load_vae",
    "load_vae_in_parts",
    "policy_for_card",
]

HOMES = {
    "KernelPolicy": "..kernels_cuda",
    "Mode": "..kernels_cuda.policy",
    "Precision": "..kernels_cuda.policy",
    "WrongFile": ".base.errors",
    "WrongInput": ".base.errors",
    "all_off": ".base.policy",
    "at_quality": ".load.draft_quality",
    "beside_the_model": ".load.checkpoint",
    "inspect_file": ".identify.checkpoint_info",
    "inspect_text_encoders": ".identify.encoder_sets",
    "load_checkpoint": ".load.checkpoint",
    "load_diffusion_model": ".load.diffusion",
    "load_text_encoder": ".load.text",
    "load_vae": ".load.vae",
    "load_vae_in_parts": ".load.vae",
    "policy_for_card": ".base.policy",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(HOMES[name], __name__), name)
