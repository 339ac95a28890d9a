"""Whether a model's last sampling chose kernels while it ran. Candidates round differently, so
samplings with the same seed before and after a choice may differ in the last bits. Once all is
chosen they are equal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ...kernels_cuda.tune.autotune import tuner
from ..base.format import counted
from ..base.hooks import UNDECIDED


@contextlib.contextmanager
def counting(model: Any) -> Iterator[None]:
    """Count during one sampling with stock's model, also if it is interrupted."""
    before = tuner().undecided
    try:
        yield
    finally:
        setattr(model, UNDECIDED, tuner().undecided - before)


def words(model: Any) -> str:
    """The report's sentence on it; empty if everything was chosen before."""
    calls: int = getattr(model, UNDECIDED, 0)
    if not calls:
        return ""
    return (
        f"Its last run chose kernels: {counted(calls, 'call')} came before a choice. The same seed may give other last bits in the "
        "next run, and the same ones from when all is chosen."
    )
