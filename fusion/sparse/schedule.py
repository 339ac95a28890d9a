"""The attentions of a run that stay dense: those of the first steps, which decide the layout, and
those of the first layers.

A step is found by comparing the call's noise level with those of the sampler, both of which stock
leaves in the transformer_options. Each sampler counts its own steps: the second one of a chain has
first steps, too. Without these options there are no first steps.

Layers are counted in each call of the model, by an object in its transformer_options: it goes away
with them, and calls on several cards do not meet. The numbers that models give their blocks would
not do, because some start again within a call, and some models give none.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from ..base.hooks import SPARSE, SPARSE_CALL
from ..stream.model_call import ModelCall, wrap

UNKNOWN = sys.maxsize  # the number of a layer that is not known
NEARLY = 1e-6  # tolerance, so that a quarter of 20 steps is 5 in spite of rounding


class CallSoFar:
    """The state of one call of the model."""

    def __init__(self) -> None:
        self.layers = 0
        self._early: bool | None = None

    def next_layer(self) -> int:
        """The number of this attention in the call."""
        self.layers += 1
        return self.layers - 1

    def is_early(self, options: Mapping[str, Any], share: float) -> bool:
        """Whether it is one of the first steps; asks the device once."""
        if self._early is None:
            self._early = is_early(options, share)
        return self._early


def is_early(options: Mapping[str, Any], share: float) -> bool:
    """Whether these options are of one of the first steps. share: of the sampler's steps."""
    now, levels = options.get("sigmas"), options.get("sample_sigmas")
    if share <= 0 or now is None or levels is None or len(levels) < 2:
        return False
    step = int((levels.to(now.device, torch.float32) - now.flatten()[:1].float()).abs().argmin())
    return step + NEARLY < share * (len(levels) - 1)


def call_of(options: Mapping[str, Any]) -> CallSoFar:
    """The call that an attention belongs to. Without one, the model was not called as ComfyUI's
    samplers do it, and its first layers are unknown unless it numbers its blocks itself."""
    found: CallSoFar | None = options.get(SPARSE_CALL)
    if found is None:
        found = CallSoFar()
        found.layers = options.get("block_index", UNKNOWN)
    return found


def attach(patcher: Any) -> None:
    """Count the attentions of each call of this MODEL, and of its clones, separately."""
    wrap(patcher, SPARSE, begin)


def begin(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """One call of the model, as stock's wrappers call it."""
    call = ModelCall(executor, args, kwargs)
    call.set_option(SPARSE_CALL, CallSoFar())
    return call.run()
