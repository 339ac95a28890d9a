"""A model's blocks and the pager that has their weights: before a block runs it holds them, after it it holds nothing.

Blocks are paged in the order in which they run (`block_order.py`), with the model's patches in them
(`patched_weights.py`), whole or, where VRAM is short, in parts (`segments.py`), and without what
texts alone need, where that is kept (`text_kv.py`). What runs outside of any pass, once for a
prompt, is read for that time.

The stream belongs to the model, not to a patcher: clones share it, and it ends when the model does.
While a block is not running its modules hold stand-ins on the meta device, right in shape and
dtype, which is all that LoRA loaders look at. `block_hooks.py` says how the weights come to a block
that is called.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import UUID

import torch

from ...gpu.graphed_calls import Settled
from ...gpu.streams import at
from ...memory import (
    Along,
    Checkpoint,
    FileChanged,
    KeptPages,
    Layer,
    Ledger,
    OverBudget,
    Pager,
    Parcels,
    RamBudget,
    Weight,
    Weights,
    open_pager,
    open_parcels,
)
from ..base.errors import NotWhileStreaming
from ..weights import ggml_blocks, lora
from ..weights.lazy_weight import Promised, promise
from ..weights.paged import Paged
from ..weights.patches import patched
from ..weights.storage import is_quantised, storage_of
from . import segments, vram_pool
from .block_hooks import leads, leads_to_text
from .block_order import Order
from .blocks import Block, Parameters
from .card_sync import Together
from .embedding import rows_of
from .lora_factors import PatchRoute
from .patched_weights import Made, Patching
from .segments import Grain
from .stability import Captured, Changes
from .text_kv import IN_VAIN, Compute, Texts

GRAPHS = "VRAM of graphs"  # in the ledger
TEXTS = "VRAM of texts"


class Stream:
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
        idle: int = 0,
        keeps_texts: bool = False,
    ) -> None:
        """device: where the model will run, until it is loaded elsewhere. ceiling: bytes of it that the weights may hold;
        None: as many as there are. left: weights of which nothing is loaded ever, because their modules read the file. loader:
        the node, for messages. spare: so many of the last blocks are nothing that is called; they are paged from the first time on
        that somebody holds them (`bound`). idle: of those before them, so many of the last are not called as a rule; they are paged
        from their first call on. keeps_texts: whether our blocks will compute, which keep what they make of a text where that lets
        less pass. The source is closed with the stream."""
        self.ledger = Ledger()
        by_blocks = segments.whole(blocks, layers, left, spare, idle)
        by_parts = segments.in_parts(by_blocks, left)
        plain = [by_blocks] if by_parts is None else [by_blocks, by_parts]
        twins = [segments.without_texts(one, left) for one in plain] if keeps_texts else []
        self.grains: tuple[Grain, ...] = (*plain, *(one for one in twins if one is not None))
        self.grain = by_blocks
        self.texts = Texts()
        self.ceiling = ceiling
        self.left = tuple(left)
        self.loader = loader
        self.keys = frozenset(paged.key for paged in self.without_bytes())
        self.family: str | None = None  # whose kernels compute the blocks; None: stock does
        self.last_used = 0.0
        self.pager: Pager | None = None
        self.patches_uuid: UUID | None = None  # of the patches that the weights are used with
        self.watcher: Callable[[int], None] | None = (
            None  # told the layer after each block; must be quick, and not raise
        )
        self.graphs: Captured | None = None  # where its calls may be captured
        self.together: Together | None = None  # where a sampling is computed with other cards
        self.calling = threading.RLock()  # held by the thread that a call of the model is in
        self.pager_options: dict[str, Any] = {}  # for `open_pager`: a backend asked for, a guard
        self._patches: tuple[Mapping[str, Sequence[Any]], bool] = {}, False  # what it was told last, and how
        self._source = source
        self._device = device
        self._pool: vram_pool.Pool | None = None
        self._kept = KeptPages()
        self._lent: set[int] = set()  # blocks in use that the pager does not have
        self._of_text: frozenset[int] = frozenset()  # blocks that make what is kept of texts
        self._entered: set[int] = set()  # blocks that hold their weights: one that is entered from within has them
        self._text_came = False  # for any of these, in the pass under way
        self._in_use = 0
        self._unloading = False
        self.changes = Changes()
        self._stands_still = False  # the blocks hold their weights until further notice
        self._is_narrowed = False  # to blocks that run again and again: others had been paged
        self._was_refused = False  # the file, while it was used: what was brought of it is not to be gone on with
        self._lock = threading.RLock()
        self._bound()
        if ceiling is not None and ceiling < self.narrow:
            gib = vram_pool.GIB
            raise vram_pool.OutOfVram(
                f"The weights need at least {self.narrow / gib:.3f} GiB of VRAM to pass through, and vram_budget is "
                f"{ceiling / gib:.3f} GiB. Raise vram_budget in the {loader}."
            )
        self._number()

    def without_bytes(self) -> Iterator[Paged]:
        """What the modules hold stand-ins of: weights that are paged, or left in the file."""
        for block in self.blocks:
            yield from block.paged
        yield from self.left

    @property
    def path(self) -> Path:
        """The model's file, of several the first."""
        return self._source.files[0].path

    @property
    def blocks(self) -> tuple[Block, ...]:
        """What is paged, and what could be: blocks, or parts of them."""
        return self.grain.blocks

    @property
    def order(self) -> Order:
        return self.grain.order

    @property
    def patching(self) -> Patching:
        return self.grain.patching

    @property
    def layers(self) -> tuple[Layer, ...]:
        """What the pager has, in its order."""
        return self.grain.paged

    # ------------------------------------------------------------------------------------------------------- grain

    @property
    def is_in_parts(self) -> bool:
        """Whether what is paged are the parts of blocks."""
        return (self.grain.of or self.grain) is not self.grains[0]

    @property
    def _plain(self) -> tuple[Grain, ...]:
        """The ways in which nothing is kept of texts."""
        return tuple(one for one in self.grains if one.of is None)

    def _bound(self) -> None:
        """How many bytes of the device it takes: as it is paged now, from `least` on, and in `most` all of it stays; blocks pass
        through in `whole`, and as finely as can be in `narrow`."""
        self.least, _ = self.grain.bounds(self._device)
        _, self.most = (self.grain.of or self.grain).bounds(self._device)
        self.whole, _ = self.grains[0].bounds(self._device)
        self.narrow = min(one.bounds(self._device)[0] for one in self._plain)

    def _number(self) -> None:
        """Let what is called find its number, under this grain."""
        for one in self.grains:
            for module in (*(module for module, _ in one.doors()), *(text.door for text, _ in one.texts())):
                leads(module, self, None)
        for module, i in self.grain.doors():
            leads(module, self, i)
        self._of_text = frozenset(i for _, i in self.grain.texts())
        number = dict(self.grain.doors())
        for text, i in self.grain.texts():
            leads(text.door, self, number.get(text.door))
            leads_to_text(text.door, i)

    def _become(self, one: Grain) -> None:
        """From now on it is paged so, with the same patches. Nothing is loaded."""
        if one is not self.grain:
            self.patching.become({}, one_pass=False)  # which keeps the patches' tensors
            self.grain = one
            self.changes.moved()
            self._number()
            patches, one_pass = self._patches
            self.patching.become(patches, one_pass=one_pass)
            self._bound()

    def taken_over(self, block: Any, number: int | None) -> int | None:
        """Another node's code is about to compute what may be a block: it may look for weights anywhere in it. Its number, which
        was this before; from now on blocks are not taken apart."""
        if self.grain is self.grains[0]:
            return number
        found = next((i for module, i in self.grains[0].doors() if module is block), None)
        if found is None:
            return number
        with self._lock:
            if self._in_use:
                raise NotWhileStreaming(f"{self.grains[0].blocks[found].name} runs inside of another block.", self.path)
            self._only(self.grains[:1])
        return found

    def _only(self, grains: Sequence[Grain]) -> None:
        """From now on it is paged in one of these ways, and all of it comes anew."""
        held = self.held
        self.unload()
        self._become(grains[0])
        self.grains = tuple(grains)
        self._bound()
        self.load(self._device, held)

    # ------------------------------------------------------------------------------------------------------- order

    @contextlib.contextmanager
    def one_pass(self) -> Iterator[Collection[int]]:
        """One call of the model, and the blocks of it that have run: none where it was replayed. If they ran in another order than
        they are paged in, the next pass finds them in this."""
        ran = self.order.begin()
        try:
            yield ran
        finally:
            wanted = self.order.end()
            self._end_texts()
        if self.texts.in_vain >= IN_VAIN and self.grain.of is not None and not self._in_use:
            with self._lock, contextlib.suppress(vram_pool.OutOfVram):  # or the first block that runs says it
                self.note("texts", f"nothing is kept: their weights came for {IN_VAIN} calls in a row all the same")
                self._only(self._plain)
            return
        # Where all of them stay, the order is no matter, and all would come anew. What was left out comes when it is called.
        if wanted is None or self._is_narrowed or (self._all_stay and set(wanted) == set(self.order.paged)):
            return
        self._reorder(wanted)

    @property
    def _all_stay(self) -> bool:
        """Whether none of what is paged passes through."""
        return self.pager is not None and not self.pager.plan.streamed

    def runs_only(self, blocks: Sequence[int], now: Sequence[int] = (), *, at_last: bool = False) -> None:
        """What is under way runs these blocks, again and again, and no others. now: those of them that are not called, and are
        brought here. Where all of them stay, the others are brought now: then all is in its place. Where nobody has used the others
        yet, they are brought when they are called. at_last: where not all of them stay, too; whoever says so knows that it goes on
        for long, since all comes anew."""
        used = {*now, *blocks}

        def others() -> list[int]:
            return [i for i in self.order.paged if i not in used]

        def only() -> list[int]:
            spare = [i for i in now if i not in self.order.place]
            return spare + [i for i in self.order.paged if i in used]

        if others() and self.order.are_new(others()):
            self._reorder(only())
        self._bring(now)
        if self._all_stay:
            self._bring(others())
        elif at_last and others():
            self._reorder(only(), grows=True)
            self._is_narrowed = True

    def _bring(self, blocks: Sequence[int]) -> None:
        """Let these blocks find their places, and their weights be there."""
        for i in blocks:
            with self.bound(i):
                pass

    def _reorder(self, order: Sequence[int], *, grows: bool = False) -> None:
        """Page these blocks, in this order. What was on the device comes anew. grows: in what is free now beside what was held, for
        a prompt that was read has given its room back."""
        with self._lock:
            if self._in_use:
                if self.order.place.keys() >= set(order):
                    return  # it may wait
                raise NotWhileStreaming(
                    f"{self.blocks[order[-1]].name} runs inside of another block, and has never run before.",
                    self.path,
                )
            held, whole, free = self.held, self.most, vram_pool.free(self._device)
            with self._kept.returning():
                self.unload()
                self._is_narrowed = False
                self.order.become(order)
                self._bound()
                if held:
                    # Where all of it was there, what joins may be there too: ComfyUI asks how much is wanted at the next load only.
                    joins = max(0, min(self.most - whole, free)) if held >= whole else 0
                    more = max(joins, free) if grows else joins
                    with contextlib.suppress(vram_pool.OutOfVram):  # or the first block that runs says it
                        self._load(self._device, held + more, (self.grain,))

    # ------------------------------------------------------------------------------------------------------- texts

    def of_text(
        self, i: int, context: torch.Tensor, key: Hashable, compute: Compute, *, is_steady: bool = True
    ) -> Sequence[torch.Tensor]:
        """What block i makes of a context: see `block_hooks.of_text`. Where another node changes its weights at each use,
        nothing is kept."""
        order, text = self.order, None
        order.runs(i)
        modules: Iterator[Any] = (paged.module for paged in self.blocks[i].paged)
        if not any(module.weight_function or module.bias_function for module in modules):
            with self._lock:
                text = self.texts.of(context, key, order.under_way if is_steady else None)
        if text is not None and i in text.made:
            return text.made[i]
        with self.bound(i):
            made = compute()
            if text is not None:
                self.texts.keep(text, i, made)
        if self.pager is not None and i in order.place:
            self.pager.go_on(order.place[i])
        return made

    def _end_texts(self) -> None:
        """A call is over."""
        if self.pager is not None:
            self.pager.needs_rare = False
        if self.grain.of is not None:
            self.texts.call_ended(came=self._text_came)
        self._text_came = False

    def _for_texts(self, budget: int) -> int:
        """Bytes of it for what is kept of texts: all that is wanted, or nothing, for the blocks come first."""
        return self.grain.kept if budget - self.grain.kept >= self.least else 0

    def _take_room(self, nbytes: int) -> None:
        """For what is kept of texts. Where there is none, all is computed at each call."""
        if not nbytes or self.texts.nbytes == nbytes:
            return
        assert self._pool is not None
        with contextlib.suppress(OverBudget, torch.OutOfMemoryError):
            self._pool.budget.take(nbytes)
            try:
                room = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            except BaseException:
                self._pool.budget.give_back(nbytes)
                raise
            self.texts.open(room, len(self._of_text))
            self.ledger.hold(TEXTS, nbytes)

    def _give_room_back(self) -> None:
        nbytes = self.texts.nbytes
        self.texts.close()
        if nbytes and self._pool is not None:
            self._pool.budget.give_back(nbytes)
            self.ledger.hold(TEXTS, -nbytes)

    # ------------------------------------------------------------------------------------------------------ memory

    @property
    def held(self) -> int:
        """Device bytes taken now: by the weights, and what is kept in place of some."""
        return self.texts.nbytes + (self.pager.held_bytes if self.pager is not None else 0)

    @property
    def yielding(self) -> int:
        """Device bytes that a step which runs out of VRAM would be given by the weights, where they pass through anyway."""
        streams = self.pager is not None and bool(self.pager.plan.streamed)
        return max(0, self.held - self.narrow) if streams else 0

    @property
    def beside(self) -> int:
        """Device bytes taken beside the weights: by what was captured."""
        return self.graphs.nbytes if self.graphs is not None else 0

    def take_beside(self, nbytes: int) -> bool:
        """Whether so many bytes are left of the device's budget; they are taken."""
        if self._pool is None:
            return False
        try:
            self._pool.budget.take(nbytes)
        except OverBudget:
            return False
        self.ledger.hold(GRAPHS, nbytes)
        return True

    def give_back_beside(self, nbytes: int) -> None:
        """What was taken, of the same device."""
        if self._pool is not None and nbytes:
            self._pool.budget.give_back(nbytes)
            self.ledger.hold(GRAPHS, -nbytes)

    def release_graphs(self) -> int:
        """Give back what was captured: it is captured anew if it pays. Returns the bytes. Never waits."""
        return 0 if self.graphs is None else self.graphs.release(waits=False)

    @property
    def wanted(self) -> int:
        """Device bytes that it would take if it could: all, or its ceiling."""
        ceiling = vram_pool.whole(self._device) if self.ceiling is None else self.ceiling
        return max(self.narrow, min(self.most, ceiling))

    def load(self, device: torch.device, nbytes: float) -> None:
        """Hold up to this many bytes on the device, and no less than what the blocks need to pass through: whole if that fits."""
        self._load(device, nbytes, self.grains)

    def _load(self, device: torch.device, nbytes: float, grains: Sequence[Grain]) -> None:
        """The same, paged in one of these ways."""
        with self._lock:
            if device != self._device or self._pool is None:
                self._move(device)
            assert self._pool is not None
            least = min(one.bounds(device)[0] for one in grains)
            want = int(max(least, min(nbytes, self.wanted)))
            left = self._pool.make_room(self, want - self.held)
            budget = max(least, min(want, self.held + left))
            if self._in_use:
                return  # whoever asks from within a block gets by with what there is
            try:
                # Memory made in inference mode could not be written to outside of it, by the copying thread for one.
                with torch.inference_mode(False), torch.no_grad(), at(device):
                    self._fit(budget, grains)
            except OverBudget as error:
                raise vram_pool.out_of_vram(error, self.loader) from error

    def _fit(self, budget: int, grains: Sequence[Grain]) -> None:
        """Take this much. What is paged in parts stays so while it is loaded: to bring all of it anew costs more than parts do.
        Where all of it may stay, nothing is kept of texts."""
        may_stay = budget >= self.most and any(one is self.grain.of for one in grains)
        if self.pager is not None and budget >= self.least and not may_stay:
            self._resize(self.pager, budget)
            return
        self.unload()
        self._become(segments.chosen(grains, self._device, budget))
        kept = self._for_texts(budget)
        self.pager = self._open(budget - kept)
        self._take_room(kept)

    def _resize(self, pager: Pager, budget: int) -> None:
        kept = self._for_texts(budget)
        if not kept:
            self._give_room_back()
        pager.resize(budget - kept)
        self._take_room(kept)

    def refresh(self) -> None:
        """Before a prompt: a file that was touched, or replaced and brought back, is opened anew and streams again. Raises
        `BadFile` where it is no longer the model's."""
        with self._lock:
            if self._in_use:
                return
            if self._was_refused or self._source.has_changed:
                self.unload()
                self._kept.give_back()
                self._source.reopen()
                self._was_refused = False

    def shrink(self, nbytes: int) -> int:
        """Give back about this much: what was captured first, then residents, what is kept of texts, then the window. Returns
        what was given back: nothing while a block runs, or while another thread loads or ends this model, for which nobody waits
        here."""
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            if self.pager is None or self._in_use or nbytes <= 0:
                return 0
            captured = self.release_graphs()
            if self.beside:
                return captured  # another thread is about to replay one, with weights that have to be where they are
            nbytes -= captured
            before = self.held
            if nbytes <= 0:
                return captured
            if before - nbytes >= self.least:
                with torch.inference_mode(False), torch.no_grad(), at(self._device):
                    self._resize(self.pager, before - nbytes)
            else:
                self.unload()
            return captured + before - self.held
        finally:
            self._lock.release()

    def keep_window(self) -> int:
        """Give back all but what the blocks need to pass through. Returns the bytes given back."""
        return self.shrink(self.held - self.least)

    def keep_parts(self) -> int:
        """Give back all but what the blocks' parts need to pass through, where there are parts. Returns the bytes given back."""
        before = self.held
        if self.pager is not None and before > self.narrow:
            self._load(self._device, self.narrow, self.grains)
        return before - self.held

    def unload(self) -> None:
        """Give everything back: now, or when the block that is running is done."""
        with self._lock:
            if self._in_use:
                self._unloading = True
                return
            self._unloading = False
            self.changes.moved()
            if self.graphs is not None:
                self.graphs.release()
            self._give_room_back()
            pager, self.pager = self.pager, None
            with at(self._device):
                if pager is not None:
                    pager.close()
                self.patching.factors.close()

    def give_ram_back(self) -> None:
        """What is kept for when it is loaded again: somebody wants it to be gone."""
        with self._lock:
            self._kept.give_back()

    def __deepcopy__(self, memo: Any) -> Stream:
        raise NotWhileStreaming("A streamed model cannot be copied weight by weight.", self.path)

    def close(self) -> None:
        """The model is gone. Nothing can be loaded any more."""
        with self._lock:
            self._in_use = 0
            self._entered.clear()
            self.unload()
            self._kept.give_back()
            self._source.close()
            if self._pool is not None:
                self._pool.leave(self)
            self.grain = segments.whole((), (), (), 0, 0)
            self.grains, self.left = (self.grain,), ()

    def check(self) -> None:
        """Raises FileChanged where weights were used that were not what the file holds. The host waits for the device."""
        if self.pager is not None:
            try:
                self.pager.check()
            except FileChanged:
                self._was_refused = True
                raise

    def _move(self, device: torch.device) -> None:
        self.unload()
        self._kept.give_back()
        if self._pool is not None:
            self._pool.leave(self)
        self._device = device
        for one in self.grains:
            one.patching.forget_device()
        self._bound()
        self._pool = vram_pool.pool_of(device)
        self._pool.join(self)

    def _open(self, budget: int) -> Pager:
        assert self._pool is not None
        stored = sum(layer.stored_bytes for layer in self.layers)
        ram = (
            vram_pool.ram_for(stored - self._kept.lendable()) if self._device.type != "cpu" else None
        )  # the CPU pins nothing
        pager = open_pager(
            self._source,
            self.layers,
            self._pool.budget,
            budget,
            self._device,
            ram=ram,
            ledger=self.ledger,
            kept=self._kept,
            **{"convert": ggml_blocks.convert, **self.pager_options},
        )
        self.changes.moved()
        self.patching.factors.parcels = self._open_parcels(ram)
        pager.along = self._along
        return pager

    def _open_parcels(self, ram: RamBudget | None) -> Parcels | None:
        return None if ram is None else open_parcels(self._device, ram, self.ledger)

    def _along(self, layer: int) -> Along | None:
        """A layer is about to be copied, and what its block's patches need goes with it."""
        i = self.order.paged[layer]
        along: Along | None = self.patching.along(i, self._patch_route(i))
        return along

    # ----------------------------------------------------------------------------------------------------- patches

    def weight(self, key: str, patches: Sequence[Any] = (), device: torch.device | None = None) -> torch.Tensor:
        """One weight that streams, by its name in the model, read from the file: as the model holds it, with these patches. Without
        any it is on the CPU, else on the device."""
        paged, weight = self._weights[key]
        where = device if patches and device is not None else torch.device("cpu")
        with torch.no_grad():
            held: torch.nn.Parameter = storage_of(
                self.patching.parameter(paged, self._read(weight).to(where), where)
            ).for_comfyui()
            if not patches:
                return held.data
            with self._lock:  # stock's functions look at what the module has
                before = paged.module._parameters[paged.attribute]
                paged.module._parameters[paged.attribute] = held
                try:
                    return patched(paged, held.data, patches, where)
                finally:
                    paged.module._parameters[paged.attribute] = before

    def promised(self, key: str, keeper: Any) -> Promised:
        """The same without patches, for later; of quantised weights the numbers. keeper: kept alive as long as the promise is."""
        paged, weight = self._weights[key]

        def read(_keeper: Any = keeper) -> torch.Tensor:
            found: Any = self.weight(key)
            numbers: torch.Tensor = found.to(dtype=torch.float32).dequantize() if is_quantised(found) else found
            return numbers

        def rows(ids: torch.Tensor) -> torch.Tensor:
            return rows_of(self._source, weight.extent, ids).to(paged.stand_in.dtype)

        return promise(paged.stand_in, key, read, rows if paged in self.left else None)

    @cached_property
    def _weights(self) -> Mapping[str, tuple[Paged, Weight]]:
        """What streams, by its name in the model."""
        found = {
            paged.key: (paged, weight)
            for block, layer in zip(self.grains[0].blocks, self.grains[0].layers, strict=True)
            for paged, weight in zip(block.paged, layer.weights, strict=True)
        }
        for paged in self.left:
            table: Any = paged.module
            found[paged.key] = (paged, Weight(paged.name, table.fusestream_extent, paged.storage.dtype))
        return found

    def set_patches(
        self, patches: Mapping[str, Sequence[Any]], *, one_pass: bool = False, uuid: UUID | None = None
    ) -> None:
        """From now on the weights are used with these patches. Only blocks whose patches are others come anew.

        one_pass: plain LoRA on fp16 weights may be added in one pass (`lora.py`), on a GPU; else in stock's steps. uuid: the
        patcher's name for these patches.
        """
        with self._lock:
            self._patches = {key: tuple(some) for key, some in patches.items()}, one_pass
            changed = self.patching.become(patches, one_pass=one_pass)
            if changed & self._of_text:
                self.texts.forget()
            if self.pager is not None and self.pager.is_writable:
                self._make_anew(self.pager, [self.order.place[i] for i in sorted(changed) if i in self.order.place])
            if changed or uuid != self.patches_uuid:
                self.changes.moved()
            self.patches_uuid = uuid

    def _make_anew(self, pager: Pager, layers: Sequence[int]) -> None:
        """These have other patches: weights that were written to come anew, others are still what the file holds."""
        pager.renew([layer for layer in layers if (made := pager.made(layer)) is not None and made.wrote])
        for layer in layers:
            pager.forget_made(layer)

    # ----------------------------------------------------------------------------------------------------- settled

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self._device

    def settled(self) -> Settled:
        """Whether all blocks have their weights at addresses that stay."""
        if self.pager is None:
            return Settled(None, "its weights are not loaded")
        if self._in_use:
            return Settled(None, "it is called from within one of its blocks")
        return self.changes.settled(self.pager, self._unpatched)

    def _unpatched(self, pager: Pager) -> str | None:
        """Why the weights that the pager has are not all that a product reads, in words a user understands."""
        for i in self.order.paged:
            made: Made | None = pager.made(self.order.place[i])
            if i in self.patching and (made is None or made.adds):
                return "its LoRAs are being added" if made is None else "LoRAs are added to each product of its weights"
        return None

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[bool]:
        """For this time all blocks of a settled model hold their weights, and running one asks nothing of the pager. False where it
        is not settled any more."""
        with self._lock:
            if self.settled().generation is None:
                yield False
                return
            self._in_use += 1  # nothing moves
        before = {i: self.blocks[i].held() for i in self.order.paged}
        try:
            assert self.pager is not None
            for i in before:
                weights = self.pager.weights(self.order.place[i])
                made = self.pager.made(self.order.place[i]) if i in self.patching else None
                self.blocks[i].hold(weights.kept if made is None else made.parameters)
            self._stands_still = True
            yield True
        finally:
            self._stands_still = False
            for i, parameters in before.items():
                self.blocks[i].hold(parameters)
            self._in_use -= 1
            if self._unloading:
                self.unload()

    def ran_as_a_graph(self) -> None:
        """All blocks have, with one launch. Whoever watches blocks is told of each."""
        self.last_used = time.monotonic()
        if self.pager is not None:
            self.pager.ran_apart()
        if self.watcher is not None:
            for layer in range(len(self.order.paged)):
                self.watcher(layer)

    def note(self, what: str, why: str) -> None:
        """For the report."""
        self.ledger.note(what, why)

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
        """Let the block's modules hold their weights. Returns what they held before, for `leave`; None: these same ones."""
        if self.together is not None:
            self.together.look()
        if i in self._entered:
            return None
        block, order = self.blocks[i], self.order
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
        pager = self._ready()
        if i in self._of_text:
            self._text_came = pager.needs_rare = True
        try:
            weights = pager.acquire(order.place[i])
        except FileChanged:
            self._was_refused = True
            raise
        self._in_use += 1
        self._entered.add(i)
        self.last_used = time.monotonic()
        try:
            made = self._made(pager, i, weights)
            block.hold(made.parameters)
            if made.adds:
                self.patching.add_on_the_way(i, self._patch_route(i))
            if self.patching:
                self._ask_ahead(pager, i)
        except BaseException:
            self.leave(i, before, spoilt=True)
            raise
        return before

    def is_in_use(self, i: int) -> bool:
        """Whether the block's modules hold its weights."""
        return i in self._entered

    def leave(self, i: int, before: Parameters | None, *, spoilt: bool = False) -> None:
        """The block is done. spoilt: its weights are patched in part, and nobody may use them like that."""
        if self._stands_still or before is None:
            return
        self._entered.discard(i)
        self.blocks[i].hold(before)
        self.patching.add_no_more(i)
        if i in self._lent:
            self._lent.discard(i)
            return
        assert self.pager is not None, "nothing is unloaded while it is in use"
        self._in_use -= 1
        layer = self.order.place[i]
        self.pager.release(layer)
        if spoilt:
            self.pager.renew((layer,))
        if self.watcher is not None:
            self.watcher(layer)
        if self._unloading:
            self.unload()

    def _lend(self, i: int, before: Parameters) -> None:
        """The block's weights, read for this once. before: what its modules hold else."""
        weights = Weights()
        for weight in self.grain.layers[i].weights:
            weights[weight.name] = self._read(weight).to(self._device)
        self._lent.add(i)
        self._entered.add(i)
        try:
            made = self.patching.made(i, weights, self._patch_route(i), self._device, in_place=True)
            self.blocks[i].hold(made.parameters)
            if made.adds:
                self.patching.add_on_the_way(i, self._patch_route(i))
        except BaseException:
            self.leave(i, before)
            raise

    def _read(self, weight: Weight) -> torch.Tensor:
        """One weight as the pager would bring it, on the CPU."""
        stored = self._source.read(weight.extent)
        if weight.is_packed and not weight.is_converted:
            return stored
        return ggml_blocks.numbers(stored, weight.extent).to(weight.device_dtype)

    def _ready(self) -> Pager:
        """The pager. What was unloaded in the middle of a run comes back, as small as can be."""
        if self.pager is None:
            if self._pool is None:
                raise RuntimeError("a streamed model runs before ComfyUI's memory management has loaded it")
            self._load(self._device, self.least, (self.grain,))
        assert self.pager is not None
        return self.pager

    def _made(self, pager: Pager, i: int, weights: Weights) -> Made:
        """The block's parameters: patched at the first use after its weights came."""
        if i not in self.patching:
            return self.patching.made(i, weights, UNPATCHED, self._device, in_place=False)
        if not pager.is_writable:
            return self.patching.made(i, weights, self._patch_route(i), self._device, in_place=False)
        arrival = pager.arrival(self.order.place[i])
        if arrival.made is None:
            arrival.made = self.patching.made(i, weights, self._patch_route(i), self._device, in_place=True)
        made: Made = arrival.made
        return made

    def _ask_ahead(self, pager: Pager, i: int) -> None:
        """Block i is in use: let what the next one needs for its patches be on its way."""
        paged = self.order.paged
        at = self.order.place[i]
        for layer in (*range(at + 1, len(paged)), *range(at)):
            j = paged[layer]
            if j in self._of_text and not pager.needs_rare:
                continue
            if j in self.patching:
                made: Made | None = pager.made(layer)
                if made is None or made.adds:
                    self.patching.ask(j, self._patch_route(j))
                    return

    def _patch_route(self, i: int) -> PatchRoute:
        """In which way block i's patches are applied."""
        one_pass = self.patching.one_pass and lora.serves(self._device)
        layer, is_ours = self.order.place.get(i), self.family is not None
        if layer is None:
            return PatchRoute(one_pass, streams=False, is_ours=is_ours)
        assert self.pager is not None, "patches are applied to what is loaded"
        streams = layer not in self.pager.plan.resident or not self.pager.is_writable
        return PatchRoute(one_pass, streams, is_ours)


UNPATCHED = PatchRoute(one_pass=False)
