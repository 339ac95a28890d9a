"""Prompts that are copied to the card once, instead of at every step.

Stock keeps a prompt's embeddings in RAM, joins those of both prompts there at each step, and copies
them to the card while the card waits: three to four milliseconds of every step with UMT5's.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from ..base.subclassing import mix

# Larger ones stay where stock has them, because their VRAM is not in the estimate.
MOST_BYTES = 64 * 2**20


def attach(model: Any) -> None:
    """Let stock's model make its conditions on the device that it samples on."""
    mix(model, _OnDevice)


class _OnDevice:
    """Mixed into the model's class. `extra_conds` is called once for each prompt of a sampling."""

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        conditions: dict[str, Any] = super().extra_conds(**kwargs)  # type: ignore[misc]
        device = kwargs.get("device")
        if device is None:
            return conditions
        return {name: _moved(condition, device) for name, condition in conditions.items()}


def _moved(condition: Any, device: torch.device) -> Any:
    """The condition with its tensor on the device, if it is one tensor."""
    tensor = getattr(condition, "cond", None)
    if not isinstance(tensor, torch.Tensor) or tensor.device == device or tensor.nbytes > MOST_BYTES:
        return condition
    moved = copy.copy(condition)
    moved.cond = tensor.to(device)
    return moved
