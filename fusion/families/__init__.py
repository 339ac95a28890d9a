"""The families, a folder each. One that is to be known stands in this list; docs/adding-a-family.md walks through it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..family import Family
from .t5 import T5
from .wan import WAN, WAN_VAE

if TYPE_CHECKING:
    from ...memory import WeightFile

FAMILIES: tuple[Family, ...] = (WAN, T5, WAN_VAE)


def family_of(header: WeightFile) -> Family | None:
    """The family that knows this file."""
    return next((family for family in FAMILIES if family.recognises(header)), None)
