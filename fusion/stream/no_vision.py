"""The vision part of a language model whose file has none: text is encoded as ever, and a picture gets an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from ..errors import WrongFile

PART = "visual"  # of stock's networks


class NoVision(nn.Module):
    """Stands where stock has the vision part, without weights."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def forward(self, *_picture: Any) -> NoReturn:
        raise WrongFile(
            f"{self.path} has no vision part, as GGUF files of language models do not, and this prompt has a picture. Get the text "
            "encoder as a .safetensors file, or leave the picture out."
        )


def take_out(model: nn.Module, path: Path) -> None:
    """Of every network in a text encoder model."""
    for network in [module for module in model.modules() if PART in module._modules]:
        network._modules[PART] = NoVision(path)
