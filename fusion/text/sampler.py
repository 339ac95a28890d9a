"""The choice of the next token, as stock makes it: the same seed gives the same tokens where the
logits are the same.

Stock's own function chooses. The set of tokens so far, which stock reads on the host to penalise
repetition, is kept on the device here, so nothing waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Wish:
    """How to choose, as stock's nodes ask for it."""

    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float | None
    seed: int | None

    @property
    def draws(self) -> bool:
        return self.do_sample and self.temperature != 0.0

    @property
    def minds_repetition(self) -> bool:
        return self.draws and (self.repetition_penalty != 1.0 or bool(self.presence_penalty))


class Sampler:
    """Chooses the tokens of one text."""

    def __init__(self, network: Any, wish: Wish, words: int, before: Sequence[int], device: torch.device) -> None:
        """words: size of the vocabulary. before: tokens that count as written already."""
        self._network, self._wish = network, wish
        seed: Any = wish.seed
        self._generator = torch.Generator(device=device).manual_seed(seed) if wish.do_sample else None
        self._written = torch.zeros(1, words, dtype=torch.bool, device=device)
        for token in before:
            self._written[0, token] = True

    def __call__(self, logits: Tensor) -> Tensor:
        """The next token [1, 1], from logits [1, words] fp32, which may be overwritten."""
        w = self._wish
        if w.minds_repetition:
            logits = torch.where(self._written, self._less_likely(logits), logits)
        token: Tensor = self._network.sample_token(
            logits, w.temperature, w.top_k, w.top_p, w.min_p, 1.0, [], self._generator, do_sample=w.do_sample
        )
        if w.minds_repetition:
            self._written.scatter_(1, token, True)
        return token

    def _less_likely(self, logits: Tensor) -> Tensor:
        """Stock's penalties, applied to all logits."""
        by, less = self._wish.repetition_penalty, self._wish.presence_penalty
        if by != 1.0:
            logits = torch.where(logits < 0, logits * by, logits / by)
        return logits - less if less else logits
