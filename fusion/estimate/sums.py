"""Seconds of a step, added up from parts: products and attention are operations over a rate; all
else is bytes over the memory's bandwidth; streamed weights are bytes over the bus, overlapped with
computing as the plan has it. Nothing here is fitted to a measured row: bench/results.md has the
errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...memory import Rates as Speeds
from ...memory import make_plan, simulate
from ..base.card_rates import Passes, Rates, compute_seconds
from ..base.cost import Cost


@dataclass(frozen=True)
class Blocks:
    """The streamed blocks. sizes: bytes of each on the device, in order. stored: share of them that
    crosses the bus. held: bytes of the device for them."""

    sizes: Sequence[int]
    stored: float
    held: int


def step_seconds(cost: Cost, rates: Rates, passes: Passes, blocks: Blocks, prompts: int, forwards: int) -> float:
    """Seconds of one step of `prompts` prompts, each latent of a batch counted, computed in
    `forwards` forwards. Each forward brings the weights that do not stay."""
    compute = prompts / forwards * compute_seconds(cost, rates, passes)
    total = sum(blocks.sizes)
    if total == 0:
        return forwards * compute
    speeds = Speeds(rates.bus / max(blocks.stored, 1e-9), tuple(compute * size / total for size in blocks.sizes))
    return forwards * simulate(make_plan(blocks.sizes, blocks.held, speeds), speeds).steady
