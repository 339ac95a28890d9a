"""The streamed weights of one model, block by block: a block has its weights while it is called.

`enter(i)` waits for the pager and puts block i's weights into its modules, `leave(i)` takes them
out again (`block_hooks.py` calls both around the block's own `__call__`). Three others do the rest:

    residency.py   how much is on the device, and in which segmentation
    arrivals.py    the weights as modules hold them, with LoRAs and other patches (`patched_weights.py`)
    text_kv.py     results of texts, kept so that the weights which make them need not come

`block_order.py` keeps the order in which blocks really run, which is the order in which they are
paged.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import torch

from ...gpu.graphed_calls import Settled
from ...memory import Checkpoint, Layer
from ..base import file_formats
from ..base.errors import NotWhileStreaming
from ..weights.paged import Paged
from . import segments, vram_pool
from .arrivals import Arrivals
from .block_hooks import leads, leads_to_text
from .block_order import Order
from .blocks import Block, Parameters
from .card_sync import Together
from .file_weights import FileWeights
from .lent_weights import LentWeights
from .patched_weights import PatchedWeights
from .residency import Residency
from .segments import Segmentation
from .text_kv import IN_VAIN, Compute


class BlockStream:
    """One model's streamed weights. All calls come from the thread that runs the model."""

    def __init__(
        self,
        source: Checkpoint,
        blocks: Sequence[Block],
        layers: Sequence[Layer],
        device: torch.device,
        ceiling: int | None = None,
        left: Sequence[Paged] = (),
        loader: str = vram_pool.LOADER,
        spare: int = 0,
        idle: Collection[int] = (),
        keeps_texts: bool = False,
    ) -> None:
        """The source is closed with the stream.

        device       where the model will run, until it is loaded elsewhere
        ceiling      device bytes that the weights may take; None: as many as there are
        left         weights that are never loaded, because their modules read the file
        loader       the node that messages name
        spare        number of trailing blocks that are never called as modules; paged once something reads their
                     weights (`bound`)
        idle         numbers of other blocks that are rarely called; paged from their first call on
        keeps_texts  whether our blocks will compute, which keep what they make of a text where fewer bytes pass so
        """
        found = segments.all_of(blocks, layers, left, spare=spare, idle=idle, keeps_texts=keeps_texts)
        self.residency = Residency(source, found, device, ceiling, loader)
        self.residency.resegmented = self._resegmented
        self.arrivals = Arrivals(self.residency)
        self.in_file = FileWeights(source, found[0], left, self.residency.lock)
        self.left = tuple(left)
        self.keys = frozenset(paged.key for paged in self.without_bytes())
        self.patches_uuid: UUID | None = None  # of the patches that the weights are used with
        self.watcher: Callable[[int], None] | None = None  # told the layer after each block; must be quick
        self.together: Together | None = None  # where several cards compute one sampling
        self.calling = threading.RLock()  # held by the thread that a call of the model is in
        self._patches: tuple[Mapping[str, Sequence[Any]], bool] = {}, False  # as `set_patches` was told last
        self._outside = LentWeights(source)  # of blocks that run outside of a call
        self._lent: set[int] = set()  # those of them that are in use
        self._of_text: frozenset[int] = frozenset()  # blocks that make what is kept of texts
        self._entered: set[int] = set()  # blocks that hold their weights
        self._text_came = False  # whether text weights came in the pass under way
        self._stands_still = False  # all blocks hold their weights until further notice
        self._is_narrowed = False  # to blocks that run again and again: others had been paged
        self._number()

    def without_bytes(self) -> Iterator[Paged]:
        """The weights that modules hold stand-ins of: those that are paged, and those left in the
        file."""
        for block in self.blocks:
            yield from block.paged
        yield from self.left

    @property
    def path(self) -> Path:
        """The model's file; of several the first, or the one that ComfyUI could not load."""
        paths = [file.path for file in self.residency.source.files]
        return next(filter(file_formats.is_ours_alone, paths), paths[0])

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks, or parts of blocks, that are paged or may be."""
        return self.residency.segmentation.blocks

    @property
    def order(self) -> Order:
        """The order in which they are paged."""
        return self.residency.segmentation.order

    @property
    def patching(self) -> PatchedWeights:
        """Their weights with patches."""
        return self.residency.segmentation.patching

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The pager's layers, in its order."""
        return self.residency.segmentation.paged

    # ------------------------------------------------------------------------------------------------ segmentation

    def _number(self) -> None:
        """Give each door the number of its block in the current segmentation."""
        for one in self.residency.segmentations:
            for module in (*(module for module, _ in one.doors()), *(text.door for text, _ in one.texts())):
                leads(module, self, None)
        now = self.residency.segmentation
        for module, i in now.doors():
            leads(module, self, i)
        self._of_text = frozenset(i for _, i in now.texts())
        number = dict(now.doors())
        for text, i in now.texts():
            leads(text.door, self, number.get(text.door))
            leads_to_text(text.door, i)

    def _resegmented(self, before: Segmentation) -> None:
        """Residency divides the model otherwise from now on: doors get other numbers, and the
        patches go over."""
        before.patching.become({}, one_pass=False)  # only one segmentation keeps tensors of patches
        self._number()
        patches, one_pass = self._patches
        self.patching.become(patches, one_pass=one_pass)

    def taken_over(self, block: Any, number: int | None) -> int | None:
        """Code of another node is about to compute this module, and may look for weights anywhere
        in it: blocks are not divided from now on. Returns the block's number, which was this one
        before."""
        whole = self.residency.segmentations[0]
        if self.residency.segmentation is whole:
            return number
        found = next((i for module, i in whole.doors() if module is block), None)
        if found is None:
            return number
        with self.residency.lock:
            if self.residency.in_use:
                raise NotWhileStreaming(f"{whole.blocks[found].name} runs inside of another block.", self.path)
            self.residency.restrict((whole,))
        return found

    # ------------------------------------------------------------------------------------------------------- order

    @contextlib.contextmanager
    def one_pass(self) -> Iterator[Collection[int]]:
        """One call of the model. Yields the blocks of it that have run: none where a CUDA graph was
        replayed. If they ran in another order than they are paged in, the next pass finds them in
        the order of this one."""
        self._outside.drop()
        ran = self.order.begin()
        try:
            yield ran
        finally:
            wanted = self.order.end()
            self._end_texts()
        residency = self.residency
        keeps_in_vain = residency.texts.in_vain >= IN_VAIN and residency.segmentation.base is not None
        if keeps_in_vain and not residency.in_use:
            with residency.lock, contextlib.suppress(vram_pool.OutOfVram):  # the first block that runs raises it
                self.note("texts", f"nothing is kept: their weights came for {IN_VAIN} calls in a row all the same")
                residency.restrict(residency.plain)
            return
        # If all blocks are resident their order does not matter, and a new order would bring all of
        # them anew.
        if wanted is None or self._is_narrowed or (residency.all_stay and set(wanted) == set(self.order.paged)):
            return
        self._reorder(wanted)

    def runs_only(self, blocks: Sequence[int], now: Sequence[int] = (), *, at_last: bool = False) -> None:
        """The run under way calls these blocks again and again, and no others. If all of them are
        resident, the others are brought now, so that everything is in its place. Others that have
        never run are brought when they are called.

        now      those of the blocks that are not called as modules, and are brought here
        at_last  page no others even where the blocks are not all resident: the caller knows that the run goes on for
                 long, because all weights come anew
        """
        used = {*now, *blocks}

        def others() -> list[int]:
            return [i for i in self.order.paged if i not in used]

        def only() -> list[int]:
            spare = [i for i in now if i not in self.order.place]
            return spare + [i for i in self.order.paged if i in used]

        if others() and self.order.are_new(others()):
            self._reorder(only())
        self._bring(now)
        if self.residency.all_stay:
            self._bring(others())
        elif at_last and others():
            self._reorder(only(), grows=True)
            self._is_narrowed = True

    def _bring(self, blocks: Sequence[int]) -> None:
        """Give these blocks a place in the pager, and bring their weights."""
        for i in blocks:
            with self.bound(i):
                pass

    def _reorder(self, order: Sequence[int], *, grows: bool = False) -> None:
        """Page these blocks, in this order; see `Residency.reordered`."""
        with self.residency.lock:
            if self.residency.in_use:
                if self.order.place.keys() >= set(order):
                    return  # the order can wait
                raise NotWhileStreaming(
                    f"{self.blocks[order[-1]].name} runs inside of another block, and has never run before.",
                    self.path,
                )
            self._is_narrowed = False
            self.residency.reordered(order, grows=grows)

    # ------------------------------------------------------------------------------------------------------- texts

    def of_text(
        self, i: int, context: torch.Tensor, key: Hashable, compute: Compute, *, is_steady: bool = True
    ) -> Sequence[torch.Tensor]:
        """What block i makes of a context: see `block_hooks.of_text`. Nothing is kept where another
        node changes its weights at each use."""
        order, text = self.order, None
        order.runs(i)
        modules: Iterator[Any] = (paged.module for paged in self.blocks[i].paged)
        if not any(module.weight_function or module.bias_function for module in modules):
            with self.residency.lock:
                text = self.residency.texts.of(context, key, order.under_way if is_steady else None)
        if text is not None and i in text.made:
            return text.made[i]
        with self.bound(i):
            made = compute()
            if text is not None:
                self.residency.texts.keep(text, i, made)
        if self.residency.pager is not None and i in order.place:
            self.residency.pager.go_on(order.place[i])
        return made

    def _end_texts(self) -> None:
        """A call is over."""
        if self.residency.pager is not None:
            self.residency.pager.needs_rare = False
        if self.residency.segmentation.base is not None:
            self.residency.texts.call_ended(came=self._text_came)
        self._text_came = False

    # ----------------------------------------------------------------------------------------------------- patches

    def set_patches(
        self, patches: Mapping[str, Sequence[Any]], *, one_pass: bool = False, uuid: UUID | None = None
    ) -> None:
        """Use the weights with these patches from now on. Only blocks whose patches differ come
        anew.

        one_pass  whether plain LoRA on fp16 weights may be added in one pass (`lora.py`) on a GPU, instead of in
                  ComfyUI's steps
        uuid      the patcher's name for these patches
        """
        with self.residency.lock:
            self._patches = {key: tuple(some) for key, some in patches.items()}, one_pass
            changed = self.patching.become(patches, one_pass=one_pass)
            if changed & self._of_text:
                self.residency.texts.forget()
            self.arrivals.renew(changed)
            if changed or uuid != self.patches_uuid:
                self.residency.changes.moved()
            self.patches_uuid = uuid

    # ----------------------------------------------------------------------------------------------------- settled

    def settled(self) -> Settled:
        """Whether all blocks have their weights at addresses that stay."""
        if self.residency.pager is None:
            return Settled(None, "its weights are not loaded")
        if self.residency.in_use:
            return Settled(None, "it is called from within one of its blocks")
        return self.residency.changes.settled(self.residency.pager, self.arrivals.unpatched)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[bool]:
        """For this time all blocks of a settled model hold their weights, and calling one asks
        nothing of the pager. Yields False where the model is not settled any more."""
        residency = self.residency
        with residency.lock:
            if self.settled().generation is None:
                yield False
                return
            residency.in_use += 1  # so that nothing moves
        before = {i: self.blocks[i].held() for i in self.order.paged}
        try:
            assert residency.pager is not None
            for i in before:
                weights = residency.pager.weights(self.order.place[i])
                made = residency.pager.made(self.order.place[i]) if i in self.patching else None
                self.blocks[i].hold(weights.kept if made is None else made.parameters)
            self._stands_still = True
            yield True
        finally:
            self._stands_still = False
            for i, parameters in before.items():
                self.blocks[i].hold(parameters)
            residency.in_use -= 1
            residency.unload_if_due()

    def ran_as_a_graph(self) -> None:
        """All blocks ran, by one launch of a CUDA graph. The watcher is told of each."""
        self.residency.last_used = time.monotonic()
        if self.residency.pager is not None:
            self.residency.pager.ran_apart()
        if self.watcher is not None:
            for layer in range(len(self.order.paged)):
                self.watcher(layer)

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.residency.device

    def room(self, nbytes: int) -> bool:
        """Take device bytes for CUDA graphs; see `Residency.room`."""
        return self.residency.room(nbytes)

    def note(self, what: str, why: str) -> None:
        """Say why in the report."""
        self.residency.ledger.note(what, why)

    # ------------------------------------------------------------------------------------------------------ in use

    @contextlib.contextmanager
    def bound(self, i: int) -> Iterator[None]:
        """For this time the block's modules hold their weights."""
        before = self.enter(i)
        try:
            yield
        finally:
            self.leave(i, before)

    def enter(self, i: int) -> Parameters | None:
        """Let the block's modules hold their weights. Returns what they held before, for `leave`;
        None: they hold them already."""
        if self.together is not None:
            self.together.look()
        if i in self._entered:
            return None
        block, order, residency = self.blocks[i], self.order, self.residency
        before = block.held()
        if self._stands_still:
            if i not in order.place:
                raise NotWhileStreaming(f"{block.name} was not there when the model's call was captured.", self.path)
            return before
        if i not in order.place:
            if not order.is_running:
                self._lend(i, before)
                return before
            self._reorder(order.with_block(i))
        order.runs(i)
        pager = residency.ready()
        if i in self._of_text:
            self._text_came = pager.needs_rare = True
        with residency.refusing():
            weights = pager.acquire(order.place[i])
        residency.in_use += 1
        self._entered.add(i)
        residency.last_used = time.monotonic()
        try:
            self.arrivals.hold(pager, i, weights)
            if self.patching:
                self.arrivals.ask_ahead(pager, i, skip=frozenset() if pager.needs_rare else self._of_text)
        except BaseException:
            self.leave(i, before, spoilt=True)
            raise
        return before

    def is_in_use(self, i: int) -> bool:
        """Whether the block's modules hold its weights."""
        return i in self._entered

    def leave(self, i: int, before: Parameters | None, *, spoilt: bool = False) -> None:
        """The block is done. spoilt: its weights are patched in part, so they come anew."""
        if self._stands_still or before is None:
            return
        self._entered.discard(i)
        self.blocks[i].hold(before)
        self.patching.add_no_more(i)
        if i in self._lent:
            self._lent.discard(i)
            return
        residency = self.residency
        assert residency.pager is not None, "nothing is unloaded while it is in use"
        residency.in_use -= 1
        layer = self.order.place[i]
        residency.pager.release(layer)
        if spoilt:
            residency.pager.renew((layer,))
        try:
            if self.watcher is not None:
                self.watcher(layer)  # where ComfyUI interrupts
        finally:
            residency.unload_if_due()

    def _lend(self, i: int, before: Parameters) -> None:
        """Read the weights of a block that is not paged, for this one use. before: what its modules
        hold otherwise."""
        residency = self.residency
        weights = self._outside.bring(i, residency.segmentation.layers, self.order.place, residency.device)
        self._lent.add(i)
        self._entered.add(i)
        try:
            self.arrivals.hold_lent(i, weights)
        except BaseException:
            self.leave(i, before)
            raise

    # --------------------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """The model is gone. Nothing can be loaded any more."""
        with self.residency.lock:
            self._entered.clear()
            self._outside.drop()
            self.residency.close()
            self.left = ()
            self.in_file = FileWeights(self.residency.source, self.residency.segmentation, (), self.residency.lock)

    def __deepcopy__(self, memo: Any) -> BlockStream:
        raise NotWhileStreaming("A streamed model cannot be copied weight by weight.", self.path)
