"""A stock VAE object whose network decodes block by block, and the patcher of its weights."""

from __future__ import annotations

import contextlib
import inspect
import logging
from functools import partial
from typing import Any

import comfy.model_management
import torch
from torch import Tensor, nn

from ....kernels_cuda import LEDGER, STANDARD
from ...base.subclassing import mix
from ..banded.tensor import Unreadable
from ..memory_limits import HELD, LIMIT, OTHERS, Progress, on_card, weight_bytes
from ..request import Request, with_workspaces
from ..resident_patcher import HeldPatcher, hold, hold_alone
from .blocks import BlockByBlock, answer_of, chain_in
from .calls import joined, joining, noted
from .weights import BlocksAhead

ENCODER = ("encoder.", "quant_conv.")


class ByBlocks:
    """Mixed into stock's network. fusestream_limit: bytes that its weights and a decoding may
    take."""

    fusestream_limit: int

    @torch.no_grad()
    def decode(self, z: Tensor, room: int | None = None, **options: Any) -> Tensor:
        """Latents [b, z, t, h, w] -> pixels [b, 3, ...], as stock's.

        room: bytes beside the weights that are there; by default the limit decides
        """
        stocks = super().decode  # type: ignore[misc]
        if options:
            made: Tensor = stocks(z, **options)
            return made
        most = self.fusestream_limit - OTHERS - weights_there(self)
        request = Request(STANDARD, z.device, most, on_card(z.device), on_card(z.device))
        net: Any = self
        room = room_for(self) if room is None else room
        try:
            return request.served(net.decoder, z.shape, 0, lambda _request: self._by_blocks(stocks, z, room))
        except Unreadable as error:
            LEDGER.say_once(f"A VAE decodes as ComfyUI does, with all its weights: {error}.", logging.INFO)
            hold(net, z.device)
            return stocks(z)  # type: ignore[no-any-return]

    def _by_blocks(self, stocks: Any, z: Tensor, room: int) -> Tensor:
        net: Any = self
        name, blocks = _chain(net)
        hold_alone(net, z.device, others_of(net), ENCODER)
        forward = net.decoder.forward  # before its calls are answered
        shapes: dict[torch.Size, torch.Size] = {}
        taken = 0

        def shape(given: torch.Size) -> torch.Size:
            nonlocal taken
            if given not in shapes:
                shapes[given], needed = answer_of(forward, blocks, torch.empty(given, dtype=z.dtype, device=z.device))
                taken = max(taken, needed)
            return shapes[given]

        calls = noted(stocks, net.decoder, z, shape)
        progress = Progress(len(calls) * len(blocks), shown=True)

        def look() -> None:
            comfy.model_management.throw_exception_if_processing_interrupted()
            progress.add(1)

        with contextlib.closing(BlocksAhead(net, name, len(blocks), z.device)) as weights:
            run = BlockByBlock(forward, blocks, weights.on_card, look)
            made = [out.to("cpu") for out in run.run(calls, max(0, room - taken))]
        del calls
        # No block is there any more. Where tiles cannot be joined on the card, they are on the host.
        room += int(moving(blocks) / HELD)
        there = z if joining(stocks, net.decoder, z, shape) <= room else z.to("cpu")
        return joined(stocks, net.decoder, there, made)  # type: ignore[no-any-return]


def _chain(net: Any) -> tuple[str, list[nn.Module]]:
    found = chain_in(net.decoder)
    assert found is not None
    return f"decoder.{found[0]}", found[1]


def others_of(net: Any) -> tuple[str, ...]:
    """Names of the weights that stay on the card during a decoding."""
    name, _ = _chain(net)
    tensors = [*net.named_parameters(), *net.named_buffers()]
    return tuple(each for each, _ in tensors if not each.startswith((f"{name}.", *ENCODER)))


def moving(blocks: list[nn.Module]) -> int:
    """Bytes of a block that computes and of one that comes."""
    return 2 * max(map(weight_bytes, blocks))


def weights_there(net: Any) -> int:
    """Bytes of the weights on a card during a decoding: two blocks', and what is no block's."""
    _, blocks = _chain(net)
    encoder = sum(p.nbytes for n, p in net.named_parameters() if n.startswith(ENCODER))
    return int(weight_bytes(net) - encoder - sum(map(weight_bytes, blocks)) + moving(blocks))


def room_for(net: Any) -> int:
    """Bytes that may be in use at a time beside these weights."""
    return int((net.fusestream_limit - weights_there(net)) / HELD)


def memory_used(net: Any, _shape: torch.Size, dtype: torch.dtype) -> int:
    """Bytes that a decoding of any size takes beside the weights that the patcher loads. ComfyUI
    frees so many."""
    _, blocks = _chain(net)
    return with_workspaces(moving(blocks) + int(HELD * room_for(net)), dtype)


class BlocksPatcher(HeldPatcher):
    """Loads all but the blocks, which come one by one. With patches on its weights, all."""

    def load(
        self,
        device_to: Any = None,
        lowvram_model_memory: int = 0,
        force_patch_weights: bool = False,
        full_load: bool = False,
        **others: Any,
    ) -> None:
        if self.patches or not full_load:
            super().load(device_to, lowvram_model_memory, force_patch_weights, full_load, **others)
            return
        name, _ = _chain(self.model)
        names = [each for each, _ in (*self.model.named_parameters(), *self.model.named_buffers())]
        hold(self.model, device_to, tuple(each for each in names if not each.startswith(f"{name}.")))
        self.model.device, self.model.model_lowvram = device_to, False
        self.model.model_loaded_weight_memory = self.model_size()
        self.model.model_offload_buffer_memory = 0
        self.model.current_weight_patches_uuid = self.patches_uuid


def obstacle(vae: Any) -> str | None:
    """Why a stock VAE object is left as it is, in words a user understands; None: it is not."""
    net = vae.first_stage_model
    decoder = getattr(net, "decoder", None)
    if not vae.handles_tiling:
        return "it has no tiles of its own"
    if not isinstance(decoder, nn.Module) or chain_in(decoder) is None:
        return "its decoder is no chain of blocks"
    if list(inspect.signature(net.decode).parameters) != ["z"]:
        return "it decodes with more than latents"
    return None


def fuse(net: Any, limit: int = LIMIT) -> None:
    """Let stock's network decode block by block, in place."""
    mix(net, ByBlocks, fusestream_limit=limit)


def install(vae: Any) -> str | None:
    """Let a stock VAE object decode block by block. Returns why it does not; None: it does."""
    reason = obstacle(vae)
    if reason is not None:
        return reason
    net, before = vae.first_stage_model, vae.patcher
    fuse(net)
    name, _ = _chain(net)
    nbytes = sum(tensor.nbytes for each, tensor in net.named_parameters() if not each.startswith(f"{name}."))
    vae.patcher = BlocksPatcher(net, load_device=before.load_device, offload_device=before.offload_device, size=nbytes)
    vae.memory_used_decode = partial(memory_used, net)
    return None
