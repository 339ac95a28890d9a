"""Weights of a streamed model by name, read from the file: for code that saves, merges or patches
them one by one."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from ...memory import Checkpoint, Weight
from ..weights import ggml_blocks, scales
from ..weights.lazy_weight import Promised, promise
from ..weights.paged import Paged
from ..weights.patches import patched
from ..weights.scales import as_parameter
from ..weights.storage import is_quantised, storage_of
from .embedding import rows_of
from .segments import Segmentation


class FileWeights:
    """The weights of one model in its file."""

    def __init__(self, source: Checkpoint, whole: Segmentation, left: Sequence[Paged], lock: threading.RLock) -> None:
        """whole: the undivided blocks. left: weights that are not paged, because their modules read
        the file. lock: held while a module's parameter is replaced."""
        self._source, self._whole, self._left, self._lock = source, whole, tuple(left), lock

    def read(self, weight: Weight) -> torch.Tensor:
        """One weight as the pager brings it, on the CPU."""
        return as_brought(self._source.read(weight.extent), weight)

    def weight(self, key: str, patches: Sequence[Any] = (), device: torch.device | None = None) -> torch.Tensor:
        """One weight by its key in the model: as the model holds it, with these patches. On the CPU
        without patches, else on the device."""
        paged, weights = self._by_key[key]
        where = device if patches and device is not None else torch.device("cpu")
        with torch.no_grad():
            held = self._held(paged, {name: self.read(weight).to(where) for name, weight in weights.items()})
            if not patches:
                return held.data
            with self._lock:  # ComfyUI's functions look at what the module holds
                before = paged.module._parameters[paged.attribute]
                paged.module._parameters[paged.attribute] = held
                try:
                    return patched(paged, held.data, patches, where)
                finally:
                    paged.module._parameters[paged.attribute] = before

    def promised(self, key: str, keeper: Any) -> Promised:
        """The weight without patches, read when its numbers are asked for; of a quantised weight
        the numbers. keeper: kept alive as long as the promise is."""
        paged, weights = self._by_key[key]
        extent = weights[paged.name].extent

        def read(_keeper: Any = keeper) -> torch.Tensor:
            found: Any = self.weight(key)
            numbers: torch.Tensor = found.to(dtype=torch.float32).dequantize() if is_quantised(found) else found
            return numbers

        def rows(ids: torch.Tensor) -> torch.Tensor:
            return rows_of(self._source, extent, ids).to(paged.stand_in.dtype)

        return promise(paged.stand_in, key, read, rows if paged in self._left else None)

    def _held(self, paged: Paged, brought: Mapping[str, torch.Tensor]) -> torch.nn.Parameter:
        """These bytes, of a weight and of its scales by their names, as a parameter that code of ComfyUI
        takes."""
        stand_in: Any = paged.stand_in
        data, params = brought[paged.name], None
        if is_quantised(stand_in):
            params = scales.joined(scales.on_device(stand_in._params, data.device), paged.scales, brought)
        parameter = as_parameter(storage_of(stand_in).holding(data, params))
        held: torch.nn.Parameter = storage_of(parameter).for_comfyui()
        return held

    @cached_property
    def _by_key(self) -> Mapping[str, tuple[Paged, Mapping[str, Weight]]]:
        """The weights, and what is read of each: its numbers, and scales that are paged."""
        found: dict[str, tuple[Paged, Mapping[str, Weight]]] = {}
        for block, layer in zip(self._whole.blocks, self._whole.layers, strict=True):
            weights = {weight.name: weight for weight in layer.weights}
            found |= {one.key: (one, {name: weights[name] for name in one.names}) for one in block.paged}
        for paged in self._left:
            table: Any = paged.module
            weight = Weight(paged.name, table.fusestream_extent, paged.storage.dtype)
            found[paged.key] = (paged, {paged.name: weight})
        return found


def as_brought(stored: torch.Tensor, weight: Weight) -> torch.Tensor:
    """A weight's bytes in its file, uint8 [bytes] on any device, as the pager brings it there."""
    if weight.is_packed and not weight.is_converted:
        return stored
    return ggml_blocks.numbers(stored, weight.extent).to(weight.device_dtype)
