"""The vision part of a language model whose file has none: text is encoded as ever, and a picture
gets an answer."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from ...kernels_cuda import LEDGER
from ..base.errors import WrongFile

PART = "visual"  # of stock's networks
WARNING = "clip missing"


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


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Stock warns of what a text encoder lacks, by hundreds of names: not in this block, of what
    this thread builds."""
    thread = threading.get_ident()

    def is_told(record: logging.LogRecord) -> bool:
        return record.thread != thread or not record.getMessage().startswith(WARNING)

    stocks = logging.getLogger()
    stocks.addFilter(is_told)
    try:
        yield
    finally:
        stocks.removeFilter(is_told)


def take_out(model: nn.Module, path: Path) -> None:
    """Of every network in a text encoder model; said once where there was one."""
    for network in [module for module in model.modules() if PART in module._modules]:
        network._modules[PART] = NoVision(path)
        LEDGER.say_once(f"{path} has no vision part: it encodes text, and no pictures.", logging.INFO)
