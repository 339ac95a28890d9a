"""One sampling on several cards, as stock's *MultiGPU CFG Split* does it: each card has its own
model and stream, and computes some of the prompts in its own thread.

A failure on one card has to reach the others. ComfyUI tells an interrupt to one thread only; and
after an error, or an interrupt, it waits five seconds for the other threads and then goes on,
although they may still compute. So a call that fails ends those of the other cards at their next
block, with the same error (`vram_retry.py`), and a sampling does not end before all of them have
(`StreamingModelPatcher.cleanup`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import comfy.patcher_extension

from ..base.hooks import CARDS_WRAPPER, RECKONING, STREAM
from ..stream.card_sync import Together
from .vram_estimate import Reckoning

CARDS = "multigpu"  # stock's key of a MODEL's additional ones


def attach(patcher: Any) -> None:
    """Let samplings with this streaming patcher, and with its clones, know of the other cards that
    stock gives them."""
    patcher.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.PREPARE_SAMPLING, CARDS_WRAPPER, begin)


def begin(
    executor: Any, patcher: Any, shape: Sequence[int], conds: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Called before the models of a sampling are loaded, as stock's wrappers are."""
    model, others = patcher.model, [further.model for further in patcher.get_additional_models_with_key(CARDS)]
    together = Together() if others else None
    for each in (model, *others):
        getattr(each, STREAM).together = together
    if not others:
        return executor(patcher, shape, conds, *args, **kwargs)
    reckoning: Reckoning = getattr(model, RECKONING)
    prompts = sum(map(len, conds.values()))
    with reckoning.split([getattr(each, RECKONING) for each in others], is_alone=prompts <= 1 + len(others)):
        return executor(patcher, shape, conds, *args, **kwargs)
