"""The quality *Draft*: Fastest, and less work beside it.

    policy            turbo, as of Fastest
    sparse attention  bounded, where a video is long enough
    step cache        of 20 steps and more

It is what the nodes FuseStream Sparse Attention and FuseStream Step Cache would do behind the loader, with settings
that are further from all of the work than their own. Either node behind the loader wins with its settings.
"""

from __future__ import annotations

from typing import Any

from ..base.format import DRAFT
from ..sparse.model import sparse
from ..sparse.settings import Settings as SparseSettings
from ..step_cache.model import step_cached
from ..step_cache.settings import Settings as StepCacheSettings

SPARSE = SparseSettings(method="bounded", left_out=0.2, dense_steps=0.2)
STEP_CACHE = StepCacheSettings(error=0.2)


def at_quality(model: Any, quality: str) -> Any:
    """The stock MODEL as a loader of this quality gives it, beside the policy that the quality has."""
    return step_cached(sparse(model, SPARSE), STEP_CACHE) if quality == DRAFT else model
