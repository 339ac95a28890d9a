"""Sentencepiece models: the tokenizers that some text encoders' files carry as a tensor of bytes.
Stock gives the bytes to the same library, whose errors for broken ones name no file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..base.errors import WrongFile

if TYPE_CHECKING:
    import torch

TENSOR = "spiece_model"  # stock's name


def refuse_broken(path: Path | str, model: torch.Tensor) -> None:
    """Raise `WrongFile` if the bytes from this file are no tokenizer."""
    from sentencepiece import SentencePieceProcessor  # noqa: PLC0415 - only these encoders need it

    try:
        count = SentencePieceProcessor(model_proto=model.numpy().tobytes()).get_piece_size()
    except (RuntimeError, ValueError, TypeError) as error:
        raise _broken(path, str(error)) from error
    if count == 0:
        raise _broken(path, "it has no words")


def _broken(path: Path | str, why: str) -> WrongFile:
    return WrongFile(
        f"{path}: the tokenizer in it is damaged, it cannot be read as a sentencepiece model ({why}). Download the file again."
    )
