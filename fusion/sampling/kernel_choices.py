"""Whether a model's last sampling chose kernels while it ran. Candidates round differently: with the same seed, what was sampled
before a choice and what is sampled after it may differ in the last bits. Once all is chosen they are the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ...kernels_cuda.tune.autotune import tuner
from ..base.format import counted
from ..base.hooks import UNDECIDED


@contextlib.contextmanager
def counting(model: Any) -> Iterator[None]:
    """For one sampling with stock's model, also one that is interrupted."""
    before = tuner().undecided
    try:
        yield
    finally:
        setattr(model, UNDECIDED, tuner().undecided - before)


def words(model: Any) -> str:
    """What the report says of it; nothing where all was chosen before."""
    calls: int = getattr(model, UNDECIDED, 0)
    if not calls:
        return ""
    return (
        f"Its last run chose kernels: {counted(calls, 'call')} came before a choice. The same seed may give other last bits in the "
        "next run, and the same ones from when all is chosen."
    )
