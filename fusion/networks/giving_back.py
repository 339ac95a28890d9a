"""A stock patcher for networks whose calls are captured (`kernels_cuda/modules/graphs.py`).
Captures are given back first when ComfyUI wants room, and together with the weights when it unloads
them.

Stock's accounts know weights only. The memory of a graph is torch's or the driver's, within a limit
that stock leaves free for computing anyway. Where stock pages VRAM itself it asks no patcher for
other memory than weights, so captures are given back after each prompt.

It is stock's patcher that loads a model once. The one that pages VRAM copies all weights of torch's
layers, which are not ComfyUI's operations, anew at each prompt: for an ESRGAN this takes as long as
computing a picture of 512x512 (0.2 s, on an H100's host).

Stock leaves weights in RAM if the memory that a node announces leaves no room for them, and its
operations copy them at each call. torch's layers cannot do that, so a network that has any is
loaded as a whole. These networks are small (an ESRGAN 33 MB, BiRefNet 0.5 GB), and the announced
memory is a guess: for an upscale model 4.8 GB, for a style network the memory of a whole picture,
which is then computed in bands.
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
    """Mixed into the patcher's class; clones have it, too."""

    model: nn.Module

    def partially_load(self, device_to: Any, extra_memory: float = 0, *args: Any, **others: Any) -> Any:
        """Load the model as a whole, regardless of room, if it has a layer that cannot be left in
        RAM."""
        room = math.inf if _has_layers_of_torch(self.model) else extra_memory
        return super().partially_load(device_to, room, *args, **others)  # type: ignore[misc]

    def partially_unload(self, device_to: Any, memory_to_free: int = 0, *args: Any, **others: Any) -> int:
        freed = release(self.model)
        if freed < memory_to_free:
            freed += super().partially_unload(device_to, memory_to_free - freed, *args, **others)  # type: ignore[misc]
        return freed

    def detach(self, unpatch_all: bool = True) -> Any:
        """Release captures, unless stock only begins to load what is loaded already."""
        if unpatch_all:
            release(self.model)
        return super().detach(unpatch_all)  # type: ignore[misc]


def _has_layers_of_torch(net: nn.Module) -> bool:
    """Whether the network has layers of torch's with weights, which have to be on the device."""
    plain = (part for part in net.modules() if not hasattr(part, "comfy_cast_weights"))
    return any(True for part in plain for _ in part.parameters(recurse=False))


def patcher_of(net: nn.Module, load_device: torch.device, offload_device: torch.device) -> Any:
    """A patcher whose captures stay until their memory is needed."""
    patcher = comfy.model_patcher.ModelPatcher(net, load_device=load_device, offload_device=offload_device)
    mix(patcher, _GivesBack)
    _all.add(patcher)
    return patcher


def after_work(patcher: Any) -> None:
    """Release captures if stock pages VRAM, because it would not ask for them."""
    if comfy.memory_management.aimdo_enabled:
        release(patcher.model)


def after_prompt() -> None:
    for patcher in list(_all):
        after_work(patcher)
