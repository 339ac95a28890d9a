"""Formats of files by name: which of them stock reads, FuseStream, or both; and the remedy for
weights that cannot stream, which depends on that."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

OURS_ALONE = (".gguf",)
HEADED = (".safetensors", ".sft", *OURS_ALONE)
# Remedies for a model that cannot stream, and for a use that streaming does not allow.
AS_STOCK = "Set vram_budget to 0 to load it as stock does."
OTHER_FILE = "ComfyUI reads no GGUF files, so there is no other way to load it: get the model as a .safetensors file."
AS_STOCK_FOR_THAT = "Set vram_budget to 0 in its FuseStream loader for that."
OTHER_FILE_FOR_THAT = (
    "For that get the model as a .safetensors file, and set vram_budget to 0 in its FuseStream loader."
)

STREAMS_ALONE = (
    "is a GGUF file, which ComfyUI does not read by itself: FuseStream streams it. Set vram_budget to -1, or to the GiB that it "
    "may take."
)


def has_header(path: str | PathLike[str]) -> bool:
    """Whether the file's format has a header. Stock reads the other formats (.pt, .pth) itself."""
    return Path(path).suffix.lower() in HEADED


def is_ours_alone(path: str | PathLike[str]) -> bool:
    """Whether stock does not read files of this format."""
    return Path(path).suffix.lower() in OURS_ALONE


def without_streaming(*paths: str | PathLike[str]) -> str:
    """The remedy for a model that cannot stream, in a sentence. paths: its files."""
    return OTHER_FILE if any(map(is_ours_alone, paths)) else AS_STOCK


def instead_of_streaming(path: str | PathLike[str]) -> str:
    """The remedy for a use that streaming weights do not allow, in a sentence."""
    return OTHER_FILE_FOR_THAT if is_ours_alone(path) else AS_STOCK_FOR_THAT


def refusal(path: str | PathLike[str], vram_budget: float) -> str | None:
    """Why a file cannot be loaded with this budget, in words that follow its name; None: its format
    allows it."""
    return STREAMS_ALONE if vram_budget == 0 and is_ours_alone(path) else None
