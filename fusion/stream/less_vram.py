"""Runs again what ran out of VRAM, with ever less of a streamed model's weights on the card: all but
the window that its blocks pass through, then the window of the finest parts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from . import vram_pool
from .block_stream import BlockStream

Result = TypeVar("Result")


def with_ever_less(
    stream: BlockStream, run: Callable[[], Result], what: str, others_give_back: Callable[[], int] = lambda: 0
) -> Result:
    """What `run` makes. It is called again after torch.OutOfMemoryError as long as something can be
    given back, and one like the last is raised.

    what              in messages: "the step"
    others_give_back  before the weights do; returns bytes
    """
    residency, said = stream.residency, ""
    kind: type[torch.OutOfMemoryError] = torch.OutOfMemoryError
    ways: tuple[Callable[[], int] | None, ...] = (None, residency.keep_window, residency.keep_parts)
    for give_back in ways:
        if give_back is not None:
            freed = others_give_back() + give_back()
            if not freed:
                continue  # it would fail again
            if stream.device.type == "cuda":
                torch.cuda.empty_cache()
            logging.warning(
                "FuseStream: out of VRAM (%s). The weights give back %.2f GiB; %s runs again.",
                said.split(". GPU", maxsplit=1)[0],
                freed / vram_pool.GIB,
                what,
            )
        try:
            return run()
        except torch.OutOfMemoryError as error:
            said, kind = str(error) or said, type(error)
        # Here, after the `except`, the frames that failed are gone, and their tensors with them.
    raise kind(said)
