"""Torch's current device and stream. For the stream is asked often: torch makes an object of it each time, which takes ten times as
long as to ask for its number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

# By a device's number. Private to torch, so its absence is no error.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda index: torch.cuda.current_stream(index).cuda_stream
)


def at(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """For this time it is torch's current device in this thread, and its context CUDA's; afterwards what was before. Managed memory
    asks for that, and who loads a model for a second card has the first one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class Streams:
    """Of one device. A stream's object is made once: whoever has the number again has the same stream, or one in its place."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._known: dict[int, Any] = {}

    @property
    def current(self) -> Any:
        """This thread's."""
        number = raw_stream(self._index)
        found = self._known.get(number)
        if found is None:
            found = self._known[number] = torch.cuda.current_stream(self._index)
        return found
