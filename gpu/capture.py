"""Whether work is being recorded instead of done, and host effects that must happen at each replay
too."""

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
    # Before torch has initialised CUDA nothing is recorded. This test is quicker than asking for a
    # card, and a model asks at each block.
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def each_time(effect: Effect) -> None:
    """Run a host effect now or, while work is recorded, at each replay. The effect must not hold
    results of the recorded work."""
    if _notes.effects is None:
        effect()
    else:
        _notes.effects.append(effect)


@contextlib.contextmanager
def noting_effects() -> Iterator[list[Effect]]:
    """Collect the effects that `each_time` is given in this block in a list."""
    found: list[Effect] = []
    before, _notes.effects = _notes.effects, found
    try:
        yield found
    finally:
        _notes.effects = before
