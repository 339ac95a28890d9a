"""How the VRAM that is free is divided between a model's weights, its step, and everybody else.

Stock reckons a step by the area of the latent and the model's width, for its own way of computing. Where a family's blocks are
ours, the family reckons: they may need less, so more of the model may stay on the card, and prompts are batched more often. The
reckoning is multiplied by the largest ratio that was measured, so that the next run knows better.

What is free is too little for everything on a small card, and yields in this order:

    residents    weights that could stay on the card; they stream instead
    the reserve  what is left to the desktop. It is a wish: `--reserve-vram` is none, and never yields
    pieces       of what lies between two products: a few tokens at a time, in more launches
    the window   blocks come in parts instead of whole (`stream/segments.py`)
    the batch    of prompts: apart they bring the weights over the bus once for each
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import comfy.cli_args
import comfy.model_management
import torch

from ...kernels_cuda.ops.matmul.mlp import CHUNK_BYTES
from ..base.hooks import RECKONING
from ..base.subclassing import mix
from ..stream import vram_pool

SMALL_PIECES = 64 * 2**20  # what these become: of 14B 2300 tokens, which still fill a large card
CHANCES = (
    2  # steps of a sampling that may have computed prompts apart, because kernels were being chosen, before all do
)
RESERVE = 19 * 2**26  # bytes of the card that a step leaves alone if it can: the desktop's, and code the driver loads
TRYING = 11 * 2**24  # what kernels take that are tried in a first step, beyond those that are chosen
STOCK_ASKS = 1.5  # stock batches prompts where more than so many times what it was told that they need is free
BATCHED_WHERE = STOCK_ASKS + 0.01
# What lies in between before the blocks begin leaves gaps that fit a tensor less than they could (of Wan's six, one: its first
# convolution's result, in fp32). It is no need, but where weights would take that room a step runs out of VRAM.
GAP = 1 + 1 / 6

Need = Callable[[Any, Sequence[int], torch.dtype], float | None]


def own_reserve() -> int:
    """Bytes that are never taken, even where a step fails for it: those of `--reserve-vram`. On Windows stock's own, too: beyond
    the card the driver takes RAM in place of VRAM, and a step becomes many times as slow instead of failing."""
    mm = comfy.model_management
    asked = comfy.cli_args.args.reserve_vram is not None or mm.WINDOWS
    return int(mm.extra_reserved_memory()) if asked else 0


class Reckoning:
    """Of one model. Kept by the model, and so shared by its clones, as the weights are."""

    def __init__(self, need: Need | None = None, *, in_pieces: bool = False) -> None:
        """need: the family's, bytes for a latent of this shape and type; None: stock's blocks will compute. in_pieces: whether the
        family's blocks look at `PIECES`."""
        self.need = need
        self.saves = CHUNK_BYTES - SMALL_PIECES if in_pieces else 0  # bytes of the need, where pieces are small
        self.ratio = 1.0  # measured over reckoned; never less than 1
        self.asked: deque[int] = deque([0], maxlen=2)  # before it loads, stock asks for all prompts and then for one
        self.is_ours = False  # whether what it was told last was the family's reckoning
        self.is_alone = False  # whether the sampling at hand computes one prompt: stock asks for a batch all the same
        self.is_batching = False  # whether stock is asking which prompts to batch
        self.tight = math.inf  # a latent of so many elements has run out of VRAM while the reserve was left alone
        self.others: Sequence[
            Reckoning
        ] = ()  # of other cards' models, while stock asks for a sampling with all of them
        self.failed = 0  # elements of the latent that no yielding has found VRAM for
        # In this sampling prompts are computed apart whose latents have so many elements together.
        self.apart = math.inf
        self.chances = CHANCES
        self.is_choosing = True  # whether the last step tried kernels: the next one may

    def measured(self, nbytes: int, reckoned: float) -> None:
        """Take note of what a step really needed."""
        if reckoned > 0 and nbytes > self.ratio * reckoned:
            self.ratio = nbytes / reckoned
            logging.info(
                "FuseStream: a step took %.2f GiB of VRAM beside the weights, %.2f were reckoned with",
                nbytes / vram_pool.GIB,
                reckoned / vram_pool.GIB,
            )

    def own_need(self, model: Any, shape: Sequence[int]) -> float | None:
        """Bytes for a latent of this shape by the family; None: it has no reckoning of it."""
        return None if self.need is None else self.need(model.diffusion_model, shape, model.get_dtype_inference())

    # ------------------------------------------------------------------------------------------------------ a step's

    def is_short(self, need: float, free: float) -> bool:
        """Whether a step that needs so much has to compute in smaller pieces, where so much is free for it."""
        return self.saves > 0 and free - GAP * self.ratio * need < TRYING + own_reserve()

    def left_alone(self, need: float, free: float) -> int:
        """Bytes that a step with this need leaves of what is free for it: the reserve, or what there is of it. Gaps are no need."""
        own = own_reserve()
        return int(min(max(RESERVE, own), max(own, free - self.ratio * need - TRYING)))

    # ----------------------------------------------------------------------------------------------- stock's question

    def told(self, nbytes: float, elements: int, *, is_ours: bool) -> float:
        """What stock is told that a latent of so many elements needs, of the bytes that were reckoned with.

        Before it loads a model it leaves that much of the card. While it asks which prompts to batch, its own margin is half as
        much again: right for its own reckoning, and too much for a family's, beside which the reserve would stay whole."""
        needed = self.ratio * nbytes
        if not self.is_batching:
            for one in (self, *self.others):  # a sampling begins
                one.apart, one.chances, one.is_ours = math.inf, CHANCES, is_ours
                one.asked.append(int(needed))
            return needed
        if elements >= self.apart:
            return math.inf
        trying = TRYING if self.is_choosing else 0
        return (self._least(needed) + trying + own_reserve()) / STOCK_ASKS if is_ours else needed

    @contextmanager
    def batching(self) -> Iterator[None]:
        """For this time stock asks which prompts to batch."""
        self.is_batching = True
        try:
            yield
        finally:
            self.is_batching = False

    @contextmanager
    def split(self, others: Sequence[Reckoning], *, is_alone: bool) -> Iterator[None]:
        """For this time stock asks what a sampling needs whose prompts go to several cards: of the others' models it asks nothing,
        and they need as much. is_alone: each card computes one prompt."""
        before, self.others = self.is_alone, others
        for one in (self, *others):
            one.is_alone = is_alone or before
        try:
            yield
        finally:
            self.others, self.is_alone = (), before

    # ------------------------------------------------------------------------------------------------- the weights'

    def room(self, room: float, free: float, narrow: int, whole: int, most: int) -> float:
        """Bytes for the blocks' weights: all are `most`, they pass through in `whole`, and in parts in `narrow`.

        room, free  what stock would give them, and what is free for weights and step together

        Where part of the model streams anyway, prompts that can be one batch come before residents, and before the reserve: a
        batch brings the weights over the bus once instead of twice.
        """
        mm, own = comfy.model_management, own_reserve()
        wish: float = max(RESERVE + TRYING, own + TRYING, mm.minimum_inference_memory())
        kept = own + TRYING if self.is_ours else wish
        one, batch = min(self.asked), max(self.asked)
        room = min(room, free - GAP * one - wish)
        if room >= most or mm.vram_state is mm.VRAMState.NO_VRAM:
            return room
        both = batch, 0.0 if self.is_ours else BATCHED_WHERE * batch
        for need, asked in ((one, 0.0),) if self.is_alone else (both, (one, 0.0)):
            beside = free - max(asked, GAP * need + wish)
            if beside >= whole:
                return max(whole, min(room, beside))
            if free - max(asked, self._least(need) + kept) >= whole:
                return whole
            if free - max(asked, self._least(need) + kept) >= narrow:
                return max(narrow, free - max(asked, self._least(need) + wish))
        return narrow

    def _least(self, needed: float) -> float:
        """Bytes with which a step that needs so much gets by, where it computes in smaller pieces."""
        return GAP * (needed - self.ratio * self.saves) if self.is_ours else GAP * needed


class _Reckoned:
    """What the class of a streamed model is mixed with: stock asks a model how much a latent takes."""

    def memory_required(self, input_shape: Sequence[int], cond_shapes: Mapping[str, Any] | None = None) -> float:
        model: Any = self
        reckoning: Reckoning = model.fusestream_reckoning
        stock: float = super().memory_required(input_shape, cond_shapes=cond_shapes or {})  # type: ignore[misc]
        bare: float = super().memory_required(input_shape)  # type: ignore[misc]
        ours = reckoning.own_need(model, input_shape)
        # What is joined to the latent (references, poses) counts as stock counts it.
        needed = stock if ours is None else ours * (stock / bare if bare else 1.0)
        return reckoning.told(needed, math.prod(input_shape), is_ours=ours is not None)


def reckon(model: Any, reckoning: Reckoning) -> None:
    """Let a stock model be reckoned with so."""
    mix(model, _Reckoned, **{RECKONING: reckoning})
