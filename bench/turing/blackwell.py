"""Blackwell in numbers (sm_120): GeForce RTX 50. Letters: machine.py.

A multiprocessor's tensor cores do in a cycle what Ada's do in FP16, by an RTX 5090's published peak; in INT8 twice that [?]; and a
chain of HMMA takes what Ampere's latency says (ampere.py). Everything else is taken to be Ada's [?]: nothing that was measured on
such a card was found to hold a prediction against.
"""

from __future__ import annotations

from dataclasses import replace

from .ada import ADA
from .ampere import l2_share
from .machine import Card

BLACKWELL = replace(ADA, name="Blackwell", capabilities=(120,))

# Boost clock and memory of the data sheet; `reached` is Ada's [?].
CARDS = {"5060": Card("GeForce RTX 5060", BLACKWELL, 30, 2.497e9, 448e9, 0.5, 0.91, l2_share(128, 30))}
