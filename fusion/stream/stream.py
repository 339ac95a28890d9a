"""A model's blocks and the pager that has their weights: before a block runs it holds them, after it it holds nothing.

The stream belongs to the model, not to a patcher: clones share it, and it ends when the model does. While a block is not
running its modules hold stand-ins on the meta device, right in shape and dtype, which is all that LoRA loaders look at.

The weights are put in around the block's `__call__`, by a subclass made for that. Stock's hook for blocks,
`patches_replace["dit"][("double_block", i)]`, will not do for it: it is not asked for VACE's side branch, and another node
that replaces the same block takes our place, weights and all. Torch's module hooks will not do either: an interrupt of
ComfyUI is a BaseException, after which torch calls no hook, and the weights would stay where they are. Around `__call__`
there is a `finally`, and whatever other nodes do to `forward` or with the block hook happens inside.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

import torch

from ..memory import (
    Along,
    Checkpoint,
    Layer,
    Ledger,
    OverBudget,
    Pager,
    Parcels,
    RamBudget,
    bounds,
    open_pager,
    open_parcels,
)
from . import lora, vram
from .blocks import Block, Paged, is_quantised
from .factors import Factors, How, Pairs
from .mixing import mix
from .patches import PatchSet, differs, patched, snapshot

STREAM = "fusestream"  # where a model has its stream
STREAMED = "_fusestream"  # where a block has it, and its number
REMEDY = "Set vram_budget to 0 in its FuseStream loader for that."


class NotWhileStreaming(RuntimeError):
    """Something that needs all of a model's weights at once."""

    __module__ = "fusestream"


Bound = list[tuple[Paged, torch.nn.Parameter]]


class Made(NamedTuple):
    """A block's parameters, as its modules hold them. adds: whether some have LoRAs that are added for each product."""

    bound: Bound
    adds: bool = False


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
        loader: str = vram.LOADER,
    ) -> None:
        """device: where the model will run, until it is loaded elsewhere. ceiling: bytes of it that the weights may hold;
        None: as many as there are. left: weights of which nothing is loaded ever, because their modules read the file. loader:
        the node, for messages. The source is closed with the stream."""
        self.ledger = Ledger()
        self.blocks = tuple(blocks)
        self.layers = tuple(layers)
        self.ceiling = ceiling
        self.left = tuple(left)
        self.loader = loader
        self.keys = frozenset(paged.key for paged in self.without_bytes())
        self.last_used = 0.0
        self.pager: Pager | None = None
        self.patches_uuid: UUID | None = None  # of the patches that the weights are used with
        self.watcher: Callable[[int], None] | None = None  # told after each block; must be quick, and not raise
        self.pager_options: dict[str, Any] = {}  # for `open_pager`: a backend asked for, a guard
        self._source = source
        self._device = device
        self._pool: vram.Pool | None = None
        self._patches: PatchSet = {}
        self._patched: frozenset[int] = frozenset()  # blocks that have patches
        self._one_pass = False
        self._factors = Factors(self.blocks)
        # Of blocks in use: modules, their weight functions before and for the time.
        self._functions: dict[int, list[tuple[Any, list[Any], list[Any]]]] = {}
        self._params: dict[str, Any] = {}  # of quantised weights, with their scales on the device
        self._in_use = 0
        self._unloading = False
        self._lock = threading.RLock()
        self.least, self.most = bounds(layers, device)
        if ceiling is not None and ceiling < self.least:
            gib = vram.GIB
            raise vram.OutOfVram(
                f"The weights need at least {self.least / gib:.3f} GiB of VRAM to pass through, and vram_budget is "
                f"{ceiling / gib:.3f} GiB. Raise vram_budget in the {loader}."
            )
        for i, block in enumerate(self.blocks):
            mix(block.module, _Streamed, **{STREAMED: (self, i)})

    def without_bytes(self) -> Iterator[Paged]:
        """What the modules hold stand-ins of: weights that are paged, or left in the file."""
        for block in self.blocks:
            yield from block.paged
        yield from self.left

    # ------------------------------------------------------------------------------------------------------ memory

    @property
    def held(self) -> int:
        """Device bytes taken now."""
        return self.pager.held_bytes if self.pager is not None else 0

    @property
    def wanted(self) -> int:
        """Device bytes that it would take if it could: all, or its ceiling."""
        ceiling = vram.whole(self._device) if self.ceiling is None else self.ceiling
        return max(self.least, min(self.most, ceiling))

    def load(self, device: torch.device, nbytes: float) -> None:
        """Hold up to this many bytes on the device, and no less than what the blocks need to pass through."""
        with self._lock:
            if device != self._device or self._pool is None:
                self._move(device)
            assert self._pool is not None
            want = int(max(self.least, min(nbytes, self.wanted)))
            left = self._pool.make_room(self, want - self.held)
            budget = max(self.least, min(want, self.held + left))
            if self._in_use:
                return  # whoever asks from within a block gets by with what there is
            try:
                # Memory made in inference mode could not be written to outside of it, by the copying thread for one.
                with torch.inference_mode(False), torch.no_grad():
                    if self.pager is None:
                        self.pager = self._open(budget)
                    else:
                        self.pager.resize(budget)
            except OverBudget as error:
                raise vram.out_of_vram(error, self.loader) from error

    def shrink(self, nbytes: int) -> int:
        """Give back about this much: residents first, then the window. Returns what was given back: nothing while a block
        runs, or while another thread loads or ends this model, for which nobody waits here."""
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            before = self.held
            if self.pager is None or self._in_use or nbytes <= 0:
                return 0
            if before - nbytes >= self.least:
                with torch.inference_mode(False), torch.no_grad():
                    self.pager.resize(before - nbytes)
            else:
                self.unload()
            return before - self.held
        finally:
            self._lock.release()

    def unload(self) -> None:
        """Give everything back: now, or when the block that is running is done."""
        with self._lock:
            if self._in_use:
                self._unloading = True
                return
            self._unloading = False
            pager, self.pager = self.pager, None
            if pager is not None:
                pager.close()
            self._factors.close()

    def __deepcopy__(self, memo: Any) -> Stream:
        raise NotWhileStreaming(f"A streamed model cannot be copied weight by weight. {REMEDY}")

    def close(self) -> None:
        """The model is gone. Nothing can be loaded any more."""
        with self._lock:
            self._in_use = 0
            self.unload()
            self._source.close()
            if self._pool is not None:
                self._pool.leave(self)
            self.blocks, self.left, self._patches, self._params = (), (), {}, {}
            self._patched = frozenset()

    def check(self) -> None:
        """Raises FileChanged where weights were used that were not what the file holds. The host waits for the device."""
        if self.pager is not None:
            self.pager.check()

    def _move(self, device: torch.device) -> None:
        self.unload()
        if self._pool is not None:
            self._pool.leave(self)
        self._device, self._params = device, {}
        self.least, self.most = bounds(self.layers, device)
        self._pool = vram.pool_of(device)
        self._pool.join(self)

    def _open(self, budget: int) -> Pager:
        assert self._pool is not None
        stored = sum(layer.stored_bytes for layer in self.layers)
        ram = vram.ram_for(stored) if self._device.type != "cpu" else None  # the CPU pins nothing
        pager = open_pager(
            self._source,
            self.layers,
            self._pool.budget,
            budget,
            self._device,
            ram=ram,
            ledger=self.ledger,
            **self.pager_options,
        )
        self._factors.parcels = self._open_parcels(ram)
        pager.along = self._along
        return pager

    def _open_parcels(self, ram: RamBudget | None) -> Parcels | None:
        return None if ram is None else open_parcels(self._device, ram, self.ledger)

    def _along(self, i: int) -> Along | None:
        """Block i is about to be copied, and what its patches need goes with it."""
        if i not in self._patched:
            return None
        return self._factors.along(i, self._patches, self._how(i))

    # ----------------------------------------------------------------------------------------------------- patches

    def set_patches(
        self, patches: Mapping[str, Sequence[Any]], *, one_pass: bool = False, uuid: UUID | None = None
    ) -> None:
        """From now on the weights are used with these patches. Only blocks whose patches are others come anew.

        one_pass: plain LoRA on fp16 weights may be added in one pass (`lora.py`), on a GPU; else in stock's steps. uuid: the
        patcher's name for these patches.
        """
        for one in self.left:
            if patches.get(one.key):
                raise NotWhileStreaming(f"{one.key} stays in the file, and a LoRA wants to change it. {REMEDY}")
        with self._lock:
            new = snapshot(patches, self.keys)
            patched_blocks = frozenset(
                i for i, block in enumerate(self.blocks) if any(one.key in new for one in block.paged)
            )
            changed = {
                i
                for i, block in enumerate(self.blocks)
                if any(differs(self._patches, new, one.key) for one in block.paged)
            }
            if one_pass != self._one_pass:
                changed |= patched_blocks
            self._factors.drop(sorted(changed))
            if self.pager is not None and self.pager.is_writable:
                self.pager.renew(sorted(changed))
            self._patches, self._patched, self._one_pass = new, patched_blocks, one_pass
            self.patches_uuid = uuid

    # ------------------------------------------------------------------------------------------------------ in use

    @contextlib.contextmanager
    def bound(self, i: int) -> Iterator[None]:
        """For this time the block's modules hold their weights."""
        before = self.enter(i)
        try:
            yield
        finally:
            self.leave(i, before)

    @torch.compiler.disable
    def enter(self, i: int) -> Bound:
        """Let the block's modules hold their weights. Returns what they held before, for `leave`."""
        pager = self._ready()
        weights = pager.acquire(i)
        self._in_use += 1
        self.last_used = time.monotonic()
        before: Bound = [(one, one.module._parameters[one.attribute]) for one in self.blocks[i].paged]  # type: ignore[misc]
        try:
            made = self._made(pager, i, weights)
            _hold(made.bound)
            if made.adds:
                self._add_on_the_way(i, made.bound)
            self._ask_ahead(pager, i)
        except BaseException:
            self.leave(i, before, spoilt=True)
            raise
        return before

    @torch.compiler.disable
    def leave(self, i: int, before: Bound, *, spoilt: bool = False) -> None:
        """The block is done. spoilt: its weights are patched in part, and nobody may use them like that."""
        assert self.pager is not None, "nothing is unloaded while it is in use"
        _hold(before)
        self._add_no_more(i)
        self._in_use -= 1
        self.pager.release(i)
        if spoilt:
            self.pager.renew((i,))
        if self.watcher is not None:
            self.watcher(i)
        if self._unloading:
            self.unload()

    def _ready(self) -> Pager:
        """The pager. What was unloaded in the middle of a run comes back, as small as can be."""
        if self.pager is None:
            if self._pool is None:
                raise RuntimeError("a streamed model runs before ComfyUI's memory management has loaded it")
            self.load(self._device, self.least)
        assert self.pager is not None
        return self.pager

    def _made(self, pager: Pager, i: int, weights: Mapping[str, torch.Tensor]) -> Made:
        """The block's parameters: views of the pager's tensors, patched at the first use after they came."""
        if not pager.is_writable:
            return self._patch(i, self._raw(i, weights), in_place=False)
        arrival = pager.arrival(i)
        if arrival.made is None:
            arrival.made = self._patch(i, self._raw(i, weights), in_place=True)
        made: Made = arrival.made
        return made

    def _add_on_the_way(self, i: int, bound: Bound) -> None:
        """While the block runs, its modules add LoRAs to what they make of their weights."""
        changed: list[tuple[Any, list[Any], list[Any]]] = []
        self._functions[i] = changed
        patches = self._factors.take(i, self._patches, self._how(i))
        for paged, _ in bound:
            changes = patches.get(paged.key)
            if isinstance(changes, Pairs) and changes.on_the_way:
                module: Any = paged.module
                before = module.weight_function
                after = [lora.Added(changes), *before]  # as in stock: before what other nodes do to the weight
                changed.append((module, before, after))
                module.weight_function = after

    def _add_no_more(self, i: int) -> None:
        if i in self._functions:
            for module, before, after in self._functions.pop(i):
                if module.weight_function is after:
                    module.weight_function = before
            self._factors.done(i)

    def _ask_ahead(self, pager: Pager, i: int) -> None:
        """Block i is patched: let what the next one needs for that be on its way."""
        for j in (*range(i + 1, len(self.blocks)), *range(i)) if self._patched else ():
            made: Made | None = pager.made(j)
            if j in self._patched and (made is None or made.adds):
                self._factors.ask(j, self._patches, self._how(j))
                return

    def _how(self, i: int) -> How:
        """In which way block i's patches are applied."""
        assert self.pager is not None, "patches are applied to what is loaded"
        one_pass = self._one_pass and lora.serves(self._device)
        return How(one_pass, i not in self.pager.plan.resident or not self.pager.is_writable)

    def _raw(self, i: int, weights: Mapping[str, torch.Tensor]) -> Bound:
        return [(paged, self._parameter(paged, weights[paged.name])) for paged in self.blocks[i].paged]

    def _parameter(self, paged: Paged, data: torch.Tensor) -> torch.nn.Parameter:
        stand_in: Any = paged.stand_in
        if is_quantised(stand_in):
            if paged.key not in self._params:
                self._params[paged.key] = stand_in._params.to_device(self._device)
            data = type(stand_in)(data, stand_in._layout_cls, self._params[paged.key])
        return torch.nn.Parameter(data, requires_grad=False)

    def _patch(self, i: int, raw: Bound, *, in_place: bool) -> Made:
        """Block i's parameters with their patches: in the pager's own tensors, or in ones of their own."""
        if i not in self._patched:
            return Made(raw)
        _hold(raw)
        bound: Bound = []
        adds = False
        with torch.no_grad(), self._factors.of(i, self._patches, self._how(i)) as patches:
            for paged, parameter in raw:
                changes = patches.get(paged.key)
                if changes is None:
                    bound.append((paged, parameter))
                    continue
                if not isinstance(changes, Pairs):
                    out: Any = patched(paged, changes, self._device)
                    if in_place:
                        out = _written(parameter, out)
                elif changes.on_the_way:
                    adds = True
                    bound.append((paged, parameter))
                    continue
                else:
                    out = lora.added(parameter.data, changes, in_place=in_place)
                bound.append((paged, torch.nn.Parameter(out, requires_grad=False)))
        return Made(bound, adds)


def _written(parameter: Any, out: Any) -> torch.Tensor:
    """`out`, its bytes in the parameter's memory."""
    if not is_quantised(parameter):
        written: torch.Tensor = parameter.data.copy_(out)
        return written
    parameter._qdata.copy_(out._qdata)
    quantised: torch.Tensor = type(out)(parameter._qdata, out._layout_cls, out._params)
    return quantised


def _hold(parameters: Bound) -> None:
    for paged, parameter in parameters:
        paged.hold(parameter)


class _Streamed:
    """What a block's class is mixed with."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stream, i = self.__dict__[STREAMED]
        before = stream.enter(i)
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            stream.leave(i, before)
