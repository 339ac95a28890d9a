"""Whether CUDA's driver can be asked for one of torch's devices. AMD's cards are called `cuda` by torch too."""

from __future__ import annotations

import torch

from .cuda import NoDriver, driver


def other_maker(device: torch.device) -> str | None:
    """What a device is, if it is none of NVIDIA's. The driver is not asked."""
    if device.type != "cuda":
        return f"{device} is no NVIDIA card"
    return f"{device} is an AMD card" if torch.version.hip else None


def no_nvidia(device: torch.device) -> str | None:
    """Why the driver cannot be asked for it, in words; None: it can."""
    other = other_maker(device)
    if other is not None:
        return other
    try:
        driver()
    except NoDriver as error:
        return str(error)
    return None
