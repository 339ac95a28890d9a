"""The families, a folder each. One that is to be known stands in this list; docs/adding-a-family.md walks through it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ..base.family import Family

if TYPE_CHECKING:
    from ...memory import WeightFile

# In the order in which they are asked whether a file is theirs, and in which a user reads their names.
FOLDERS = (
    "wan",
    "flux2",
    "z_image",
    "unet",
    "t5",
    "qwen3_vl",
    "qwen3",
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
    """The family that knows this file."""
    return next((family for family in FAMILIES if family.recognises(header)), None)
