"""A MODEL whose attention is sparse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..fused.attention import HOOK, AttentionOverride
from . import schedule
from .attention import SparseAttention
from .settings import Settings


def sparse(model: Any, settings: Settings) -> Any:
    """A clone of a stock MODEL with sparse attention. These settings replace those it had."""
    clone = model.clone()
    options = clone.model_options.setdefault("transformer_options", {})
    held = options.get(HOOK)
    if isinstance(held, SparseAttention):
        held = held.held
    else:
        schedule.attach(clone)
    options[HOOK] = SparseAttention(settings, held)
    return clone


def reinstalled(held: Any, ours: AttentionOverride) -> Any:
    """The override of a model with override `held` after its own attention is replaced by `ours`:
    one that the user added stays."""
    if isinstance(held, SparseAttention):
        return held.around(reinstalled(held.held, ours))
    return ours if held is None or isinstance(held, AttentionOverride) else held


def sparse_of(options: Mapping[str, Any]) -> SparseAttention | None:
    """The sparse attention in these transformer_options; None: there is none."""
    found = options.get(HOOK)
    return found if isinstance(found, SparseAttention) else None
