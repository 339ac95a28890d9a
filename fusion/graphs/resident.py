"""Whose calls may be captured (`calls.py`) though nothing of it streams: a model whose weights lie
on the card (`vae/resident_patcher.py`), while somebody calls it many times and has asked for the
memory that it computes in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..base.hooks import HELD
from ..stream.stability import Settled


class Lying:
    """nbytes: what was asked for. What is captured takes of it, since it is what the model computes in."""

    def __init__(self, model: nn.Module, device: torch.device, nbytes: int) -> None:
        self._model, self._device, self._left = model, device, nbytes
        self._held: Any = None  # where it had what lies there, when it was looked for last
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
        """Nobody else moves it while a prompt runs."""
        yield self.settled().generation is not None

    def ran_as_a_graph(self) -> None:
        """No blocks of it are watched."""

    def take_beside(self, nbytes: int) -> bool:
        """Whether so many bytes are left of what was asked for; they are taken."""
        if nbytes > self._left:
            return False
        self._left -= nbytes
        return True

    def give_back_beside(self, nbytes: int) -> None:
        self._left += nbytes

    def note(self, what: str, why: str) -> None:
        """For the report."""
        self.notes[what] = why
