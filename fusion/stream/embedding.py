"""A token embedding whose table stays in the file: the rows that are asked for are read, each once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...memory import Checkpoint, Extent
from ...memory.layer import DTYPES
from ..errors import NotWhileStreaming


class FileEmbedding:
    """What the class of the embedding is mixed with. What stock's own class makes of its rows, a scale or a cast, it makes of
    these."""

    fusestream_source: Checkpoint
    fusestream_extent: Extent

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Stock's Embedding: ids [...] -> [..., width] where the ids are."""
        module: Any = self
        table = module._parameters["weight"]
        rows, at = rows_of(self.fusestream_source, self.fusestream_extent, ids)
        module._parameters["weight"] = nn.Parameter(rows.to(table.dtype).to(ids.device), requires_grad=False)
        try:
            out: Tensor = super().forward(at.to(ids.device), *args, **kwargs)  # type: ignore[misc]
        finally:
            module._parameters["weight"] = table
        return out


def rows_of(source: Checkpoint, extent: Extent, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The rows [different ids, width] of a table in a file, as stored, on the CPU, and which of them each id is."""
    if ids.is_meta:
        raise NotWhileStreaming(
            "The text encoder is asked to encode before it was told where. Encode through CLIP.encode_from_tokens, as CLIP "
            "Text Encode does."
        )
    width = extent.shape[1]
    kind = DTYPES[extent.dtype]
    wanted, at = torch.unique(ids.cpu(), return_inverse=True)
    if wanted.numel() and not 0 <= int(wanted[0]) <= int(wanted[-1]) < extent.shape[0]:
        raise IndexError(f"token {int(wanted[-1])} is not one of the text encoder's {extent.shape[0]}")
    size = width * kind.itemsize
    bytes_ = torch.empty(wanted.numel() * size, dtype=torch.uint8)
    if wanted.numel():
        array: Any = bytes_.numpy()
        buffer = memoryview(array)
        for row, token in enumerate(wanted.tolist()):
            source.read_into(extent, buffer[row * size : (row + 1) * size], start=token * size)
    return bytes_.view(kind).view(-1, width), at
