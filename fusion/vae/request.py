"""The arguments of a VAE's call beside its input, and what all VAEs share in serving it: memory,
ComfyUI's questions, installation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import comfy.model_management
import torch
from torch import Tensor, nn

from ...kernels_cuda import KernelPolicy
from ..fused.block import HandBack, is_overridden
from .memory_limits import HELD, LIMIT, OTHERS, Leftovers, Result, on_card, weight_bytes

HAND_BACK = HandBack("vae", "fused ops", "this VAE", "compute as another node has changed it", "stock's computation")


@dataclass(frozen=True)
class Request:
    """A decoding or an encoding, without its input.

    device    where it computes
    most      bytes that torch's allocator may hold for all that is made on the way
    alone     whether this is a whole picture or video, not a tile of one
    tidies    whether torch's allocator is tidied: not for tiles, which are small and many
    room      bytes that the parts of a picture may take
    into      destination of decoded pixels; None: a tensor like the latents
    finishes  whether pixels are converted to those of pictures there
    """

    policy: KernelPolicy
    device: torch.device
    most: int
    alone: bool
    tidies: bool
    room: int = 0
    into: Tensor | None = None
    finishes: bool = False

    @classmethod
    def of(cls, net: Any, device: torch.device, most: int, alone: bool, **others: Any) -> Request:
        """A request to a fused network. most, alone, others: fields."""
        return cls(net.fusestream_policy, device, most, alone, alone and on_card(device), **others)

    @classmethod
    def for_pictures(
        cls, net: Any, device: torch.device, room: int | None, beside: int, alone: bool, **others: Any
    ) -> Request:
        """A request to a fused network of pictures. room: None: what its limit leaves. beside:
        bytes of results beside the pictures."""
        found = net.fusestream_room(device) if room is None else room
        most = max(found + beside, net.fusestream_limit - OTHERS - weight_bytes(net))
        return cls.of(net, device, most, alone, room=found, **others)

    def served(self, half: nn.Module, shape: torch.Size, piece: int, run: Callable[[Request], Result]) -> Result:
        """Call `run` for one sample, with torch's allocator prepared and limited.

        shape   of the input of this half of a VAE
        piece   bytes of one piece of memory that everything passes through. Parts have many sizes,
                and one would not fit where another was: without the piece a decoding of 480x832
                allocated 160 pieces on the card and gave them back. 0: the bands have memory of
                their own, and leftovers must not lie between it
        """
        if not self.tidies:
            return run(self)
        begun = replace(self, tidies=not piece)
        return Leftovers(half, shape, piece).serve(lambda: run(begun), piece, self.most, self.device)

    def hands_back(self, half: nn.Module, x: Tensor) -> bool:
        """Whether stock computes this half of a VAE for x, because another node has changed a part of
        it."""
        name = next((name for name, part in half.named_modules() if part is not half and is_changed(part)), None)
        if name is not None:
            HAND_BACK(f"another node has replaced {name}", x, forced=self.policy.default == "on")
        return name is not None

    def spare(self, need: int) -> int:
        """Bytes that torch's allocator may hold unused before a part that needs so many."""
        return max(0, self.room - int(HELD * need))


def is_changed(part: Any) -> bool:
    """Whether another node has changed how a layer computes, as those for seamless pictures do. Told
    from the layer alone, because the node may have copied the VAE before."""
    if is_overridden(part.__dict__, part._forward_hooks, part._forward_pre_hooks):
        return True
    if not isinstance(part, nn.Conv2d | nn.Conv3d):
        return False
    return part.padding_mode != "zeros" or any(step != 1 for step in part.dilation)


def room_within(vae: nn.Module, limit: int, device: torch.device | None) -> int:
    """Bytes beside the weights: by the limit, and by the free memory of the device."""
    room = limit - weight_bytes(vae)
    if device is not None and device.type == "cuda":
        room = min(room, int(comfy.model_management.get_free_memory(device)))
    return room


def with_workspaces(needed: int, dtype: torch.dtype) -> int:
    """Bytes needed, increased for types that our kernels do not serve: torch's convolutions have a
    workspace, and copy remembered frames."""
    return needed if dtype is torch.float16 else needed * 3 // 2 + (1 << 30)


def answer(vae: Any, memory_used: Callable[..., int]) -> None:
    """Let a stock VAE object free only as much memory as its network takes.

    memory_used  bytes, by network, limit, whether it decodes, shape of the input and its type
    """
    vae.memory_used_decode = partial(memory_used, vae.first_stage_model, LIMIT, True)
    vae.memory_used_encode = partial(memory_used, vae.first_stage_model, LIMIT, False)
