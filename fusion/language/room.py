"""What ComfyUI is to keep free of the weights of a text encoder that can write.

It keeps the same for whatever computes, in which keys and values of a text are not foreseen: they would lie in what it keeps for
the desktop, or weights would have to leave for them at each text, which takes half a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import comfy.model_management
import torch

from .cache import AT_FIRST, kept_bytes, rounded

PIXELS = 28 * 28  # of a picture for each of its tokens, at the least


class AsksForRoom:
    """What the class of stock's text encoder model is mixed with."""

    def memory_estimation_function(self, tokens: Mapping[str, Any], device: torch.device | None = None) -> float:
        """Bytes, for these tokens as a tokenizer gives them. ComfyUI adds what it reserves for the desktop."""
        stocks = getattr(super(), "memory_estimation_function", None)
        known: float = 0 if stocks is None else stocks(tokens, device=device)
        if device is None or device.type == "cpu":
            return known
        management: Any = comfy.model_management
        computing: float = management.minimum_inference_memory() - management.extra_reserved_memory()
        places = rounded(max(lengths(tokens), default=0) + AT_FIRST)
        return max(known, computing + max(kept_bytes(stack, places) for stack in self._stacks()))

    def _stacks(self) -> Iterator[Any]:
        from .stack import encoders  # noqa: PLC0415 - which mixes this class into models

        return (net.model for _, net in encoders(self))  # type: ignore[arg-type]


def lengths(tokens: Mapping[str, Any]) -> Iterator[int]:
    """Of each prompt."""
    for prompts in tokens.values():
        for prompt in prompts:
            yield sum(_places(entry) for entry in prompt)


def _places(entry: Sequence[Any]) -> int:
    """Of a token, an embedding of several, or a picture."""
    token = entry[0]
    if isinstance(token, Mapping):
        data = token.get("data")
        return 1 if data is None else -(-data.shape[-3] * data.shape[-2] // PIXELS) * max(1, data.shape[0])
    return token.shape[0] if isinstance(token, torch.Tensor) and token.ndim > 1 else 1
