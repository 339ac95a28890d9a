"""How free VRAM is divided between a model's weights, its step, and other programs.

Stock estimates a step by the area of the latent and the model's width, for its own way of
computing. If a family's blocks are ours, the family estimates: they may need less, so more of the
model may stay on the card, and prompts are batched more often. The estimate is multiplied by the
largest measured ratio, so that the next run knows better.

On a small card free VRAM does not suffice for everything. These yield, in this order:

    residents    weights that could stay on the card; they stream instead
    the reserve  left to the desktop. It is a wish; a reserve set by `--reserve-vram` never yields
    pieces       of hidden values: a few tokens at a time, in more launches
    the window   blocks come in parts instead of whole (`stream/segments.py`)
    the batch    of prompts: apart, they bring the weights over the bus once for each prompt
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

# Bytes of a small piece: 2300 tokens of 14B, which still fill a large card.
SMALL_PIECES = 64 * 2**20
# Steps of a sampling that may compute prompts apart while kernels are being chosen, before all steps
# do.
CHANCES = 2
# Bytes of the card that a step leaves free if it can: for the desktop, and for code that the driver
# loads.
RESERVE = 19 * 2**26
# Bytes that kernels take while they are tried in a first step, beyond those that are chosen.
TRYING = 11 * 2**24
STOCK_ASKS = 1.5  # stock batches prompts if more than so many times their stated need is free
BATCHED_WHERE = STOCK_ASKS + 0.01
# Tensors made before the blocks leave gaps in torch's memory that hold less than their size (for
# Wan one of the step's six tensors less, because of its first convolution's fp32 result). Gaps are
# no need, but if weights took that room, a step would run out of VRAM.
GAP = 1 + 1 / 6

Need = Callable[[Any, Sequence[int], torch.dtype, int], float | None]


def own_reserve() -> int:
    """Bytes that are never taken, even if a step fails for it: those of `--reserve-vram`. On
    Windows also stock's own reserve, because beyond the card the driver uses RAM as VRAM, and a
    step becomes many times as slow instead of failing."""
    mm = comfy.model_management
    asked = comfy.cli_args.args.reserve_vram is not None or mm.WINDOWS
    return int(mm.extra_reserved_memory()) if asked else 0


class Reckoning:
    """The estimates of one model. The model has it, so its clones share it like the weights."""

    def __init__(self, need: Need | None = None, *, in_pieces: bool = False) -> None:
        """need: the family's, bytes for a latent of this shape and type, with hidden values of so many
        bytes at a time; None: stock's blocks will compute. in_pieces: whether the family's blocks,
        or stock's feed-forwards, obey `PIECES`."""
        self.need = need
        # Bytes that small pieces save; of a family's blocks for the latent that was last asked about.
        self.saves: float = CHUNK_BYTES - SMALL_PIECES if in_pieces else 0
        self.in_pieces = in_pieces
        self.ratio = 1.0  # largest ratio of measured to estimated bytes, at least 1
        # Stock's last two questions: before loading, for all prompts and then for one.
        self.asked: deque[int] = deque([0], maxlen=2)
        self.is_ours = False  # whether the last answer was the family's estimate
        # Whether each step computes one prompt; stock asks for a batch all the same.
        self.is_alone = False
        self.is_batching = False  # whether stock is asking which prompts to batch
        # Elements of a latent from which on a step ran out of VRAM with the reserve left free.
        self.tight = math.inf
        # Those of other cards' models, while stock asks for a sampling with all of them.
        self.others: Sequence[Reckoning] = ()
        self.failed = 0  # elements of the latent for which nothing that yields made enough room
        # Elements of the prompts' latents together from which on this sampling computes prompts
        # apart.
        self.apart = math.inf
        self.chances = CHANCES
        self.is_choosing = True  # whether the last step tried kernels, so that the next one may

    def measured(self, nbytes: int, reckoned: float) -> None:
        """Note what a step really needed."""
        if reckoned > 0 and nbytes > self.ratio * reckoned:
            self.ratio = nbytes / reckoned
            logging.info(
                "FuseStream: a step took %.2f GiB of VRAM beside the weights, %.2f were reckoned with",
                nbytes / vram_pool.GIB,
                reckoned / vram_pool.GIB,
            )

    def own_need(self, model: Any, shape: Sequence[int]) -> float | None:
        """The family's bytes for a latent of this shape; None: it has no estimate."""
        if self.need is None:
            return None
        asked = model.diffusion_model, shape, model.get_dtype_inference()
        found = self.need(*asked, CHUNK_BYTES)
        if self.in_pieces and found is not None:
            self.saves = found - (self.need(*asked, SMALL_PIECES) or 0.0)
        return found

    # ------------------------------------------------------------------------------------------------------ a step's

    def is_short(self, need: float, free: float) -> bool:
        """Whether a step with this need has to compute in smaller pieces, with so much free for
        it."""
        return self.saves > 0 and free - GAP * self.ratio * need < TRYING + own_reserve()

    def left_alone(self, need: float, free: float) -> int:
        """Bytes that a step with this need leaves free: the reserve, or as much of it as there is.
        Gaps are not counted."""
        own = own_reserve()
        return int(min(max(RESERVE, own), max(own, free - self.ratio * need - TRYING)))

    # ----------------------------------------------------------------------------------------------- stock's question

    def told(self, nbytes: float, elements: int, *, is_ours: bool) -> float:
        """The answer to stock's question how much a latent of so many elements needs. nbytes: the
        estimate.

        Before stock loads a model it leaves that much of the card free. While it asks which prompts
        to batch, it adds half as much again: right for its own estimate, and too much for a
        family's, beside which the whole reserve would stay free.
        """
        needed = self.ratio * nbytes
        if not self.is_batching:
            for one in (self, *self.others):  # a sampling begins
                one.apart, one.chances, one.is_ours = math.inf, CHANCES, is_ours
                one.saves = self.saves
                one.asked.append(int(needed))
            return needed
        if elements >= self.apart:
            return math.inf
        trying = TRYING if self.is_choosing else 0
        return (self._least(needed) + trying + own_reserve()) / STOCK_ASKS if is_ours else needed

    @contextmanager
    def batching(self) -> Iterator[None]:
        """While active, stock is asking which prompts to batch."""
        self.is_batching = True
        try:
            yield
        finally:
            self.is_batching = False

    @contextmanager
    def split(self, others: Sequence[Reckoning], *, is_alone: bool) -> Iterator[None]:
        """While active, stock asks for the need of a sampling on several cards. It does not ask the
        others' models, which need as much. is_alone: each card computes one prompt."""
        before, self.others = self.is_alone, others
        for one in (self, *others):
            one.is_alone = is_alone or before
        try:
            yield
        finally:
            self.others, self.is_alone = (), before

    # ------------------------------------------------------------------------------------------------- the weights'

    def room(self, room: float, free: float, narrow: int, whole: int, most: int) -> float:
        """Bytes for the blocks' weights, of which there are `most`; blocks pass whole through
        `whole` bytes, and in parts through `narrow`.

        room, free  stock's bytes for the weights, and the free bytes for weights and step together

        If part of the model streams in any case, a batch of prompts comes before residents and
        before the reserve, because it brings the weights over the bus once instead of twice.
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
        """Bytes with which a step that needs so much gets by, in smaller pieces if they are
        possible."""
        return GAP * (needed - self.ratio * self.saves) if self.is_ours else GAP * needed


class _Reckoned:
    """Mixed into the class of a streamed model, which stock asks how much a latent takes."""

    def memory_required(self, input_shape: Sequence[int], cond_shapes: Mapping[str, Any] | None = None) -> float:
        model: Any = self
        reckoning: Reckoning = model.fusestream_reckoning
        stock: float = super().memory_required(input_shape, cond_shapes=cond_shapes or {})  # type: ignore[misc]
        bare: float = super().memory_required(input_shape)  # type: ignore[misc]
        ours = reckoning.own_need(model, input_shape)
        # Parts joined to the latent (references, poses) count as stock counts them.
        needed = stock if ours is None else ours * (stock / bare if bare else 1.0)
        return reckoning.told(needed, math.prod(input_shape), is_ours=ours is not None)


def reckon(model: Any, reckoning: Reckoning) -> None:
    """Let a stock model answer with these estimates."""
    mix(model, _Reckoned, **{RECKONING: reckoning})
