"""A patcher of stock's for networks whose calls are captured (`kernels_cuda/modules/captured.py`): what was captured is given back
before anything else when ComfyUI wants room, and with the weights when it unloads them.

Stock's accounts know weights alone. What a graph keeps is torch's memory or the driver's, within a bound that stock leaves free for
computing anyway. Where stock pages VRAM itself it asks nobody for what is no weight: there it is given back after each prompt.

The patcher is stock's that loads a model once. Of layers that are torch's, not ComfyUI's operations, the one that pages VRAM brings
all weights anew at each prompt: those of an ESRGAN take as long as it computes for a picture of 512x512 (0.2 s, on an H100's host).
"""

from __future__ import annotations

import weakref
from typing import Any

import comfy.memory_management
import comfy.model_patcher
import torch
from torch import nn

from ..kernels_cuda.modules.captured import release
from .mixing import mix

_all: weakref.WeakSet[Any] = weakref.WeakSet()


class _GivesBack:
    """What the patcher's class is mixed with; clones have it too."""

    model: nn.Module

    def partially_unload(self, device_to: Any, memory_to_free: int = 0, *args: Any, **others: Any) -> int:
        freed = release(self.model)
        if freed < memory_to_free:
            freed += super().partially_unload(device_to, memory_to_free - freed, *args, **others)  # type: ignore[misc]
        return freed

    def detach(self, unpatch_all: bool = True) -> Any:
        """Not all: that is how stock begins to load what is loaded already."""
        if unpatch_all:
            release(self.model)
        return super().detach(unpatch_all)  # type: ignore[misc]


def patcher_of(net: nn.Module, load_device: torch.device, offload_device: torch.device) -> Any:
    """One whose weights stay where they are until somebody needs the room."""
    patcher = comfy.model_patcher.ModelPatcher(net, load_device=load_device, offload_device=offload_device)
    mix(patcher, _GivesBack)
    _all.add(patcher)
    return patcher


def after_work(patcher: Any) -> None:
    """Nobody calls the network for a while."""
    if comfy.memory_management.aimdo_enabled:
        release(patcher.model)


def after_prompt() -> None:
    for patcher in list(_all):
        after_work(patcher)
