"""A large product outside of a model's blocks whose weight stays in the file: LTX-2.3's projection of
its prompt has 2.3 GB, for one product a prompt.

The pager's window has places of the size of the largest block, so a block of that size would take
all of it. Here the weight comes in slices of its rows, each into its place of the result. The next
slices are read while this one is copied and multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import comfy.model_management
import torch
from comfy.ops import CastWeightBiasOp
from torch import Tensor, nn

from ...memory import Checkpoint, Extent
from ..base.subclassing import mix
from ..weights import ggml_blocks
from ..weights.meta_tensor import StandIn
from ..weights.paged import Paged
from ..weights.storage import is_quantised
from .embedding import patched_rows
from .read_ahead import PIECE, ReadAhead, pieces_of

LEAST = 256 << 20  # bytes of a weight that stays


class FileLinear:
    """What the class of a product is mixed with."""

    fusestream_source: Checkpoint
    fusestream_extent: Extent
    fusestream_patches: tuple[Any, ...] = ()
    fusestream_bias_patches: tuple[Any, ...] = ()

    def forward(self, input: Tensor) -> Tensor:
        """Stock's Linear: input [..., k] -> [..., n], in its type."""
        bias = self._bias(input)
        out = input.new_empty(*input.shape[:-1], self.fusestream_extent.shape[0])
        for first, last, stored in self._slices(pinned=input.is_cuda):
            comfy.model_management.throw_exception_if_processing_interrupted()
            weight = self._weight(stored, first, last, input)
            out[..., first:last] = nn.functional.linear(input, weight, None if bias is None else bias[first:last])
        return out

    def _bias(self, like: Tensor) -> Tensor | None:
        """The bias [n] as stock would cast it, with patches. It is in memory, but ComfyUI loads a module as a whole or not."""
        module: Any = self
        bias = module.bias
        if bias is not None and self.fusestream_bias_patches:
            path = self.fusestream_source.file_of(self.fusestream_extent).path
            bias = patched_rows(bias.cpu(), self.fusestream_bias_patches, torch.arange(len(bias)), path)
        return None if bias is None else bias.to(like.device, like.dtype)

    def _slices(self, *, pinned: bool) -> Iterator[tuple[int, int, Tensor]]:
        """The weight's rows from .. to .., and their bytes on the host: uint8."""
        of_a_row = self.fusestream_extent.nbytes // self.fusestream_extent.shape[0]
        pieces = pieces_of(self.fusestream_extent, max(1, PIECE // of_a_row) * of_a_row)
        for piece, stored in ReadAhead(self.fusestream_source, pieces, pinned=pinned):
            first = piece.start // of_a_row
            yield first, first + piece.nbytes // of_a_row, stored

    def _weight(self, stored: Tensor, first: int, last: int, like: Tensor) -> Tensor:
        """Rows of the weight [last - first, k] as stock would cast them, with patches."""
        module: Any = self
        table = module._parameters["weight"]
        if not self.fusestream_patches:
            rows = ggml_blocks.rows(stored.to(like.device, non_blocking=True), self.fusestream_extent)
            return rows.to(table.dtype).to(like.dtype)
        rows = ggml_blocks.rows(stored, self.fusestream_extent).to(table.dtype)
        path = self.fusestream_source.file_of(self.fusestream_extent).path
        return patched_rows(rows, self.fusestream_patches, torch.arange(first, last), path).to(like)


def large_products(model: nn.Module, source: Checkpoint, blocks: Sequence[nn.Module]) -> Iterator[Paged]:
    """Let the large products of a model stay in the file, but for those in these blocks and those
    that are quantised."""
    paged = {id(module) for block in blocks for module in block.modules()}
    for name, module in list(model.named_modules()):
        if id(module) in paged or not isinstance(module, CastWeightBiasOp) or not hasattr(module, "in_features"):
            continue
        weight: Any = module._parameters.get("weight")
        if is_quantised(weight) or not isinstance(weight, StandIn):
            continue
        extent = weight.extent
        if extent is not None and extent.nbytes >= LEAST and len(extent.shape) == 2:
            mix(module, FileLinear, fusestream_source=source, fusestream_extent=extent)
            key = f"{name}.weight"
            yield Paged(key, key, module, "weight", module.weight)
