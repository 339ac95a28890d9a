"""A token embedding whose table stays in the file: the rows that are asked for are read, each once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import comfy.lora
import torch
from comfy.weight_adapter.lora import LoRAAdapter
from torch import Tensor, nn

from ...memory import Checkpoint, Extent
from ..base.errors import NotWhileStreaming
from ..weights import ggml_blocks
from ..weights.lazy_weight import Promised
from ..weights.patches import stages


class FileEmbedding:
    """What the class of the embedding is mixed with. What stock's own class makes of its rows, a
    scale or a cast, it makes of these."""

    fusestream_source: Checkpoint
    fusestream_extent: Extent
    fusestream_patches: tuple[Any, ...] = ()

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Stock's Embedding: ids [...] -> [..., width] where the ids are."""
        module: Any = self
        table = module._parameters["weight"]
        path = self.fusestream_source.file_of(self.fusestream_extent).path
        wanted, at = rows_asked_for(ids, path)
        rows = rows_of(self.fusestream_source, self.fusestream_extent, wanted).to(table.dtype)
        if self.fusestream_patches:
            rows = patched_rows(rows, self.fusestream_patches, wanted, path)
        module._parameters["weight"] = nn.Parameter(rows.to(ids.device), requires_grad=False)
        try:
            out: Tensor = super().forward(at.to(ids.device), *args, **kwargs)  # type: ignore[misc]
        finally:
            module._parameters["weight"] = table
        return out


def rows_asked_for(ids: Tensor, path: Path) -> tuple[Tensor, Tensor]:
    """The different ids, in order, on the CPU, and which of them each id is."""
    if ids.is_meta:
        raise NotWhileStreaming(
            "The text encoder is asked to encode before it was told where. Encode through CLIP.encode_from_tokens, as CLIP "
            "Text Encode does.",
            path,
        )
    return torch.unique(ids.cpu(), return_inverse=True)  # type: ignore[no-any-return]


def rows_of(source: Checkpoint, extent: Extent, wanted: Tensor) -> Tensor:
    """These rows [n, width] of a table in a file, on the CPU: as stored, or unpacked. wanted: [n],
    different, in order."""
    if wanted.numel() and not 0 <= int(wanted[0]) <= int(wanted[-1]) < extent.shape[0]:
        raise IndexError(f"token {int(wanted[-1])} is not one of the text encoder's {extent.shape[0]}")
    size = extent.encoding.row_bytes(extent.shape)
    assert size is not None, "whose rows cannot be read by themselves is no table here"
    bytes_ = torch.empty(wanted.numel() * size, dtype=torch.uint8)
    source.read_rows(extent, bytes_, size, wanted.tolist())
    return ggml_blocks.rows(bytes_, extent)


# ------------------------------------------------------------------------------------------------------------- patches


def patched_rows(rows: Tensor, patches: Sequence[Any], wanted: Tensor, path: Path) -> Tensor:
    """Rows [n, width] of a table, on the CPU, as they are in the table with these patches: the same
    sums, of these rows alone. path: of the model's file, for messages."""
    for stage in stages(patches):
        out = comfy.lora.calculate_weight([_of_rows(patch, wanted, path) for patch in stage], rows.float(), "")
        rows = out.to(rows.dtype)
    return rows


def _of_rows(patch: Any, wanted: Tensor, path: Path) -> Any:
    """What a patch of a table does to some of its rows."""
    strength, value, strength_of_model, offset, function = patch
    if offset is None and function is None:
        if isinstance(value, list):  # another model's table, and that one's patches
            (table, convert), *further = value
            taken = (table.rows(wanted) if isinstance(table, Promised) else table.cpu()[wanted], convert)
            return (strength, [taken, *(_of_rows(one, wanted, path) for one in further)], strength_of_model, None, None)
        if type(value) is LoRAAdapter and all(part is None for part in value.weights[3:]):
            up, *others = value.weights
            return (strength, LoRAAdapter(value.loaded_keys, (up[wanted], *others)), strength_of_model, None, None)
        if isinstance(value, tuple):  # a difference, as `(table,)` or by name, or a replacement
            kind, (table, *others) = value if len(value) == 2 else ("diff", value)
            if kind in ("diff", "set") and not others:
                return (strength, (kind, (table.cpu()[wanted],)), strength_of_model, None, None)
    raise NotWhileStreaming(
        "The token embedding stays in the file, and something else than a LoRA or a merge wants to change it.", path
    )
