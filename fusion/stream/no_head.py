"""The matrix that a language model's words come from, where its file has none: text is encoded as
ever, and writing gets an answer.

Files for a model that only reads layers of the encoder are published without it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from ...kernels_cuda import LEDGER
from ..base.errors import WrongFile

PART = "lm_head"  # of stock's networks
WEIGHT = "lm_head.weight"


class NoHead(nn.Module):
    """Stands where stock has the matrix, without weights."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def forward(self, *_states: Any) -> NoReturn:
        raise WrongFile(
            f"{self.path} lacks the matrix that words come from (lm_head): it encodes prompts, and writes no text. For that get "
            "the whole text encoder."
        )


def take_out(model: nn.Module, missing: Iterable[str], path: Path) -> None:
    """Of every network in a text encoder model whose matrix is one of those that stock found no
    tensor for."""
    if not any(name.endswith(WEIGHT) for name in missing):
        return
    for network in [module for module in model.modules() if PART in module._modules]:
        network._modules[PART] = NoHead(path)
        LEDGER.say_once(
            f"{path} lacks the matrix that words come from: it encodes text, and writes none.", logging.INFO
        )
