"""A stock VAE object whose network decodes and encodes in bands, if one call takes too much.

Stock's `VAE` hands a buffer on the host, or pixels there, to networks with `comfy_has_chunked_io`,
and asks beforehand how many bytes a call takes. Both answers come of a plan. A call for which a card
has the room, or can free it, is stock's own, to the bit: bands repeat work, and no other model on
the card is worth that. Other calls keep within the limit. Where no plan is found, stock computes as
ever, and the reason is said.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import comfy.model_management
import torch
from torch import Tensor

from ....kernels_cuda import LEDGER, STANDARD
from ...base.subclassing import mix
from ..memory_limits import HELD, LIMIT, OTHERS, SMALL_CARD, Progress, on_card, told_of_card
from ..request import Request, with_workspaces
from ..resident_patcher import bytes_beside, hold_alone, hold_too
from .meter import TURNED
from .passage import Passage
from .plan import Plan, at_once, in_bands
from .rehearsal import Call, Job
from .tensor import Unreadable

HALVES = {True: ("decoder.", "post_quant_conv."), False: ("encoder.", "quant_conv.")}
GRAIN = 1 << 26  # bytes: rooms that differ by less share a plan
ENDLESS = 1 << 60  # a room for everything at once
KEPT = 3 << 29  # bytes of a card that are left to the desktop and to libraries
REMEMBERED = 32  # plans

Found = Plan | str  # or why there is none
Foreseen = Callable[[Sequence[int]], tuple[int, ...]]


class Plans:
    """The plans of one network.

    limit     bytes that its weights and a call may take
    foreseen  the shape of pixels by that of latents, as the VAE object says it
    """

    def __init__(self, limit: int, foreseen: Foreseen | None = None) -> None:
        self.limit, self.foreseen = limit, foreseen
        self._found: dict[Any, Found] = {}

    def within(self, call: Call, job: Job, free: int, room: int) -> Found:
        """The plan for a call: at once if that fits into so many free bytes, workspaces too, with as few
        frames at a time as on the smallest card if need be; else within the room."""
        found = self.find(call, job, ENDLESS)
        if isinstance(found, Plan) and found.asked and found.worst > free:
            found = self.find(call, replace(job, card=SMALL_CARD), ENDLESS)
        return found if isinstance(found, str) or found.worst <= free else self.find(call, job, room)

    def find(self, call: Call, job: Job, room: int) -> Found:
        """The plan for a call within so many bytes, or why there is none."""
        key = call.decodes, job, room
        if key not in self._found:
            found = self._made(call, job, room)
            while len(self._found) >= REMEMBERED:
                del self._found[next(iter(self._found))]
            self._found[key] = found
        return self._found[key]

    def _made(self, call: Call, job: Job, room: int) -> Found:
        try:
            if room == ENDLESS:
                return at_once(call, job)
            whole = self.find(call, job, ENDLESS)
            if isinstance(whole, str) or whole.peak <= room:
                return whole
            # Fewer frames at a time, which some of ComfyUI's code has on a small card, repeat no work.
            if whole.asked and not job.card:
                return self.find(call, replace(job, card=SMALL_CARD), room)
            return in_bands(call, job, room, whole)
        except Unreadable as error:
            return str(error)


class InBands:
    """Mixed into stock's network."""

    comfy_has_chunked_io = True
    fusestream_plans: Plans

    def decode_output_shape(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """The pixels [b, 3, ...] that latents of this shape become."""
        own: Any = getattr(super(), "decode_output_shape", None)
        if own is not None:
            return tuple(own(shape))
        net: Any = self
        parameter = next(net.parameters())
        job = Job((1, *shape[1:]), parameter.dtype, parameter.device, parameter.device)
        found = self.fusestream_plans.find(self._call(True), job, ENDLESS)
        if isinstance(found, str):
            if self.fusestream_plans.foreseen is None:
                raise Unreadable(found)
            return self.fusestream_plans.foreseen(shape)
        return shape[0], *found.shape[1:]

    @torch.no_grad()
    def decode(self, z: Tensor, output_buffer: Tensor | None = None, room: int | None = None, **options: Any) -> Tensor:
        """Latents [b, z, ...] -> pixels [b, 3, ...].

        output_buffer  the destination, on any device and of any type; None: a tile, stock's call
        room           bytes that a call may take; by default the limit decides
        """
        call = self._call(True)
        made: Tensor
        if output_buffer is None and room is None:
            hold_too(call.net, z.device, self._own(True))
            made = call.stocks(z, **options)
            return made
        found = self._plan(call, z, z.device, room)
        if isinstance(found, str):
            _say(call, found)
            return _stocks(call, z, output_buffer, options)
        self._hold(True, z.device)
        if not found.bands:  # without a limit: what runs out of memory in one is computed twice
            with told_of_card(found.card):
                return _stocks(call, z, output_buffer, options)
        if output_buffer is None:
            output_buffer = torch.empty(found.shape, dtype=z.dtype, device=z.device)
        _say_norms(call, found)
        passage = Passage(call, found, z.device, Progress(len(found.bands), shown=room is None))
        try:
            self._served(call, found, z, partial(passage.decode, z, output_buffer, **options), z.device)
        except Unreadable as error:
            _say(call, str(error))
            return _stocks(call, z, output_buffer, options)
        return output_buffer

    @torch.no_grad()
    def encode(self, x: Tensor, device: torch.device | None = None, room: int | None = None, **options: Any) -> Any:
        """Pixels [b, 3, ...] on any device -> latents [b, z, ...] on the device of the computation.

        device  of the computation; None: a tile, stock's call
        room    bytes that a call may take; by default the limit decides
        """
        call = self._call(False)
        if (device is None and room is None) or options:
            hold_too(call.net, x.device, self._own(False))
            made: Any = call.stocks(x, **options)
            return made
        device = device or x.device
        found = self._plan(call, x, device, room)
        if isinstance(found, str):
            _say(call, found)
            return call(x if call.brings else x.to(device), device)
        self._hold(False, device)
        if not found.bands:
            with told_of_card(found.card):
                return call(x if call.brings else x.to(device), device)
        _say_norms(call, found)
        passage = Passage(call, found, device, Progress(len(found.bands), shown=room is None))
        try:
            return self._served(call, found, x, partial(passage.encode, x), device)
        except Unreadable as error:
            _say(call, str(error))
            return call(x if call.brings else x.to(device), device)

    def _call(self, decodes: bool) -> Call:
        net: Any = self
        stocks = super().decode if decodes else super().encode  # type: ignore[misc]
        return Call(net, stocks, decodes)

    def _plan(self, call: Call, given: Tensor, device: torch.device, room: int | None) -> Found:
        # All samples at once, as stock has them: some networks mix them.
        job = Job(tuple(given.shape), given.dtype, given.device, device)
        if room is None:
            room = room_for(self, call.decodes)
            if on_card(device):
                free = _grained(int(comfy.model_management.get_free_memory(device) / HELD))
                return self.fusestream_plans.within(call, job, free, min(room, free))
        found = self.fusestream_plans.find(call, job, room)
        if isinstance(found, Plan) and room_of_card(self, call.decodes, device) < found.peak:
            return f"even in bands it takes {found.peak / 2**30:.1f} GiB"
        return found

    def _own(self, decodes: bool) -> tuple[str, ...]:
        """Names of the weights that this half computes with."""
        net: Any = self
        tensors = (*net.named_parameters(), *net.named_buffers())
        return tuple(name for name, _ in tensors if not name.startswith(HALVES[not decodes]))

    def _hold(self, decodes: bool, device: torch.device) -> None:
        net: Any = self
        hold_alone(net, device, self._own(decodes), HALVES[not decodes])

    def _served(self, call: Call, plan: Plan, given: Tensor, run: Callable[[], Any], device: torch.device) -> Any:
        limit = self.fusestream_plans.limit
        # Workspaces may be taken: what does not fit is computed twice.
        most = max(int(HELD * plan.worst), limit - OTHERS - weights_there(self, call.decodes))
        request = Request(STANDARD, device, most, on_card(device), on_card(device))
        return request.served(call.net, given.shape, 0, lambda _request: run())


def _say(call: Call, reason: str) -> None:
    """Why a call is stock's."""
    what = "decodes" if call.decodes else "encodes"
    LEDGER.say_once(f"A VAE {what} all at once, as ComfyUI does: {reason}.", logging.INFO)


def _say_norms(call: Call, plan: Plan) -> None:
    """That a plan is approximate."""
    if plan.norms:
        what = "decodes" if call.decodes else "encodes"
        LEDGER.say_once(
            f"A VAE {what} in bands whose group norms are taken from a smaller version of the picture, because one "
            "pass has no room: colours may differ slightly from one pass; there are no seams.",
            logging.INFO,
        )


def weights_there(net: Any, decodes: bool) -> int:
    """Bytes of the weights on a card meanwhile: those of one half, if the other can wait."""
    return bytes_beside(net, HALVES[not decodes])


def room_for(net: Any, decodes: bool) -> int:
    """Bytes that may be in use at a time beside the weights."""
    return _grained(int((net.fusestream_plans.limit - weights_there(net, decodes)) / HELD))


def can_free(net: Any, decodes: bool, device: torch.device) -> int:
    """Bytes that may be in use at a time if other models leave the device."""
    if not on_card(device):
        return room_for(net, decodes)
    return _grained(int(room_of_card(net, decodes, device) / HELD))


def room_of_card(net: Any, decodes: bool, device: torch.device) -> int:
    """Bytes of a card beside the weights and what is left to others; without end where there is none."""
    if not on_card(device):
        return ENDLESS
    return int(comfy.model_management.get_total_memory(device)) - KEPT - weights_there(net, decodes)


def _grained(room: int) -> int:
    return max(0, room // GRAIN * GRAIN)


def _stocks(call: Call, z: Tensor, out: Tensor | None, options: dict[str, Any]) -> Tensor:
    made: Tensor = call(z, z.device, out, **options)
    if out is None or call.fills:
        return made
    return out.copy_(made)


def obstacle(vae: Any) -> str | None:
    """Why a stock VAE object is left as it is, in words a user understands; None: it is not."""
    net = vae.first_stage_model
    if vae.latent_dim not in (2, 3) or vae.extra_1d_channel is not None:
        return "it is not for pictures"
    if vae.handles_tiling:
        return "its tiles belong to the model"
    if not (hasattr(net, "decode") and hasattr(net, "encode") and any(True for _ in net.parameters())):
        return "it is no network with an encoder and a decoder"
    return None


def memory_used(vae: Any, stocks: Callable[..., int], decodes: bool, shape: torch.Size, dtype: torch.dtype) -> int:
    """Bytes that a decoding or encoding of one sample takes in addition to the weights. ComfyUI frees
    so many, and gives as many samples at once as fit. stocks: its own answer, if there is no plan."""
    net = vae.first_stage_model
    device = _numbered(torch.device(vae.device))
    job = Job((1, *shape[1:]), dtype, device if decodes else torch.device("cpu"), device)
    most, room = can_free(net, decodes, device), room_for(net, decodes)
    found = net.fusestream_plans.within(net._call(decodes), job, most, room)
    if isinstance(found, str):
        return stocks(shape, dtype)
    needed = int(HELD * found.worst)
    return needed if dtype in TURNED else with_workspaces(needed, dtype)  # of halves they are in the plan


def _numbered(device: torch.device) -> torch.device:
    """The device as its tensors name it."""
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


def fuse(net: Any, limit: int = LIMIT, foreseen: Foreseen | None = None) -> None:
    """Let stock's network decode and encode in bands, in place."""
    mix(net, InBands, fusestream_plans=Plans(limit, foreseen))


def _foreseen(channels: int, ratios: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of pixels by that of latents. ratios: of a side, or functions of frames and sides."""
    sides = shape[2:]
    factors = ratios if isinstance(ratios, tuple) else (ratios,) * len(sides)
    made = (each(side) if callable(each) else side * each for each, side in zip(factors, sides, strict=True))
    return shape[0], channels, *(int(side) for side in made)


def install(vae: Any) -> None:
    """Let a stock VAE object to which there is no `obstacle` compute in bands, and free only as
    much memory as it takes."""
    fuse(vae.first_stage_model, foreseen=partial(_foreseen, vae.output_channels, vae.upscale_ratio))
    vae.memory_used_decode = partial(memory_used, vae, vae.memory_used_decode, True)
    vae.memory_used_encode = partial(memory_used, vae, vae.memory_used_encode, False)
