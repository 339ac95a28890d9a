"""The model files that the nodes of a graph name: with their sizes, for what RAM has to hold.

Any node's: a text in an input that is the name of a file in one of ComfyUI's model folders. A file
that several nodes name counts once. What a link brings is not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import folder_paths

from .files import GGUF_FOLDERS, where

SUFFIXES = (".safetensors", ".gguf", ".sft", ".ckpt", ".pt", ".pth", ".bin")
# Folders of ComfyUI's whose files are small, or no models.
OTHERS = ("configs", "custom_nodes", "datasets", "embeddings", "loras")
MOST = 64  # names that are looked for


def model_files(prompt: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """The files by their paths, with their bytes. prompt: a graph in API form."""
    found: dict[str, int] = {}
    for name in list(dict.fromkeys(_names(prompt)))[:MOST]:
        path = _path_of(name)
        if path is not None:
            found[str(path)] = path.stat().st_size
    return found


def _names(prompt: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for node in prompt.values():
        for value in node["inputs"].values():
            if isinstance(value, str) and value.lower().endswith(SUFFIXES):
                yield value


def _path_of(name: str) -> Path | None:
    folders = (folder for folder in folder_paths.folder_names_and_paths if folder not in OTHERS)
    paths = (folder_paths.get_full_path(folder, name) for folder in folders)
    found = next((path for path in paths if path is not None), None)
    if found is None:  # other packs' folders for GGUF files
        found = next((path for role in GGUF_FOLDERS if (path := where(role, name)) is not None), None)
    return None if found is None else Path(found)
