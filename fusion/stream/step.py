"""What a step needs of VRAM beside the weights: reckoned before it, measured while it runs, and made room for if it was more.

Stock reckons by the area of the latent and the model's width, for its own way of computing. Where a family's blocks are ours, the
family reckons: they may need less, so more of the model may stay on the card, and prompts are batched more often. The reckoning is
multiplied by the largest ratio that was measured, so that the next run knows better.

What is captured of a short step (`graph.py`) takes the room that the step's activations were reckoned with: they are made in it.
It is in the device's budget beside the weights, stays under the limit below, and is the first that is given back.

While a step runs, torch's allocator may not grow into the last of the card: left alone it keeps what it no longer uses until
nothing is free, and desktop and driver need some too. A step that runs out of VRAM is computed once more with all of the
card; if that is too little as well, a last time, after the weights have given back all but their window.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import comfy.model_management
import torch

from ...kernels_cuda.autotune import tuner
from ..mixing import mix
from . import vram
from .model_call import ModelCall, wrap
from .stream import Stream

WRAPPER = "fusestream"  # our key among the wrappers of a model
RECKONING = "fusestream_reckoning"  # where a model has its own
RESERVE = 19 * 2**26  # bytes of the card that a step leaves alone if it can: the desktop's, and code the driver loads
TRYING = 11 * 2**24  # what kernels take that are tried in a first step, beyond those that are chosen
BATCHED_WHERE = 1.51  # stock batches prompts where so many times what they need is free, 1.5
# What lies in between before the blocks begin leaves gaps that fit a tensor less than they could (of Wan's six, one: its first
# convolution's result, in fp32). It is no need, but where weights would take that room a step runs out of VRAM.
GAP = 1 + 1 / 6

Need = Callable[[Any, Sequence[int], torch.dtype], float | None]


class Reckoning:
    """Of one model. Kept by the model, and so shared by its clones, as the weights are."""

    def __init__(self, need: Need | None = None) -> None:
        self.need = need  # the family's: bytes for a latent of this shape and type; None: stock's blocks will compute
        self.ratio = 1.0  # measured over reckoned; never less than 1
        self.asked: deque[int] = deque([0], maxlen=2)  # before it loads, stock asks for all prompts and then for one
        self.is_alone = False  # whether the sampling at hand computes one prompt: stock asks for a batch all the same
        self.tight = math.inf  # a latent of so many elements has run out of VRAM while the reserve was left alone

    def measured(self, nbytes: int, reckoned: float) -> None:
        """Take note of what a step really needed."""
        if reckoned > 0 and nbytes > self.ratio * reckoned:
            self.ratio = nbytes / reckoned
            logging.info(
                "FuseStream: a step took %.2f GiB of VRAM beside the weights, %.2f were reckoned with",
                nbytes / vram.GIB,
                reckoned / vram.GIB,
            )

    def room(self, room: float, free: float, least: int, most: int) -> float:
        """Bytes for the blocks' weights, which are between `least` and `most`: the `room` that stock would give them, or
        fewer, so that of what is free for weights and step together the step has what it needs and leaves the reserve.

        Fewer still where part of the model streams anyway and all prompts could run as one batch, which stock decides by
        what is free then: a batch streams the weights once instead of twice, which saves more than residents do.
        """
        one, batch = GAP * min(self.asked), GAP * max(self.asked)
        left = max(RESERVE + TRYING, comfy.model_management.minimum_inference_memory())
        room = min(room, free - one - left)
        if room >= most or self.is_alone:
            return room
        beside = free - max(BATCHED_WHERE * max(self.asked), batch + left)
        return beside if least <= beside < room else room


class _Reckoned:
    """What the class of a streamed and fused model is mixed with: stock asks a model how much a latent takes."""

    def memory_required(self, input_shape: Sequence[int], cond_shapes: Mapping[str, Any] | None = None) -> float:
        model: Any = self
        reckoning: Reckoning = model.fusestream_reckoning
        stock: float = super().memory_required(input_shape, cond_shapes=cond_shapes or {})  # type: ignore[misc]
        bare: float = super().memory_required(input_shape)  # type: ignore[misc]
        ours = reckoning.ratio * own_need(model, input_shape, stock, bare)
        reckoning.asked.append(int(ours))
        return ours


def own_need(model: Any, shape: Sequence[int], stock: float, bare: float) -> float:
    """Bytes. stock, bare: what stock reckons for this latent with and without what is joined to it (references, poses)."""
    need: Need | None = model.fusestream_reckoning.need
    ours = None if need is None else need(model.diffusion_model, shape, model.get_dtype_inference())
    return stock if ours is None else ours * (stock / bare if bare else 1.0)


def attach(patcher: Any, need: Need | None = None) -> None:
    """Let the model of this streaming patcher, and of its clones, be reckoned with, measured and retried. need: its family's."""
    model = patcher.model
    mix(model, _Reckoned, **{RECKONING: Reckoning(need)})
    wrap(patcher, WRAPPER, step)


def step(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """One call of the model, as stock's wrappers have it."""
    call = ModelCall(executor, args, kwargs)
    x, stream = call.x, call.stream
    reckoning: Reckoning = call.model.fusestream_reckoning
    if x.numel() < reckoning.tight:
        tried = _tried(stream)
        try:
            with _leaving(RESERVE, x.device):
                return _measured(call)
        except torch.OutOfMemoryError:
            if _tried(stream) == tried:
                reckoning.tight = x.numel()  # or every step would be computed twice
        # Here, behind the `except`, the frames that failed are gone, and their tensors with them.
        _give_back_graphs(x)
        _tidy(x)
        logging.info("FuseStream: the step needs some of the VRAM that is left to others; it runs again.")
    try:
        return _measured(call)
    except torch.OutOfMemoryError as error:
        first = str(error)
    _give_back_graphs(x)
    held = stream.held
    freed = stream.shrink(held - stream.least)
    _tidy(x)
    logging.warning(
        "FuseStream: out of VRAM (%s). The weights give back %.2f GiB; the step runs again.",
        first.split(". GPU", maxsplit=1)[0],
        freed / vram.GIB,
    )
    try:
        return _measured(call)
    except torch.OutOfMemoryError as error:
        raise _too_little(stream, held, str(error) or first) from None


def _give_back_graphs(x: torch.Tensor) -> None:
    freed = vram.pool_of(x.device).release_graphs()
    if freed:
        logging.info("FuseStream: out of VRAM; what was captured of short calls gives back %.2f GiB.", freed / vram.GIB)


def _tidy(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _leaving(nbytes: int, device: torch.device) -> Iterator[None]:
    """For this time torch takes no more than leaves this much of the card free."""
    if device.type != "cuda":
        yield
        return
    free, total = torch.cuda.mem_get_info(device)
    most = _counted("reserved_bytes", "current", device) + max(free - nbytes, 0)
    known = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # torch 2.8 and newer
    before = 1.0 if known is None else known(device)
    torch.cuda.set_per_process_memory_fraction(min(before, most / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def _measured(call: ModelCall) -> Any:
    x = call.x
    if not x.is_cuda:
        return call.run()
    before, tried = _counted("allocated_bytes", "current", x.device), _tried(call.stream)
    torch.cuda.reset_peak_memory_stats(x.device)
    out = call.run()
    took = _counted("allocated_bytes", "peak", x.device) - before
    reckoning: Reckoning = call.model.fusestream_reckoning
    reckoned = own_need(call.model, x.shape, 0.0, 0.0)
    if _tried(call.stream) == tried:
        reckoning.measured(took, reckoned)
    elif took > reckoning.ratio * reckoned:
        # This says nothing about the next step, and the allocator is left with pieces of it in between the tensors.
        torch.cuda.empty_cache()
    return out


def _tried(stream: Stream) -> tuple[int, int]:
    """Counts of what takes memory that the next step does not: kernels that are slower and may need more than those that will be
    chosen, and calls that are captured, whose inputs and results lie there twice."""
    return tuner().trials, 0 if stream.graphs is None else stream.graphs.attempts


def _counted(what: str, which: str, device: torch.device) -> int:
    """Bytes by torch's count. `torch.cuda.memory_allocated` and its kin make a list of all there is to know first, every
    time."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    return int(stats[what]["all"][which]) if stats else 0  # torch counts nothing before its first tensor on the card


def _too_little(stream: Stream, held: int, message: str) -> vram.OutOfVram:
    return vram.OutOfVram(
        f"VRAM is too little for this video's activations, with the model's weights, which held {held / vram.GIB:.2f} GiB, "
        f"down to the {stream.least / vram.GIB:.2f} they need: {message.splitlines()[0] if message else 'out of memory'} "
        "Make the video smaller or shorter, or close what else uses the card."
    )
