"""A MODEL whose attention is sparse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base.trained_sparse import TrainedSparse
from ..fused.attention import HOOK, AttentionOverride
from . import schedule
from .attention import SparseAttention
from .override import SparseOverride
from .settings import Settings
from .trained import TrainedAttention


def sparse(model: Any, settings: Settings) -> Any:
    """A clone of a stock MODEL with sparse attention. These settings replace those it had. If it was
    trained sparse, it stays as trained, with the share that they ask for."""
    clone = model.clone()
    options = clone.model_options.setdefault("transformer_options", {})
    held = options.get(HOOK)
    if isinstance(held, TrainedAttention):
        options[HOOK] = held.asked(settings)
        return clone
    if isinstance(held, SparseAttention):
        held = held.held
    else:
        schedule.attach(clone)
    options[HOOK] = SparseAttention(settings, held)
    return clone


def install_trained(model: Any, trained: TrainedSparse) -> None:
    """Let a stock MODEL with our attention compute as it was trained."""
    options = model.model_options["transformer_options"]
    options[HOOK] = TrainedAttention(trained, options[HOOK])


def reinstalled(held: Any, ours: AttentionOverride) -> Any:
    """The override of a model with override `held` after its own attention is replaced by `ours`:
    one that the user added stays."""
    if isinstance(held, SparseOverride):
        return held.around(reinstalled(held.held, ours))
    return ours if held is None or isinstance(held, AttentionOverride) else held


def sparse_of(options: Mapping[str, Any]) -> SparseOverride[Any] | None:
    """The sparse attention in these transformer_options; None: there is none."""
    found = options.get(HOOK)
    return found if isinstance(found, SparseOverride) else None
