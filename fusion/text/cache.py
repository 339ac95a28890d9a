"""Where the keys and values of a text that is being written are kept: room for some tokens, which grows before it is full.

Stock makes room for all that might be written at once, which for 32 thousand tokens of Qwen3 4B is 4.8 GB. Here there is room for
the prompt and a thousand tokens at first, and half as much again each time. Addresses stay in between.
"""

from __future__ import annotations

from typing import Any

import comfy.model_management
import torch
from torch import Tensor

from ..base.hooks import STREAMED
from .layer import Kept

AT_FIRST = 1024  # tokens to be written
STEP = 256  # rooms are multiples of it
BESIDE = 2**28  # bytes that computing takes beside keys and values


class Cache:
    """Of all layers of a stack, for one text."""

    def __init__(self, stack: Any, prompt: int, most: int, device: torch.device) -> None:
        """prompt: its tokens. most: of prompt and text."""
        self._stack, self._most, self._device = stack, most, device
        self.places = rounded(min(prompt + AT_FIRST, most))
        self._make_room(self.nbytes(self.places))
        self._rooms = [self._empty(self.places) for _ in stack.layers]

    def nbytes(self, places: int) -> int:
        return kept_bytes(self._stack, places)

    def of(self, layer: int) -> Kept:
        return Kept.of(self._rooms[layer])

    def grow(self) -> None:
        """Room for half as many tokens more, layer by layer: one layer's are there twice meanwhile."""
        before, self.places = self.places, min(rounded(self.places * 3 // 2), rounded(self._most))
        self._make_room(self.nbytes(self.places) - self.nbytes(before))
        for i, room in enumerate(self._rooms):
            self._rooms[i] = self._empty(self.places)
            self._rooms[i][..., :before, :] = room

    def _empty(self, places: int) -> Tensor:
        config = self._stack.config
        shape = (2, 1, config.num_key_value_heads, places, config.head_dim)
        # What nobody wrote yet is no number that would spoil a product with zero.
        return torch.zeros(shape, dtype=torch.float16, device=self._device)

    def _make_room(self, nbytes: int) -> None:
        """Of other models on the card, then of this one's resident weights: they can come again."""
        if self._device.type != "cuda":
            return
        management: Any = comfy.model_management
        wanted = nbytes + BESIDE
        own = [
            one
            for one in management.current_loaded_models
            if one.model is not None and any(part is self._stack for part in one.model.model.modules())
        ]
        if management.get_free_memory(self._device) < wanted:
            management.free_memory(wanted, self._device, own)
        short = wanted - int(management.get_free_memory(self._device))
        if short > 0 and (streamed := self._stack.layers[0].__dict__.get(STREAMED)) is not None:
            streamed[0].shrink(short)


def kept_bytes(stack: Any, places: int) -> int:
    """What the keys and values of so many tokens take, of all layers of a stack."""
    a_layer: int = 4 * places * stack.config.num_key_value_heads * stack.config.head_dim
    return a_layer * len(stack.layers)


def rounded(places: int) -> int:
    return -(-places // STEP) * STEP
