"""Every card that the model knows, by a short name, and which of them machine code runs on."""

from __future__ import annotations

from . import ada, ampere, blackwell, turing
from .machine import Card

CARDS: dict[str, Card] = {**turing.CARDS, **ampere.CARDS, **ada.CARDS, **blackwell.CARDS}
# For machine code of this capability, where no card is named: the one of 8 GB that the pack is for.
DEFAULTS = {75: "2060s", 80: "3060ti", 86: "3060ti", 89: "4060", 120: "5060"}


def runs(card: Card, capability: int) -> bool:
    return capability in card.architecture.capabilities
