"""Ada in numbers (sm_89): GeForce RTX 40. A multiprocessor is Ampere's; clocks, L2 and 8-bit floats differ. Letters: machine.py."""

from __future__ import annotations

from dataclasses import replace

from .ampere import GA10X, l2_share
from .machine import DRAM, L2, Card

ADA = replace(
    GA10X,
    name="Ada",
    capabilities=(89, 86, 80),
    latencies={
        **GA10X.latencies,
        L2: 292,
        DRAM: 632,
    },  # [L] 296 and 636 to use, RTX 4090; smaller chips may be nearer [?]
    blocks=24,  # [G]
)

# Boost clocks of the data sheets; [M] confirms the RTX 4090's rate with FP32 sums. `reached`: [N].
CARDS = {
    "4060": Card("GeForce RTX 4060", ADA, 24, 2.46e9, 272e9, 0.5, 0.91, l2_share(128, 24)),
    "4060ti": Card("GeForce RTX 4060 Ti", ADA, 34, 2.535e9, 288e9, 0.5, 0.91, l2_share(128, 34)),
    "4090": Card("GeForce RTX 4090", ADA, 128, 2.52e9, 1008e9, 0.5, 0.91, l2_share(384, 128)),
}
