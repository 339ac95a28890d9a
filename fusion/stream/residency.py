"""How much of a model's weights is on the device, and in which segmentation.

`Residency` opens the pager when ComfyUI loads the model, resizes it when ComfyUI or another model
needs memory, and closes it when the model is unloaded. All bytes come out of the device's pool
(`vram_pool.py`): layers, kept texts (`text_kv.py`), memory of CUDA graphs. Nothing moves while a
block is in use (`in_use`): an unload waits for the end of the block, and everything else gets by
with what there is.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...gpu.streams import at
from ...memory import (
    Along,
    Checkpoint,
    FileChanged,
    KeptPages,
    Ledger,
    OverBudget,
    Pager,
    Parcels,
    RamBudget,
    open_pager,
    open_parcels,
)
from ..base.errors import WrongInput
from ..weights import ggml_blocks
from . import segments, vram_pool
from .segments import Segmentation
from .stability import Captured, Changes
from .text_kv import TextKV

GRAPHS = "VRAM of graphs"  # names in the ledger
TEXTS = "VRAM of texts"


class Residency:
    """One model's memory on a device."""

    def __init__(
        self,
        source: Checkpoint,
        segmentations: Sequence[Segmentation],
        device: torch.device,
        ceiling: int | None,
        loader: str,
    ) -> None:
        """ceiling: device bytes that the weights may take; None: as many as there are. loader: the
        node that messages name. The source is closed by `close`."""
        self.ledger = Ledger()
        self.segmentations = tuple(segmentations)
        self.segmentation = self.segmentations[0]
        self.texts = TextKV()
        self.ceiling = ceiling
        self.loader = loader
        self.source = source
        self.device = device  # where the model runs
        self.pager: Pager | None = None
        self.graphs: Captured | None = None  # CUDA graphs of the model's calls
        self.changes = Changes()
        self.pager_options: dict[str, Any] = {}  # for `open_pager`: a backend, a guard
        self.last_used = 0.0
        self.in_use = 0  # blocks that hold their weights now
        self.lock = threading.RLock()
        self.resegmented: Callable[[Segmentation], None] | None = None  # told the segmentation before
        self.along: Callable[[int], Along | None] | None = None  # what travels with the copy of a layer
        self._pool: vram_pool.Pool | None = None
        self._kept = KeptPages()
        self._unloads_later = False
        self._was_refused = False  # the file changed while it was read, so what came of it must come anew
        self.reopened = 0  # how often the file was opened anew: streamed weights may have other numbers since
        self._measure()
        if ceiling is not None and ceiling < self.narrow:
            gib = vram_pool.GIB
            least = math.ceil(self.narrow / gib * 1000) / 1000  # as a budget it is enough
            raise WrongInput(
                f"The weights need at least {least:.3f} GiB of VRAM to pass through, and vram_budget is "
                f"{ceiling / gib:.3f} GiB. Raise vram_budget in the {loader}."
            )

    def _measure(self) -> None:
        """The device bytes that weights can take.

        least   the blocks pass through, in the current segmentation
        most    all of them stay
        whole   whole blocks pass through
        narrow  the finest segments pass through
        """
        self.least, _ = self.segmentation.bounds(self.device)
        _, self.most = self.segmentation.with_texts.bounds(self.device)
        self.whole, _ = self.segmentations[0].bounds(self.device)
        self.narrow = min(one.bounds(self.device)[0] for one in self.plain)

    @property
    def plain(self) -> tuple[Segmentation, ...]:
        """The segmentations without kept texts."""
        return tuple(one for one in self.segmentations if one.base is None)

    @property
    def is_in_parts(self) -> bool:
        """Whether parts of blocks are paged."""
        return self.divides(self.segmentation)

    def divides(self, one: Segmentation) -> bool:
        """Whether a segmentation has parts of blocks."""
        return one.with_texts is not self.segmentations[0]

    @property
    def all_stay(self) -> bool:
        """Whether no layer passes through."""
        return self.pager is not None and not self.pager.plan.streamed

    # --------------------------------------------------------------------------------------------------- bytes

    @property
    def held(self) -> int:
        """Device bytes that are taken now, by weights and by kept texts."""
        return self.texts.nbytes + (self.pager.held_bytes if self.pager is not None else 0)

    @property
    def yielding(self) -> int:
        """Device bytes that a step which runs out of VRAM can have, because these weights pass
        through anyway."""
        streams = self.pager is not None and bool(self.pager.plan.streamed)
        return max(0, self.held - self.narrow) if streams else 0

    @property
    def wanted(self) -> int:
        """Device bytes that the model takes if it can: all of it, or its ceiling."""
        ceiling = vram_pool.whole(self.device) if self.ceiling is None else self.ceiling
        return max(self.narrow, min(self.most, ceiling))

    @property
    def beside(self) -> int:
        """Device bytes of CUDA graphs, beside the weights."""
        return self.graphs.nbytes if self.graphs is not None else 0

    def room(self, nbytes: int) -> bool:
        """Take device bytes for CUDA graphs or, if negative, give them back. False: the pool has
        not so many left."""
        if self._pool is None:
            return nbytes < 0
        try:
            if nbytes >= 0:
                self._pool.budget.take(nbytes)
            else:
                self._pool.budget.give_back(-nbytes)
        except OverBudget:
            return False
        self.ledger.hold(GRAPHS, nbytes)
        return True

    def release_graphs(self) -> int:
        """Drop the CUDA graphs, which are captured again if that pays. Returns their bytes. Never
        waits."""
        return 0 if self.graphs is None else self.graphs.release(waits=False)

    # ----------------------------------------------------------------------------------------------- more of it

    def load(self, device: torch.device, nbytes: float, segmentations: Sequence[Segmentation] | None = None) -> None:
        """Hold up to this many bytes on the device, and at least what the blocks need to pass
        through, in the best of these segmentations (default: all)."""
        among = self.segmentations if segmentations is None else segmentations
        with self.lock:
            if device != self.device or self._pool is None:
                self._move(device)
            assert self._pool is not None
            least = min(one.bounds(device)[0] for one in among)
            want = int(max(least, min(nbytes, self.wanted)))
            left = self._pool.make_room(self, want - self.held)
            budget = max(least, min(want, self.held + left))
            if self.in_use:
                return
            try:
                # The copying thread writes into this memory, which it could not if inference mode
                # had made it.
                with torch.inference_mode(False), torch.no_grad(), at(device):
                    self._fit(budget, among)
            except OverBudget as error:
                raise vram_pool.out_of_vram(error, self.loader) from error

    def ready(self) -> Pager:
        """The pager; opened as small as can be where the model was unloaded in the middle of a run."""
        if self.pager is None:
            if self._pool is None:
                raise RuntimeError("a streamed model runs before ComfyUI's memory management has loaded it")
            self.load(self.device, self.least, (self.segmentation,))
        assert self.pager is not None
        return self.pager

    def reordered(self, order: Sequence[int], *, grows: bool) -> None:
        """Page these blocks, in this order; all weights come anew. grows: use what is free now
        beside what was held, because a prompt that has been read gave its memory back."""
        held, most, free = self.held, self.most, vram_pool.free(self.device)
        with self._kept.returning():
            self.unload()
            self.segmentation.order.become(order)
            self._measure()
            if held:
                # Where all weights were resident, blocks that join may be too: ComfyUI asks how
                # much is wanted only at the next load.
                joins = max(0, min(self.most - most, free)) if held >= most else 0
                more = max(joins, free) if grows else joins
                with contextlib.suppress(vram_pool.OutOfVram):  # the first block that runs raises it
                    self.load(self.device, held + more, (self.segmentation,))

    def restrict(self, segmentations: Sequence[Segmentation]) -> None:
        """Use only these segmentations from now on; all weights come anew."""
        held = self.held
        self.unload()
        self._become(segmentations[0])
        self.segmentations = tuple(segmentations)
        self._measure()
        self.load(self.device, held)

    def _fit(self, budget: int, among: Sequence[Segmentation]) -> None:
        """Take this much. A loaded model keeps its segmentation, because to bring all of it anew
        costs more than parts do; but where all weights may stay, the variant with kept texts is
        left."""
        may_stay = budget >= self.most and any(one is self.segmentation.base for one in among)
        if self.pager is not None and budget >= self.least and not may_stay:
            self._resize(self.pager, budget)
            return
        self.unload()
        self._become(segments.chosen(among, self.device, budget))
        kept = self._for_texts(budget)
        self.pager = self._open(budget - kept)
        self._take_room(kept)

    def _resize(self, pager: Pager, budget: int) -> None:
        kept = self._for_texts(budget)
        if not kept:
            self._give_room_back()
        pager.resize(budget - kept)
        self._take_room(kept)

    def _open(self, budget: int) -> Pager:
        assert self._pool is not None
        layers = self.segmentation.paged
        stored = sum(layer.stored_bytes for layer in layers)
        on_cpu = self.device.type == "cpu"  # where nothing is pinned
        ram = None if on_cpu else vram_pool.ram_for(stored - self._kept.lendable())
        pager = open_pager(
            self.source,
            layers,
            self._pool.budget,
            budget,
            self.device,
            ram=ram,
            ledger=self.ledger,
            kept=self._kept,
            **{"convert": ggml_blocks.convert, **self.pager_options},
        )
        self.changes.moved()
        self.segmentation.patching.factors.parcels = self._open_parcels(ram)
        pager.along = self.along
        return pager

    def _open_parcels(self, ram: RamBudget | None) -> Parcels | None:
        return None if ram is None else open_parcels(self.device, ram, self.ledger)

    def _become(self, segmentation: Segmentation) -> None:
        """Divide the model so from now on. No weight is loaded."""
        if segmentation is not self.segmentation:
            before, self.segmentation = self.segmentation, segmentation
            self.changes.moved()
            if self.resegmented is not None:
                self.resegmented(before)
            self._measure()

    def _move(self, device: torch.device) -> None:
        self.unload()
        self._kept.give_back()
        if self._pool is not None:
            self._pool.leave(self)
        self.device = device
        for one in self.segmentations:
            one.patching.forget_device()
        self._measure()
        self._pool = vram_pool.pool_of(device)
        self._pool.join(self)

    # ----------------------------------------------------------------------------------------------- less of it

    def shrink(self, nbytes: int) -> int:
        """Give back about this much: CUDA graphs first, then residents, kept texts, the window.
        Returns the bytes given back: none while a block runs, or while another thread loads or ends
        this model, because the caller must not wait."""
        if not self.lock.acquire(blocking=False):
            return 0
        try:
            if self.pager is None or self.in_use or nbytes <= 0:
                return 0
            captured = self.release_graphs()
            if self.beside:
                return captured  # another thread is about to replay a graph, whose weights must not move
            nbytes -= captured
            before = self.held
            if nbytes <= 0:
                return captured
            if before - nbytes >= self.least:
                with torch.inference_mode(False), torch.no_grad(), at(self.device):
                    self._resize(self.pager, before - nbytes)
            else:
                self.unload()
            return captured + before - self.held
        finally:
            self.lock.release()

    def keep_window(self) -> int:
        """Give back all but what the blocks need to pass through. Returns the bytes given back."""
        return self.shrink(self.held - self.least)

    def keep_parts(self) -> int:
        """Give back all but what the finest segments need to pass through. Returns the bytes given
        back."""
        before = self.held
        if self.pager is not None and before > self.narrow:
            self.load(self.device, self.narrow)
        return before - self.held

    def unload(self) -> None:
        """Give everything back: now, or at the end of the block that is running."""
        with self.lock:
            if self.in_use:
                self._unloads_later = True
                return
            self._unloads_later = False
            self.changes.moved()
            if self.graphs is not None:
                self.graphs.release()
            self._give_room_back()
            pager, self.pager = self.pager, None
            with at(self.device):
                if pager is not None:
                    pager.close()
                self.segmentation.patching.factors.close()
            self.segmentation.patching.forget_device()

    def unload_if_due(self) -> None:
        """A block is done: the unload that waited for it happens."""
        if self._unloads_later:
            self.unload()

    def give_ram_back(self) -> None:
        """Give back the pinned pages that are kept for the next load."""
        with self.lock:
            self._kept.give_back()

    def close(self) -> None:
        """The model is gone. Nothing can be loaded any more."""
        with self.lock:
            self.in_use = 0
            self.unload()
            self._kept.give_back()
            self.source.close()
            if self._pool is not None:
                self._pool.leave(self)
            self.resegmented = self.along = None
            self.segmentation = segments.by_blocks((), (), (), 0, ())
            self.segmentations = (self.segmentation,)

    # ------------------------------------------------------------------------------------------------- the file

    def refresh(self) -> None:
        """Before a prompt: open a file anew that was touched, or replaced and brought back. Raises
        `BadFile` where it is no longer the model's."""
        with self.lock:
            if self.in_use:
                return
            if self._was_refused or self.source.has_changed:
                self.unload()
                self._kept.give_back()
                self.source.reopen()
                self.reopened += 1
                self._was_refused = False

    def check(self) -> None:
        """Raises FileChanged where weights were used that the file did not hold. Waits for the
        device."""
        if self.pager is not None:
            with self.refusing():
                self.pager.check()

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Within this, a file that changed is noted: its weights come anew after the next
        `refresh`."""
        try:
            yield
        except FileChanged:
            self._was_refused = True
            raise

    # ----------------------------------------------------------------------------------------------- kept texts

    def _for_texts(self, budget: int) -> int:
        """Bytes of the budget for kept texts: all that is wanted or nothing, because the blocks
        come first."""
        nbytes = self.segmentation.text_bytes
        return nbytes if budget - nbytes >= self.least else 0

    def _take_room(self, nbytes: int) -> None:
        """Take the memory for kept texts. Where there is none, texts are computed at each call."""
        if not nbytes or self.texts.nbytes == nbytes:
            return
        assert self._pool is not None
        with contextlib.suppress(OverBudget, torch.OutOfMemoryError):
            self._pool.budget.take(nbytes)
            try:
                room = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            except BaseException:
                self._pool.budget.give_back(nbytes)
                raise
            self.texts.open(room, sum(1 for _ in self.segmentation.texts()))
            self.ledger.hold(TEXTS, nbytes)

    def _give_room_back(self) -> None:
        nbytes = self.texts.nbytes
        self.texts.close()
        if nbytes and self._pool is not None:
            self._pool.budget.give_back(nbytes)
            self.ledger.hold(TEXTS, -nbytes)
