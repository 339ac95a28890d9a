"""Cards of other makers, and machines without NVIDIA's driver: ComfyUI loads and computes there as
it does without the pack.

The CPU is not among them: weights stream to it, so that everything can be tried without a card.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...gpu.nvidia import no_nvidia
from ...kernels_cuda import LEDGER, KernelPolicy
from . import file_formats
from .errors import NotStreamable

SERVED = "FuseStream streams weights to NVIDIA cards, and to the CPU."


def lacks(device: torch.device) -> str | None:
    """Why weights cannot stream to a device; None: they can."""
    return None if device.type == "cpu" else no_nvidia(device)


def must_fall_back(device: torch.device, vram_budget: float, path: str) -> bool:
    """Whether a model whose weights were to stream is loaded as stock does; the reason is said
    once. Raises `NotStreamable` if the user insisted by a budget, or if stock does not read the
    file."""
    reason = lacks(device)
    if reason is None or vram_budget == 0:
        return False
    told = f"{reason}. {SERVED}"
    if file_formats.is_ours_alone(path):
        raise NotStreamable(f"{path}: {told} {file_formats.OTHER_FILE}")
    if vram_budget > 0:
        raise NotStreamable(
            f"{told} Set vram_budget to -1 or 0: ComfyUI then loads the model as it does without FuseStream."
        )
    LEDGER.say_once(f"{told} ComfyUI loads and computes as it does without FuseStream.")
    return True


def policy_for(device: torch.device, policy: KernelPolicy) -> KernelPolicy:
    """The policy on this device: `auto` means stock's computation if no kernel can run. A forced
    policy stays, and says why it cannot serve."""
    if policy.default == "auto" and lacks(device) is not None:
        return replace(policy, default="off")
    return policy
