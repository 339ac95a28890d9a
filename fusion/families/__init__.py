"""The families, a folder each. A new family is added to this list; docs/adding-a-family.md walks
through it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ..base.family import Family

if TYPE_CHECKING:
    from ...memory import WeightFile

# In the order in which they are asked whether a file is theirs, and in which users read their
# names.
FOLDERS = (
    "wan",
    "flux2",
    "z_image",
    "qwen_image",
    "ltx2",
    "minimax_h3",
    "unet",
    "t5",
    "qwen3_vl",
    "language_models",
    "clip",
    "image_vae",
)

FAMILIES: tuple[Family, ...] = tuple(
    found
    for folder in FOLDERS
    for found in vars(import_module(f".{folder}", __name__)).values()
    if isinstance(found, Family)
)


def family_of(header: WeightFile) -> Family | None:
    """The family that knows this file, or None."""
    return next((family for family in FAMILIES if family.recognises(header)), None)
