"""Whether a latent fits beside a model's weights, by the estimate that the loaders use
(`patcher/vram_estimate.py`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import comfy.model_management
import torch

from ...memory import plan_of
from ..base.hooks import RECKONING
from ..patcher.vram_estimate import RESERVE, STOCK_ASKS, Reckoning, own_reserve
from ..stream.block_stream import BlockStream
from ..stream.segments import chosen


class Verdict(Enum):
    WHOLE = "fits, all of the model stays"
    STREAMS = "fits, weights stream"
    TIGHT = "fits, and takes what the desktop should have"
    NOT = "does not fit"


@dataclass(frozen=True)
class Fit:
    """All fields are bytes of the device, unless they say otherwise.

    free         for the model, its step and the reserve: what is free, what the model holds, and
                 `others`, what ComfyUI unloads for it
    rest         the part of the model that does not stream
    sizes        of the blocks in order, or of their parts if not even two blocks fit
    stored       share of `sizes` that crosses the bus
    held         what the blocks get; window: the part of it that blocks pass through
    kept         in addition, for keys and values of texts. Weights that see only texts then pass
                 once for a prompt, and are not among `sizes`
    stays, passes  how many blocks stay, and how many pass through
    activations  of a step, computed in `forwards` forwards; least: of one prompt alone, in small
                 pieces
    lacks        what is missing, if it does not fit
    """

    verdict: Verdict
    free: int
    others: int
    rest: int
    sizes: tuple[int, ...]
    stored: float
    parts: bool
    held: int
    window: int
    stays: int
    passes: int
    activations: int
    least: int
    forwards: int
    reserve: int
    lacks: int = 0
    kept: int = 0

    @property
    def is_lacking(self) -> bool:
        """Whether it does not fit, or takes what the desktop should have."""
        return self.verdict in (Verdict.NOT, Verdict.TIGHT)

    @property
    def model(self) -> int:
        """Bytes of all blocks."""
        return sum(self.sizes)

    @property
    def taken(self) -> int:
        """Bytes taken of `free`."""
        return self.rest + self.held + self.kept + self.activations


def fit_of(patcher: Any, shape: Sequence[int], prompts: int, *, is_automatic: bool = False) -> Fit:
    """The fit of a streamed MODEL for a latent of this shape. prompts: of each step. is_automatic:
    as if its vram_budget were automatic."""
    stream: BlockStream = patcher.stream
    reckoning: Reckoning = getattr(patcher.model, RECKONING)
    device = torch.device(patcher.load_device)
    rest, others = patcher._rest_size(), _others(patcher, device)
    free = int(patcher.get_free_memory(device)) + patcher.loaded_size() + others
    with _asked(patcher.model, shape, prompts) as (one, all_prompts, batched):
        room = _room(patcher, free)
    held = int(
        max(stream.residency.narrow, min(room, stream.residency.most if is_automatic else stream.residency.wanted))
    )
    segmentation = chosen(stream.residency.segmentations, device, held)
    layers = segmentation.paged
    plan = plan_of(layers, device, held - segmentation.text_bytes)
    often = [i for i in range(len(layers)) if i not in plan.rare]
    forwards = (
        1 if prompts == 1 or STOCK_ASKS * batched < free - rest - plan.footprint - segmentation.text_bytes else prompts
    )
    # saved by computing in smaller pieces
    saved = reckoning.ratio * reckoning.saves if reckoning.is_ours else 0.0
    needed = rest + stream.residency.narrow + int(one - saved) + own_reserve()
    return Fit(
        verdict=_verdict(needed, free, streams=bool(plan.streamed or plan.rare)),
        free=free,
        others=others,
        rest=rest,
        sizes=tuple(plan.sizes[i] for i in often),
        stored=sum(layers[i].stored_bytes for i in often) / max(1, sum(plan.sizes[i] for i in often)),
        parts=stream.residency.divides(segmentation),
        held=plan.footprint,
        kept=segmentation.text_bytes,
        window=plan.window_bytes,
        stays=len(plan.resident),
        passes=len(plan.streamed),
        activations=int(one if forwards == prompts else all_prompts),
        least=int(one - saved),
        forwards=forwards,
        reserve=RESERVE,
        lacks=max(0, needed - free),
    )


def _verdict(needed: int, free: int, *, streams: bool) -> Verdict:
    if needed > free:
        return Verdict.NOT
    if needed + RESERVE > free:
        return Verdict.TIGHT
    return Verdict.STREAMS if streams else Verdict.WHOLE


def _others(patcher: Any, device: torch.device) -> int:
    """Bytes of the device that other models hold, and that ComfyUI unloads for this one."""
    loaded = [one for one in list(comfy.model_management.current_loaded_models) if one.model is not None]
    theirs = {
        id(one.model.model): one for one in loaded if one.model.model is not patcher.model and one.device == device
    }
    return sum(int(one.model_loaded_memory()) for one in theirs.values())


@contextmanager
def _asked(model: Any, shape: Sequence[int], prompts: int) -> Iterator[tuple[float, float, float]]:
    """Ask for memory as stock does before it loads and when it batches. Yields bytes for one
    prompt, for all, and what stock is told when it batches."""
    reckoning: Reckoning = getattr(model, RECKONING)
    before, pair = reckoning.is_alone, [max(2, prompts) * shape[0], *shape[1:]]
    reckoning.is_alone = prompts == 1
    try:
        both = float(model.memory_required(pair))
        one = float(model.memory_required(list(shape)))
        with reckoning.batching():
            batched = float(model.memory_required(pair))
        yield one, one if prompts == 1 else both, batched
    finally:
        reckoning.is_alone = before


def _room(patcher: Any, free: int) -> float:
    """Bytes for the blocks if `free` bytes were free. Asks a clone that believes so."""
    asked = patcher.clone()
    asked._free = lambda _device: free - patcher.loaded_size()
    room: float = asked._room(math.inf)
    return room
