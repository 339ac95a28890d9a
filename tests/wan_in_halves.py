"""A streamed Wan that computes in fp16 on the CPU, as it does on a card, and what its fused blocks handed back to stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.model_management
import pytest
import torch

from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.kernels_cuda import LEDGER, STANDARD, KernelPolicy


def load(path: Path | str, policy: KernelPolicy = STANDARD, dtype: torch.dtype = torch.float16) -> Any:
    """Streamed through the smallest window, computing in `dtype`, which stock does on a card and not on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        # Of quantised weights it is asked without a type: they have none to compute in.
        patch.setattr(comfy.model_management, "unet_manual_cast", lambda held, *_: dtype if held is None else None)
        model = load_streamed_diffusion_model(str(path), policy=policy, dtype=dtype)
    model.stream.residency.ceiling = model.stream.residency.least
    return model


def handed_back() -> set[str]:
    """Why blocks were stock's."""
    return {refusal.reason for refusal in LEDGER.refusals if refusal.op == "wan block"}


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """In float64: halves are compared."""
    return float((one.double() - other).norm() / other.double().norm())
