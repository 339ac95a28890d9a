"""Blackwell in numbers (sm_120): GeForce RTX 50. Letters: machine.py.

By NVIDIA's whitepaper on it a multiprocessor's tensor cores do in a cycle what Ada's do, in FP16 and in INT8 [W], and a chain of
HMMA takes what Ampere's latency says (ampere.py). Everything else is taken to be Ada's [?]: no kernel of ours was held to a figure
of such a card.
"""

from __future__ import annotations

from dataclasses import replace

from .ada import ADA
from .ampere import l2_share
from .machine import Card

BLACKWELL = replace(ADA, name="Blackwell", capabilities=(120,))

# Boost clock and memory of the data sheet; `reached` is Ada's [?].
CARDS = {"5060": Card("GeForce RTX 5060", BLACKWELL, 30, 2.497e9, 448e9, 0.5, 0.91, l2_share(128, 30))}
