"""Torch's current device and stream. Streams are cached by number, because torch makes an object at
each request, which takes ten times as long as asking for the number."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

# The current stream's number, by the device's. Private to torch, so its absence is no error.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda index: torch.cuda.current_stream(index).cuda_stream
)


def at(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make it torch's current device in this thread, and its context CUDA's; afterwards restore the
    one before. Managed memory needs that, because a model may be loaded for a second card while the
    first is current."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class Streams:
    """Streams of one device. An object is made once per number: the same number means the same
    stream, or one in its place."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._known: dict[int, Any] = {}

    @property
    def current(self) -> Any:
        """This thread's stream."""
        number = raw_stream(self._index)
        found = self._known.get(number)
        if found is None:
            found = self._known[number] = torch.cuda.current_stream(self._index)
        return found
