"""A block's weights as its modules hold them: views of the pager's tensors, with the model's
patches.

parameters   made once for a layer and a slot, and held again whenever the layer comes to that slot
patched      in the pager's own tensors at the first use after they came; in copies where those are read-only
on the way   weights that each product converts to fp16 keep their storage: plain LoRA is added to the converted
             copy (`lora.Added`), other patches are applied to it by ComfyUI's functions (`patches.Applied`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...memory import Weights
from ..weights import lora, scales
from ..weights.paged import Paged
from ..weights.patches import (
    Applied,
    PatchSet,
    differs,
    patched,
    snapshot,
)
from ..weights.scales import as_parameter
from ..weights.storage import is_quantised, storage_of
from .blocks import Block, Parameters
from .lora_factors import (
    Factors,
    Later,
    Pairs,
    PatchRoute,
)


class Made(NamedTuple):
    """A block's parameters as its modules hold them.

    adds   whether some have patches that are applied for each product
    wrote  whether patches were written into the pager's memory
    """

    parameters: Parameters
    adds: bool = False
    wrote: bool = False


class PatchedWeights:
    """The patches of one segmentation's blocks."""

    def __init__(self, blocks: Sequence[Block], left: Sequence[Paged]) -> None:
        """left: tables and products that stay in the file, whose rows are patched as they are read
        (`embedding.py`, `file_linear.py`)."""
        self.factors = Factors(blocks)
        self.one_pass = False
        self._blocks = blocks
        self._left = left
        self._keys = frozenset(one.key for block in blocks for one in block.paged)
        self._patches: PatchSet = {}
        self._patched: frozenset[int] = frozenset()  # blocks that have patches
        self._scales: dict[str, Any] = {}  # scales of quantised weights that are not paged, on the device
        # For each block in use: modules, their weight functions before and during it.
        self._functions: dict[int, list[tuple[Any, list[Any], list[Any]]]] = {}

    def __contains__(self, i: int) -> bool:
        """Whether block i has patches."""
        return i in self._patched

    def __bool__(self) -> bool:
        """Whether any block has."""
        return bool(self._patched)

    def become(self, patches: Mapping[str, Sequence[Any]], *, one_pass: bool) -> set[int]:
        """Use the weights with these patches from now on. Returns the blocks whose patches differ
        from before."""
        for one in self._left:
            table: Any = one.module
            table.fusestream_patches = tuple(patches.get(one.key, ()))
            table.fusestream_bias_patches = tuple(patches.get(f"{one.key.removesuffix('weight')}bias", ()))
        new = snapshot(patches, self._keys)
        of = {i: [one.key for one in block.paged] for i, block in enumerate(self._blocks)}
        patched_blocks = frozenset(i for i, keys in of.items() if any(key in new for key in keys))
        changed = {i for i, keys in of.items() if any(differs(self._patches, new, key) for key in keys)}
        if one_pass != self.one_pass:
            changed |= patched_blocks
        self.factors.drop(sorted(changed))
        self._patches, self._patched, self.one_pass = new, patched_blocks, one_pass
        return changed

    def forget_device(self) -> None:
        """The model left the device, or will run elsewhere."""
        self._scales = {}

    def along(self, i: int, route: PatchRoute) -> Any:
        """The tensors of block i's patches, for the copy that brings the block; None: it has none."""
        return self.factors.along(i, self._patches, route) if i in self._patched else None

    def ask(self, i: int, route: PatchRoute) -> None:
        """Block i is next: the tensors of its patches start to travel."""
        self.factors.ask(i, self._patches, route)

    def made(self, i: int, weights: Weights, route: PatchRoute, device: torch.device, *, in_place: bool) -> Made:
        """Block i's parameters with its patches, made of the pager's tensors. in_place: patches are
        written into these tensors, instead of into copies."""
        if weights.kept is None:
            weights.kept = [self.parameter(one, weights, device) for one in self._blocks[i].paged]
        raw: Parameters = weights.kept
        if i not in self._patched:
            return Made(raw)
        block, adds, wrote, found = self._blocks[i], False, False, []
        block.hold(raw)  # ComfyUI's functions patch what a module holds
        with torch.no_grad(), self.factors.of(i, self._patches, route) as patches:
            for paged, parameter in zip(block.paged, raw, strict=True):
                changes = patches.get(paged.key)
                on_the_way = _is_on_the_way(changes)
                adds |= on_the_way
                if changes is None or on_the_way:
                    found.append(parameter)
                    continue
                wrote = in_place
                if isinstance(changes, Pairs):
                    out: Any = lora.added(parameter.data, changes, in_place=in_place)
                else:
                    out = patched(paged, parameter, changes, device)
                    out = storage_of(parameter).write(out) if in_place else out
                found.append(as_parameter(out))
        return Made(found, adds, wrote)

    def add_on_the_way(self, i: int, route: PatchRoute) -> None:
        """Let block i's modules apply patches to the fp16 copies of their weights, until
        `add_no_more`."""
        changed: list[tuple[Any, list[Any], list[Any]]] = []
        self._functions[i] = changed
        patches = self.factors.take(i, self._patches, route)
        for paged in self._blocks[i].paged:
            changes = patches.get(paged.key)
            if changes is not None and _is_on_the_way(changes):
                module: Any = paged.module
                before = module.weight_function
                change = lora.Added(changes) if isinstance(changes, Pairs) else Applied(paged, changes)
                after = [change, *before]  # as in ComfyUI: before functions of other nodes
                changed.append((module, before, after))
                module.weight_function = after

    def add_no_more(self, i: int) -> None:
        """Block i is done."""
        if i in self._functions:
            for module, before, after in self._functions.pop(i):
                if module.weight_function is after:
                    module.weight_function = before
            self.factors.done(i)

    def parameter(self, paged: Paged, weights: Weights, device: torch.device) -> torch.nn.Parameter:
        """One of a layer's weights as the model holds it; a quantised one with its scales."""
        data, stand_in = weights[paged.name], paged.stand_in
        if is_quantised(stand_in):
            held: Any = stand_in
            if paged.key not in self._scales:
                self._scales[paged.key] = scales.on_device(held._params, device)
            own = scales.joined(self._scales[paged.key], paged.scales, weights)
            data = storage_of(stand_in).holding(data, own)
        return as_parameter(data)


def _is_on_the_way(changes: Any) -> bool:
    return isinstance(changes, Later) or (isinstance(changes, Pairs) and changes.on_the_way)
