"""What a VAE is asked for beside its input, and what is the same in all that answer: room,
ComfyUI's questions, installation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import comfy.model_management
import torch
from torch import Tensor, nn

from ...kernels_cuda import KernelPolicy
from .memory_limits import HELD, LIMIT, OTHERS, Leftovers, Result, on_card, weight_bytes


@dataclass(frozen=True)
class Request:
    """A decoding or an encoding, as far as it is no matter of what.

    device    where it computes
    most      bytes that torch's allocator may hold for all that is made on the way
    alone     whether this is all of a picture or video, and no tile of one
    tidies    whether what torch's allocator holds is looked after: not for tiles, which are small
              and many
    room      bytes that the parts of a picture may take
    into      where decoded pixels go; None: into a tensor like the latents
    finishes  whether they are to be those of pictures there
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
        """To a fused network. most, alone, others: as the fields have them."""
        return cls(net.fusestream_policy, device, most, alone, alone and on_card(device), **others)

    @classmethod
    def for_pictures(
        cls, net: Any, device: torch.device, room: int | None, beside: int, alone: bool, **others: Any
    ) -> Request:
        """To a fused network of pictures. room: None: what its limit leaves. beside: bytes that are
        made beside the pictures.
        """
        found = net.fusestream_room(device) if room is None else room
        most = max(found + beside, net.fusestream_limit - OTHERS - weight_bytes(net))
        return cls.of(net, device, most, alone, room=found, **others)

    def served(self, half: nn.Module, shape: torch.Size, piece: int, run: Callable[[Request], Result]) -> Result:
        """What `run` makes of one sample, when torch's allocator is ready for it, and within the
        bound.

        shape   of what passes through this half of a VAE
        piece   bytes of the one piece of memory that all of it passes through, so that each part
                finds its place there. Parts are of many sizes, and in what one left the next would
                not fit: to give that back in between cost 160 pieces for a decoding of 480x832,
                asked of the card and given back. 0: what passes has memory of its own, and nothing
                of what went before may lie amid it
        """
        if not self.tidies:
            return run(self)
        begun = replace(self, tidies=not piece)
        return Leftovers(half, shape, piece).serve(lambda: run(begun), piece, self.most, self.device)

    def spare(self, need: int) -> int:
        """Bytes that torch's allocator may hold unused before something that needs so many."""
        return max(0, self.room - int(HELD * need))


def room_within(vae: nn.Module, limit: int, device: torch.device | None) -> int:
    """Bytes beside the weights: by the limit, and by what is free on the device."""
    room = limit - weight_bytes(vae)
    if device is not None and device.type == "cuda":
        room = min(room, int(comfy.model_management.get_free_memory(device)))
    return room


def with_workspaces(needed: int, dtype: torch.dtype) -> int:
    """Bytes of what needs so many, where our kernels do not serve, too: torch's convolutions have a
    workspace, and copy what they remember beside what they compute.
    """
    return needed if dtype is torch.float16 else needed * 3 // 2 + (1 << 30)


def answer(vae: Any, memory_used: Callable[..., int]) -> None:
    """Let a stock VAE object free no more memory than its network takes.

    memory_used  bytes, of the network, the limit, whether it decodes, the shape of its input and
                 its type
    """
    vae.memory_used_decode = partial(memory_used, vae.first_stage_model, LIMIT, True)
    vae.memory_used_encode = partial(memory_used, vae.first_stage_model, LIMIT, False)
