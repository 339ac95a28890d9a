"""A stock VAE object whose network decodes block by block, and the patcher of its weights."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import comfy.model_management
import torch
from torch import Tensor, nn

from ....kernels_cuda import LEDGER, STANDARD
from ...base.subclassing import mix
from ..banded.tensor import Unreadable
from ..memory_limits import HELD, LIMIT, OTHERS, Progress, on_card, or_else, weight_bytes
from ..request import Request, with_workspaces
from ..resident_patcher import HeldPatcher, hold, hold_alone, hold_too
from ..transfer import FreshPages, Outbox
from .blocks import Answers, BlockByBlock, chain_in
from .calls import in_batches, joined, joining, noted
from .weights import BlocksAhead

ENCODER = ("encoder.", "quant_conv.")
# Calls that a block computes at once: so many at most, and as many as this part of the room is enough for.
# The rest of it keeps what the next block is given.
MOST_CALLS, OF_THE_ROOM = 16, 4
FRAMES = 4  # of the result that leave the card together


class ByBlocks:
    """Mixed into stock's network. fusestream_limit: bytes that its weights and a decoding may
    take."""

    comfy_has_chunked_io = True
    fusestream_limit: int

    def decode_output_shape(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """The pixels [b, 3, ...] that latents of this shape become."""
        return shape_of(self, super().decode, shape)  # type: ignore[misc]

    @torch.no_grad()
    def decode(self, z: Tensor, output_buffer: Tensor | None = None, room: int | None = None, **options: Any) -> Tensor:
        """Latents [b, z, t, h, w] -> pixels [b, 3, ...], as stock's.

        output_buffer  the destination, on any device and of any type; None: a tensor on z's device
        room           bytes beside the weights that are there; by default what is free, and at least
                       what the limit leaves
        """
        stocks = super().decode  # type: ignore[misc]
        if options:
            return delivered(stocks(z, **options), output_buffer)
        net: Any = self
        hold_alone(net, z.device, others_of(net), ENCODER)
        least = room_for(net) if room is None else room
        most = least if room is not None else max(least, free_for(net, z.device))
        limit = int(HELD * least) + moving(_chain(net)[1]) - OTHERS
        request = Request(STANDARD, z.device, limit, on_card(z.device), on_card(z.device))

        def within_limit() -> Tensor:
            return request.served(
                net.decoder, z.shape, 0, lambda _one: self._by_blocks(stocks, z, least, output_buffer)
            )

        try:
            if most == least:
                return within_limit()
            torch.cuda.empty_cache()
            freely = partial(self._by_blocks, stocks, z, most, output_buffer)
            return or_else(freely, within_limit, "A VAE decodes again with less of the card")
        except Unreadable as error:
            LEDGER.say_once(f"A VAE decodes as ComfyUI does, with all its weights: {error}.", logging.INFO)
            hold(net, z.device)
            return delivered(stocks(z), output_buffer)

    @torch.no_grad()
    def encode(self, x: Tensor, device: torch.device | None = None, **options: Any) -> Any:
        """Pixels [b, 3, ...] on any device -> latents, as stock's. device: of the computation; None: x's."""
        net: Any = self
        device = device or x.device
        hold_too(net, device, ENCODER)  # a decoding lets it go
        return super().encode(x.to(device), **options)  # type: ignore[misc]

    def _by_blocks(self, stocks: Any, z: Tensor, room: int, out: Tensor | None) -> Tensor:
        net: Any = self
        name, blocks = _chain(net)
        forward = net.decoder.forward  # before its calls are answered
        answers = Answers(net.decoder, blocks, z)
        calls = noted(stocks, net.decoder, z, answers.shape)
        batches = in_batches(calls, min(MOST_CALLS, room // OF_THE_ROOM // answers.at_work))
        at_work = answers.at_work * max(map(len, batches)) // z.shape[0]
        joins = joining(stocks, net.decoder, z, answers.shape).nbytes
        nbytes = sum(answers.nbytes(x.shape) for x in calls)
        steps = len(batches) * len(blocks)
        progress = Progress(steps, shown=True)
        fresh = FreshPages(out, steps) if out is not None and on_card(z.device) else None

        def look() -> None:
            comfy.model_management.throw_exception_if_processing_interrupted()
            progress.add(1)
            if fresh is not None:
                fresh.touch_next()

        # No block is there any more when tiles are joined. Those that have no room are on the host.
        after = room + int(moving(blocks) / HELD)
        stays = nbytes + answers.kept * len(calls) + at_work <= room and nbytes + joins <= after
        with contextlib.closing(BlocksAhead(net, name, len(blocks), z.device)) as weights:
            run = BlockByBlock(forward, blocks, weights.on_card, look)
            found = run.run(batches, max(0, room - at_work - stays * nbytes))
            whole = ((one if stays else one.to("cpu")) for one in found)
            made = [part for one in whole for part in torch.split(one, z.shape[0])]
        del calls, batches
        return delivered(joined(stocks, net.decoder, z if joins <= after else z.to("cpu"), made), out)


def shape_of(net: Any, stocks: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """The pixels that stock's decoding makes of latents of this shape."""
    parameter = next(net.parameters())
    z = torch.empty(tuple(shape), dtype=parameter.dtype, device=parameter.device)
    return tuple(joining(stocks, net.decoder, z, Answers(net.decoder, _chain(net)[1], z).shape).shape)


def delivered(pixels: Tensor, out: Tensor | None) -> Tensor:
    """Pixels [b, 3, t, h, w], written into the result if there is one."""
    if out is None:
        return pixels
    outbox = Outbox(out)
    for start in range(0, pixels.shape[2], FRAMES):
        frames = slice(start, min(start + FRAMES, pixels.shape[2]))
        outbox.put((slice(None), slice(None), frames), pixels[:, :, frames])
    outbox.flush()
    return out


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


def free_for(net: Any, device: torch.device) -> int:
    """Bytes that may be in use at a time beside the weights, by what is free on a card; 0: it is none."""
    if not on_card(device):
        return 0
    free = int(comfy.model_management.get_free_memory(device)) - moving(_chain(net)[1])
    return max(0, int(free / HELD))


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
    if getattr(net, "comfy_has_chunked_io", False):
        return "it writes into its result itself"
    try:
        shape_of(net, net.decode, (1, vae.latent_channels, *(2,) * vae.latent_dim))
    except Unreadable as error:
        return f"its tiles are not known before they are decoded: {error}"
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
