"""TAESD as stock's Load VAE offers it: by a name, out of an encoder's and a decoder's file in models/vae_approx."""

from __future__ import annotations

import importlib
from typing import Any

import folder_paths

FOLDER = "vae_approx"
HALVES = "encoder", "decoder"
FOLDED = {"taef2": 128}  # channels of the latents, where the files do not tell


def _stocks_loader() -> Any:
    return importlib.import_module("nodes").VAELoader  # ComfyUI's own


def listed() -> list[str]:
    """The names of which both halves are there."""
    return [name for name in _stocks_loader().image_taes if files_of(name) is not None]


def files_of(name: str | None) -> tuple[str, str] | None:
    """The paths of the halves, as stock finds them. None: this is no such name, or one is not there."""
    if name not in _stocks_loader().image_taes:
        return None
    names = folder_paths.get_filename_list(FOLDER)
    encoder, decoder = (next((one for one in names if one.startswith(f"{name}_{half}.")), None) for half in HALVES)
    if encoder is None or decoder is None:
        return None
    return folder_paths.get_full_path_or_raise(FOLDER, encoder), folder_paths.get_full_path_or_raise(FOLDER, decoder)


def read(name: str) -> tuple[Any, dict[str, int] | None]:
    """Weights with stock's names and the scale of these latents, and what stock is told besides."""
    channels = FOLDED.get(name)
    return _stocks_loader().load_taesd(name), None if channels is None else {"tae_latent_channels": channels}
