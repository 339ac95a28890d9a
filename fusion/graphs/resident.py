"""A model on the card, of which nothing streams, as the owner of captured calls.

Its calls may be captured while it is called many times, as live video calls a VAE, and its caller
has asked for the memory that it computes in. The weights lie where `vae/resident_patcher.py` has
put them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...gpu.graphed_calls import Settled
from ..base.hooks import HELD


class ResidentModel:
    """nbytes: device bytes that were asked for. Graphs take of them, because the model computes in
    them."""

    def __init__(self, model: nn.Module, device: torch.device, nbytes: int) -> None:
        self._model, self._device, self._left = model, device, nbytes
        self._held: Any = None  # the place of the model's weights at the last look
        self._moves = 0
        self.notes: dict[str, str] = {}

    @property
    def device(self) -> torch.device:
        return self._device

    def settled(self) -> Settled:
        held = self._model.__dict__.get(HELD)
        if held is None:
            return Settled(None, "its weights do not lie on the card")
        if held is not self._held:
            self._held, self._moves = held, self._moves + 1
        return Settled(self._moves)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[bool]:
        """Gives whether it is settled. Nothing else moves it while a prompt runs."""
        yield self.settled().generation is not None

    def ran_as_a_graph(self) -> None:
        """Does nothing: no block of it is watched."""

    def room(self, nbytes: int) -> bool:
        """Take some of the bytes that were asked for or, if negative, give them back. Returns
        whether they were left."""
        if nbytes > self._left:
            return False
        self._left -= nbytes
        return True

    def note(self, what: str, why: str) -> None:
        """Note something for the report."""
        self.notes[what] = why
