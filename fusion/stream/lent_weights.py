"""Weights of blocks that run outside of a call of the model, once for each prompt, as the blocks do
that prepare LTX-2.3's text: gigabytes, of which the steps need nothing.

They are brought for one use, and their VRAM is free again behind it. In the pager they would take
the room of what every step needs. Blocks of one list run in its order, so the first bytes of the
next block are read while this one computes.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

from ...memory import Checkpoint, Layer, Weights
from .file_weights import as_brought
from .read_ahead import ReadAhead, pieces_of


class LentWeights:
    """Brings blocks of one model, one after another."""

    def __init__(self, source: Checkpoint) -> None:
        self._source = source
        self._ahead: tuple[int, ReadAhead] | None = None  # of the block that is next, and its number

    def bring(self, i: int, layers: Sequence[Layer], paged: Container[int], device: torch.device) -> Weights:
        """Block i's weights on the device, as the pager brings them.

        layers  of all blocks
        paged   numbers of those that the pager brings
        """
        reads = self._begun(i, layers, device)
        with torch.inference_mode(False):  # views of another type would stay inference tensors
            rooms = {
                weight.extent: torch.empty(weight.extent.nbytes, dtype=torch.uint8, device=device)
                for weight in layers[i].weights
            }
            for piece, stored in reads:
                rooms[piece.extent][piece.start : piece.start + piece.nbytes].copy_(stored, non_blocking=True)
            weights = Weights()
            for weight in layers[i].weights:
                weights[weight.name] = as_brought(rooms[weight.extent], weight)
        if i + 1 not in paged and are_neighbours(layers, i):
            self._ahead = i + 1, self._reads(layers[i + 1], device)
        return weights

    def drop(self) -> None:
        """Read no more ahead: the model is called, or gone."""
        if self._ahead is not None:
            self._ahead[1].close()
            self._ahead = None

    def _begun(self, i: int, layers: Sequence[Layer], device: torch.device) -> ReadAhead:
        if self._ahead is not None and self._ahead[0] == i:
            reads, self._ahead = self._ahead[1], None
            return reads
        self.drop()
        return self._reads(layers[i], device)

    def _reads(self, layer: Layer, device: torch.device) -> ReadAhead:
        extents = dict.fromkeys(weight.extent for weight in layer.weights)
        pieces = (piece for extent in extents for piece in pieces_of(extent))
        return ReadAhead(self._source, pieces, pinned=device.type == "cuda")


def are_neighbours(layers: Sequence[Layer], i: int) -> bool:
    """Whether block i and the next one are members of one list."""
    lists = [layer.name.rpartition(".")[0] for layer in layers[i : i + 2]]
    return len(lists) == 2 and lists[0] == lists[1]
