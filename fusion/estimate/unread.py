"""A MODEL built from a file's header, because an estimate needs every tensor's size and no numbers.

It is built as the loaders build theirs, and is never loaded, so it costs neither VRAM nor the
reading of embeddings. The file is closed again, so that it can be replaced while the page shows an
estimate of it.
"""

from __future__ import annotations

from typing import Any

import torch

from ...kernels_cuda import KernelPolicy
from ...memory import Checkpoint, Extent
from ..base import file_formats, other_cards
from ..base.errors import NotStreamable
from ..base.family import Role
from ..load.common import open_to_stream
from ..load.diffusion import streamed_from
from ..load.request import LoadRequest
from ..stream import progress

# bytes: smaller tensors are read, because networks are made by such flags and tables
SMALL = 1 << 16


class HeaderOnly(Checkpoint):
    """A checkpoint whose large tensors have no bytes when they are kept."""

    def keep(self, extent: Extent) -> torch.Tensor:
        if extent.nbytes <= SMALL:
            return super().keep(extent)
        return torch.empty(extent.nbytes, dtype=torch.uint8, device="meta")


def unread_model(path: str, policy: KernelPolicy, vram_budget: float, *, is_checkpoint: bool = False) -> Any | None:
    """The MODEL that the loader with these inputs would hand out, not for sampling. None: ComfyUI's
    own memory management would have its weights. Raises the loader's errors about the file."""
    request = LoadRequest(path, Role.DIFFUSION, policy, vram_budget, is_checkpoint)
    if vram_budget == 0 or other_cards.lacks(request.device) is not None:
        return None
    try:
        source = open_to_stream(path, HeaderOnly)
        try:
            with progress.for_no_node():
                return streamed_from(source, request)
        finally:
            source.close()
    except NotStreamable:
        if vram_budget > 0 or file_formats.is_ours_alone(path):
            raise
        return None
