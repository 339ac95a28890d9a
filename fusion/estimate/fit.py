"""Whether a latent fits beside a model's weights, by the reckoning that the loaders go by (`stream/step.py`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import comfy.model_management
import torch

from ...memory import least_budget, make_plan
from ..stream.step import RESERVE
from ..stream.stream import Stream

RECKONING = "fusestream_reckoning"  # where a model has its own
STOCK_ASKS = 1.5  # stock batches prompts where more than so many times what they need is free


class Verdict(Enum):
    WHOLE = "fits, all of the model stays"
    STREAMS = "fits, weights stream"
    TIGHT = "fits, and takes what the desktop should have"
    NOT = "does not fit"


@dataclass(frozen=True)
class Fit:
    """All in bytes of the device.

    free         what there is for the model, its step and the reserve: what is free, what the model holds, and what ComfyUI
                 unloads for it, of which the last is `others`
    rest         of the model, what does not stream
    model        all of the blocks; held: what they get; window: of this what blocks pass through
    stays, passes  how many blocks stay, and how many pass through
    activations  of a step, computed in so many forwards; least: of one prompt alone
    lacks        what is missing, where it does not fit
    """

    verdict: Verdict
    free: int
    others: int
    rest: int
    model: int
    held: int
    window: int
    stays: int
    passes: int
    activations: int
    least: int
    forwards: int
    reserve: int
    lacks: int = 0


def fit_of(patcher: Any, shape: Sequence[int], prompts: int, *, is_automatic: bool = False) -> Fit:
    """Of a streamed MODEL, for a latent of this shape. prompts: of each step. is_automatic: as if its vram_budget were."""
    stream: Stream = patcher.stream
    device = torch.device(patcher.load_device)
    rest = patcher._rest_size()
    others = _others(patcher, device)
    free = int(patcher.get_free_memory(device)) + patcher.loaded_size() + others
    with _asked(patcher.model, shape, prompts) as (one, all_prompts):
        room = _room(patcher, free)
    sizes = [layer.nbytes for layer in stream.layers]
    bottom = max(stream.least, least_budget(sizes))
    held = int(max(bottom, min(room, stream.most if is_automatic else stream.wanted)))
    plan = make_plan(sizes, held)
    forwards = 1 if prompts == 1 or STOCK_ASKS * all_prompts < free - rest - plan.footprint else prompts
    activations = int(one if forwards == prompts else all_prompts)
    needed = rest + bottom + int(one)
    verdict = _verdict(needed, free, streams=bool(plan.streamed))
    return Fit(
        verdict, free, others, rest, sum(sizes), plan.footprint, plan.window_bytes, len(plan.resident), len(plan.streamed),
        activations, int(one), forwards, RESERVE, max(0, needed - free),
    )  # fmt: skip


def _verdict(needed: int, free: int, *, streams: bool) -> Verdict:
    if needed > free:
        return Verdict.NOT
    if needed + RESERVE > free:
        return Verdict.TIGHT
    return Verdict.STREAMS if streams else Verdict.WHOLE


def _others(patcher: Any, device: torch.device) -> int:
    """Bytes of the device that other models hold, which ComfyUI unloads for this one."""
    loaded = [one for one in comfy.model_management.current_loaded_models if one.model is not None]
    theirs = {
        id(one.model.model): one for one in loaded if one.model.model is not patcher.model and one.device == device
    }
    return sum(int(one.model_loaded_memory()) for one in theirs.values())


@contextmanager
def _asked(model: Any, shape: Sequence[int], prompts: int) -> Iterator[tuple[float, float]]:
    """As stock asks before it loads: for all prompts, and for one. Yields the bytes for one, and for all that there are."""
    reckoning = getattr(model, RECKONING)
    before = reckoning.is_alone
    reckoning.is_alone = prompts == 1
    try:
        pair = float(model.memory_required([2 * shape[0], *shape[1:]]))
        one = float(model.memory_required(list(shape)))
        yield one, one if prompts == 1 else pair
    finally:
        reckoning.is_alone = before


def _room(patcher: Any, free: int) -> float:
    """Bytes for the blocks if so much were free: asked of a clone, which is told so."""
    asked = patcher.clone()
    asked.get_free_memory = lambda _device: free - patcher.loaded_size()
    room: float = asked._room(math.inf)
    return room
