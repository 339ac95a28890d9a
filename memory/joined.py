"""Several checkpoints as one source of a pager: text encoders in files of their own that make one
model.

Their names may clash, because CLIP-L and CLIP-G name their tensors alike. So an extent has the
number of its checkpoint (`Extent.part`), by which its bytes are found. Tensors are asked for by
name in each checkpoint by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from .checkpoint import Checkpoint
from .file import Extent
from .open_file import OpenFile


class JoinedCheckpoint(Checkpoint):
    """These checkpoints, which close with it."""

    def __init__(self, members: Sequence[Checkpoint]) -> None:
        """members: each opened with its place in this list as its part."""
        self.members = tuple(members)
        self.files = tuple(file for member in members for file in member.files)
        # Names clash. Whoever wants a tensor by its name asks a member.
        self.extents: Mapping[str, Extent] = MappingProxyType({})

    @property
    def label(self) -> str:
        return " and ".join(member.label for member in self.members)

    @property
    def nbytes(self) -> int:
        return sum(member.nbytes for member in self.members)

    @property
    def mapped(self) -> bool:
        return any(member.mapped for member in self.members)

    def keep(self, extent: Extent) -> torch.Tensor:
        return self._member(extent).keep(extent)

    def check(self, extent: Extent | None = None) -> None:
        for member in self.members if extent is None else (self._member(extent),):
            member.check(extent)

    @property
    def has_changed(self) -> bool:
        return any(member.has_changed for member in self.members)

    def reopen(self) -> None:
        for member in self.members:
            member.reopen()

    def close(self) -> None:
        for member in self.members:
            member.close()

    def home(self, extent: Extent) -> OpenFile:
        return self._member(extent).home(extent)

    def _member(self, extent: Extent) -> Checkpoint:
        if extent.part >= len(self.members):
            raise ValueError(f"tensor {extent.name!r} is not of this checkpoint")
        return self.members[extent.part]
