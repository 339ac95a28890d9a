"""Which attentions of a run stay dense: those of the first steps, which decide what is where, and those of the first layers.

Steps are told by the noise level of the call among those of the sampler, as stock leaves both in the transformer_options. Each
sampler counts its own: the second one of a chain has first steps too. A caller that leaves none there has no first steps.

Layers are counted in each call of the model, by what is put into its transformer_options on the way: it goes away with them,
and calls on several cards at once do not meet. The numbers that models give their blocks would not do: some begin anew within a
call, and some models give none.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from ..base.hooks import SPARSE, SPARSE_CALL
from ..stream.model_call import ModelCall, wrap

UNKNOWN = sys.maxsize  # the number of a layer of which nobody knows it
NEARLY = 1e-6  # a quarter of 20 steps is 5, whatever comes out behind the point


class CallSoFar:
    """What is known of one call of the model."""

    def __init__(self) -> None:
        self.layers = 0
        self._early: bool | None = None

    def next_layer(self) -> int:
        """The number of this attention."""
        self.layers += 1
        return self.layers - 1

    def is_early(self, options: Mapping[str, Any], share: float) -> bool:
        """Whether it is one of the first steps: asked of the device once."""
        if self._early is None:
            self._early = is_early(options, share)
        return self._early


def is_early(options: Mapping[str, Any], share: float) -> bool:
    """Whether these options are of one of the first steps, of which there are so many."""
    now, levels = options.get("sigmas"), options.get("sample_sigmas")
    if share <= 0 or now is None or levels is None or len(levels) < 2:
        return False
    step = int((levels.to(now.device, torch.float32) - now.flatten()[:1].float()).abs().argmin())
    return step + NEARLY < share * (len(levels) - 1)


def call_of(options: Mapping[str, Any]) -> CallSoFar:
    """The call that an attention belongs to. Where nobody has begun one, the model was not called as ComfyUI's samplers do it:
    then its first layers are not known, unless it numbers its blocks itself."""
    found: CallSoFar | None = options.get(SPARSE_CALL)
    if found is None:
        found = CallSoFar()
        found.layers = options.get("block_index", UNKNOWN)
    return found


def attach(patcher: Any) -> None:
    """Let each call of this MODEL, and of its clones, be counted by itself."""
    wrap(patcher, SPARSE, begin)


def begin(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """One call of the model, as stock's wrappers have it."""
    call = ModelCall(executor, args, kwargs)
    call.set_option(SPARSE_CALL, CallSoFar())
    return call.run()
