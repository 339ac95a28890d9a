"""The keys and values of a text that is being written, in buffers that grow before they are full.

Stock allocates for the longest text that may be written, which for 32 thousand tokens of Qwen3 4B
is 4.8 GB. This cache starts with the prompt and a thousand tokens, and grows by half each time.
Addresses stay the same between two growths.
"""

from __future__ import annotations

from typing import Any

import comfy.model_management
import torch
from torch import Tensor

from ..base.hooks import STREAMED
from .layer import Kept
from .layer_kind import kind_of

AT_FIRST = 1024  # tokens to be written that the first buffers have room for
STEP = 256  # buffers hold a multiple of so many tokens
BESIDE = 2**28  # bytes that computing takes in addition to keys and values


class Cache:
    """Keys and values of all layers of a stack, for one text."""

    def __init__(self, stack: Any, prompt: int, most: int, device: torch.device) -> None:
        """prompt: tokens of the prompt. most: tokens of prompt and text together."""
        self._stack, self._most, self._device = stack, most, device
        self.places = rounded(min(prompt + AT_FIRST, most))
        self._make_room(self.nbytes(self.places))
        self._rooms = [self._empty(self.places) for _ in stack.layers]

    def nbytes(self, places: int) -> int:
        return kept_bytes(self._stack, places)

    def of(self, layer: int) -> Kept:
        return Kept.of(self._rooms[layer])

    def grow(self) -> None:
        """Make room for half as many tokens more, layer by layer, so that only one layer is held
        twice meanwhile."""
        before, self.places = self.places, min(rounded(self.places * 3 // 2), rounded(self._most))
        self._make_room(self.nbytes(self.places) - self.nbytes(before))
        for i, room in enumerate(self._rooms):
            self._rooms[i] = self._empty(self.places)
            self._rooms[i][..., :before, :] = room

    def _empty(self, places: int) -> Tensor:
        config = self._stack.config
        shape = (2, 1, config.num_key_value_heads, places, config.head_dim)
        # Zeros, because uninitialised memory may hold NaN, which stays NaN times zero.
        return torch.zeros(shape, dtype=kept_type(self._stack), device=self._device)

    def _make_room(self, nbytes: int) -> None:
        """Free memory of other models on the card first, then of this one's resident weights, which
        can stream again."""
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


def kept_type(stack: Any) -> torch.dtype:
    """The type of keys and values of a fused stack, which is that of all its layers."""
    return kind_of(stack.layers[0]).kept


def kept_bytes(stack: Any, places: int) -> int:
    """Bytes that keys and values of so many tokens take in all layers of a stack."""
    config = stack.config
    a_layer: int = 2 * kept_type(stack).itemsize * places * config.num_key_value_heads * config.head_dim
    return a_layer * len(stack.layers)


def rounded(places: int) -> int:
    return -(-places // STEP) * STEP
