"""The state of the calls of one key, and torch's settings that belong to such a key."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from ..replay import Replay

MOST_PATIENCE = 64  # the most calls that must find everything in its place after wasted graphs
# Settings of torch's products, which other code may switch between two calls.
SWITCHES = (
    "allow_tf32",
    "allow_fp16_accumulation",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
)
OF_CUDNN = ("enabled", "benchmark", "deterministic", "allow_tf32")  # those of its convolutions


class CallState:
    """The progress of the calls of one key towards a graph.

    ran      calls so far, as far as they count
    refused  why they are not captured
    """

    def __init__(self) -> None:
        self.ran = 0
        self.refused: str | None = None
        self.is_for_now = False  # refused until the owner's memory changes
        self.graph: Replay | None = None
        # the memory that it reads and writes in addition to its arguments
        self.memory: object = None
        self.wasted = 0  # attempts in a row whose graph was never replayed
        self.calm = 0  # calls counted since the last move

    def moved(self) -> None:
        """Something that the call computes with has moved."""
        self.calm = 0
        if self.is_for_now:
            self.refused, self.is_for_now = None, False

    @property
    def is_calm(self) -> bool:
        return self.wasted < 2 or self.calm >= min(2 ** (self.wasted - 1), MOST_PATIENCE)


def surroundings() -> Hashable:
    """Settings that torch computes with and that no argument shows."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        *(_asked(matmul, name) for name in SWITCHES),
        *(_asked(cudnn, name) for name in OF_CUDNN),
    )


def _asked(owner: Any, name: str) -> Any:
    """A setting; None if this torch lacks it, or does not tell because it is about to replace
    it."""
    try:
        return getattr(owner, name, None)
    except RuntimeError:
        return None
