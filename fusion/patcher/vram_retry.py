"""Measures the VRAM of each call of a model, and makes room for a call that runs out of it.

A captured short step (`graphs/calls.py`) lives in the room that was estimated for the step's
activations, because they are made in it. It is in the device's budget beside the weights, stays
under the limit below, and is given back first.

While a step runs, torch's allocator may not grow into the last part of the card: left alone it
keeps unused memory until nothing is free, and desktop and driver need some, too. `vram_estimate.py`
says how much that is, and what yields on a small card. A step that still runs out of VRAM is
computed again: with all of the card, in small pieces where feed-forwards are cut; after the weights
have given back all except their window; with blocks in parts; and if that is too little for a batch
of prompts, one by one. Each of these is only reached if the estimate was wrong, or there was none.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import comfy.model_management
import comfy.patcher_extension
import torch

from ...kernels_cuda.tune.autotune import tuner
from ..base.allocator_limit import bounded
from ..base.hooks import PIECES, STEP
from ..stream import vram_pool
from ..stream.block_stream import BlockStream
from ..stream.card_sync import AnotherFailed
from ..stream.less_vram import with_ever_less
from ..stream.model_call import ModelCall, wrap
from .vram_estimate import RESERVE, SMALL_PIECES, Reckoning, own_reserve, reckon


def attach(patcher: Any, reckoning: Reckoning) -> None:
    """Let calls of this streaming patcher's model, and of its clones, be estimated so, measured and
    retried."""
    reckon(patcher.model, reckoning)
    wrap(patcher, STEP, step)
    patcher.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.CALC_COND_BATCH, STEP, batches)


def batches(executor: Any, model: Any, conds: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """All prompts of a step, as stock's wrappers call it: in batches that fit, as far as can be
    estimated."""
    reckoning: Reckoning = model.fusestream_reckoning
    before, is_for_now = reckoning.apart, False
    try:
        while True:
            reckoning.failed, trials = 0, tuner().trials
            try:
                with reckoning.batching():
                    return executor(model, conds, x, *args, **kwargs)
            except vram_pool.OutOfVram:
                if not x.numel() < reckoning.failed < reckoning.apart:
                    raise
            # Kernels that were tried may have taken more memory than the chosen ones, so the next
            # step tries a batch once more.
            is_for_now = is_for_now or (tuner().trials != trials and reckoning.chances > 0)
            reckoning.apart = reckoning.failed
            logging.info("FuseStream: the prompts do not fit into one batch; they are computed one by one.")
    finally:
        if is_for_now:
            reckoning.apart, reckoning.chances = before, reckoning.chances - 1


def step(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """One call of the model, as stock's wrappers call it. Other calls of the same model wait,
    because a thread that ComfyUI gave up on may still be in one."""
    call = ModelCall(executor, args, kwargs)
    with call.stream.calling:
        together = call.stream.together
        try:
            return _step(call)
        except BaseException as error:
            if together is None:
                raise
            if not isinstance(error, AnotherFailed):
                together.failed(error)
        assert together.error is not None
        raise together.error


def _step(call: ModelCall) -> Any:
    x, stream = call.x, call.stream
    reckoning: Reckoning = call.model.fusestream_reckoning
    free, own = _free(x.device), own_reserve()
    need = reckoning.own_need(call.model, x.shape)
    if need is not None and reckoning.is_short(need, free):
        need = _in_small_pieces(call, reckoning, need)
    if x.numel() < reckoning.tight:
        tried = _tried(stream)
        left = max(RESERVE, own) if need is None else reckoning.left_alone(need, free)
        try:
            with _leaving(left, x.device):
                return _measured(call, need or 0.0)
        except torch.OutOfMemoryError:
            if _tried(stream) == tried:
                reckoning.tight = x.numel()  # so that not every step is computed twice
        # Here, after the `except`, the frames that failed are gone, and their tensors with them.
        _give_back_graphs(x)
        _tidy(x)
        logging.info("FuseStream: the step needs some of the VRAM that is left to others; it runs again.")
    need = _in_small_pieces(call, reckoning, need)
    held, most = stream.residency.held, need or 0.0

    def run() -> Any:
        with _leaving(own, x.device):
            return _measured(call, most)

    try:
        return with_ever_less(stream, run, "the step", partial(_give_back_graphs, x))
    except torch.OutOfMemoryError as error:
        said = str(error)
    reckoning.failed = x.numel()
    raise _too_little(stream, held, said)


def _in_small_pieces(call: ModelCall, reckoning: Reckoning, need: float | None) -> float | None:
    """Let a step compute in small pieces; returns what it needs then, where that was known."""
    if not reckoning.saves or call.options.get(PIECES) == SMALL_PIECES:
        return need
    call.set_option(PIECES, SMALL_PIECES)
    return None if need is None else need - reckoning.saves


def _give_back_graphs(x: torch.Tensor) -> int:
    """Give back the captured calls of all models. Returns the bytes."""
    freed = vram_pool.pool_of(x.device).release_graphs()
    if freed:
        logging.info(
            "FuseStream: out of VRAM; what was captured of short calls gives back %.2f GiB.", freed / vram_pool.GIB
        )
    return freed


def _tidy(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.empty_cache()


def _free(device: torch.device) -> float:
    """Bytes for a step beside the weights: free on the card, and unused in torch's allocator."""
    if device.type != "cuda":
        return float(comfy.model_management.get_free_memory(device))
    kept = _counted("reserved_bytes", "current", device) - _counted("active_bytes", "current", device)
    return torch.cuda.mem_get_info(device)[0] + kept


@contextlib.contextmanager
def _leaving(nbytes: int, device: torch.device) -> Iterator[None]:
    """While active, torch leaves this much of the card free."""
    if device.type != "cuda":
        yield
        return
    free, _ = torch.cuda.mem_get_info(device)
    with bounded(_counted("reserved_bytes", "current", device) + max(free - nbytes, 0), device):
        yield


def _measured(call: ModelCall, reckoned: float) -> Any:
    """One try. reckoned: bytes by the family's estimate; 0: it has none."""
    x = call.x
    if not x.is_cuda:
        return call.run()
    before, tried = _counted("allocated_bytes", "current", x.device), _tried(call.stream)
    torch.cuda.reset_peak_memory_stats(x.device)
    out = call.run()
    took = _counted("allocated_bytes", "peak", x.device) - before
    reckoning: Reckoning = call.model.fusestream_reckoning
    reckoning.is_choosing = _tried(call.stream) != tried
    if not reckoning.is_choosing:
        reckoning.measured(took, reckoned)
    elif took > reckoning.ratio * reckoned:
        # This says nothing about the next step, and leaves pieces between the tensors in the
        # allocator.
        torch.cuda.empty_cache()
    return out


def _tried(stream: BlockStream) -> tuple[int, int]:
    """Counts of events whose memory the next step does not need: trials of kernels that are slower
    and may need more than the chosen ones, and captures of calls, whose inputs and results exist
    twice."""
    return tuner().trials, 0 if stream.residency.graphs is None else stream.residency.graphs.attempts


def _counted(what: str, which: str, device: torch.device) -> int:
    """Bytes by torch's count. `torch.cuda.memory_allocated` and the like build a list of all
    counters each time."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    # torch counts nothing before the first tensor on the card.
    return int(stats[what]["all"][which]) if stats else 0


def _too_little(stream: BlockStream, held: int, message: str) -> vram_pool.OutOfVram:
    return vram_pool.OutOfVram(
        f"VRAM is too little for this video's activations, with the model's weights, which held "
        f"{held / vram_pool.GIB:.2f} GiB, down to the {stream.residency.least / vram_pool.GIB:.2f} they need: "
        f"{message.splitlines()[0] if message else 'out of memory'} "
        "Make the video smaller or shorter, or close what else uses the card."
    )
