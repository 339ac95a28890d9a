"""Whether a torch device is an NVIDIA card. Torch calls AMD's cards `cuda` too."""

from __future__ import annotations

import torch

from .cuda import NoDriver, driver


def other_maker(device: torch.device) -> str | None:
    """Words for a device that is no NVIDIA card; None for one that is. The driver is not asked."""
    if device.type != "cuda":
        return f"{device} is no NVIDIA card"
    return f"{device} is an AMD card" if torch.version.hip else None


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA card; None for another device."""
    return None if other_maker(device) else torch.cuda.get_device_capability(device)


def no_nvidia(device: torch.device) -> str | None:
    """Why the driver cannot be asked about a device, in words; None: it can."""
    other = other_maker(device)
    if other is not None:
        return other
    try:
        driver()
    except NoDriver as error:
        return str(error)
    return None
