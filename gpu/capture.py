"""Whether work is being recorded instead of done, and what the host does beside it that is to happen at each replay too."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

Effect = Callable[[], None]


class _Notes(threading.local):
    effects: list[Effect] | None = None


_notes = _Notes()


def capturing() -> bool:
    """Whether torch's current stream is being recorded into a CUDA graph."""
    # Where torch has not begun with CUDA nothing is; to ask whether there is a card takes longer, and a model asks at each block.
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def each_time(effect: Effect) -> None:
    """What the host counts beside the device's work: done now, or, while work is recorded, whenever it is replayed. It must not
    hold what the recorded work computed."""
    if _notes.effects is None:
        effect()
    else:
        _notes.effects.append(effect)


@contextlib.contextmanager
def noting_effects() -> Iterator[list[Effect]]:
    """For this time what `each_time` is given goes into this list."""
    found: list[Effect] = []
    before, _notes.effects = _notes.effects, found
    try:
        yield found
    finally:
        _notes.effects = before
