"""A patcher of stock's for networks whose calls are captured (`kernels_cuda/modules/graphs.py`): what was captured is given back
before anything else when ComfyUI wants room, and with the weights when it unloads them.

Stock's accounts know weights alone. What a graph keeps is torch's memory or the driver's, within a bound that stock leaves free for
computing anyway. Where stock pages VRAM itself it asks nobody for what is no weight: there it is given back after each prompt.

The patcher is stock's that loads a model once. Of layers that are torch's, not ComfyUI's operations, the one that pages VRAM brings
all weights anew at each prompt: those of an ESRGAN take as long as it computes for a picture of 512x512 (0.2 s, on an H100's host).

Stock leaves weights in RAM where what a node says it will need leaves no room for them, and its operations bring them at each call.
torch's layers cannot: a network that has any is brought as a whole. These are small (an ESRGAN 33 MB, BiRefNet 0.5 GB), and what a
node says is a guess: of an upscale model 4.8 GB, of a style network what a whole picture takes, which then goes in bands.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import comfy.memory_management
import comfy.model_patcher
import torch
from torch import nn

from ...kernels_cuda.modules.graphs import release
from ..base.subclassing import mix

_all: weakref.WeakSet[Any] = weakref.WeakSet()


class _GivesBack:
    """What the patcher's class is mixed with; clones have it too."""

    model: nn.Module

    def partially_load(self, device_to: Any, extra_memory: float = 0, *args: Any, **others: Any) -> Any:
        """As a whole, whatever room there is, if a layer of it cannot be left in RAM."""
        room = math.inf if _has_layers_of_torch(self.model) else extra_memory
        return super().partially_load(device_to, room, *args, **others)  # type: ignore[misc]

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


def _has_layers_of_torch(net: nn.Module) -> bool:
    """With weights of their own, which they take from where they lie."""
    plain = (part for part in net.modules() if not hasattr(part, "comfy_cast_weights"))
    return any(True for part in plain for _ in part.parameters(recurse=False))


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
