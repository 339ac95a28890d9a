"""Prediction beside measurement: what the plan promised, at the rates that were then measured, and what was."""

from __future__ import annotations

from dataclasses import dataclass

from fusestream.memory import Pager, Prediction, Rates, simulate


@dataclass(frozen=True)
class Comparison:
    """rates: as measured. predicted: by the plan at these. stalls: measured seconds of each layer's mean stall."""

    rates: Rates
    predicted: Prediction
    stalls: tuple[float, ...]
    overlap: float


def compare(pager: Pager) -> Comparison | None:
    """Of a pager that has streamed at least one pass; None before anything was copied."""
    ledger = pager.ledger
    bus = ledger.rate()
    if not bus:
        return None
    rates = Rates(bus, tuple(ledger.mean_seconds("use", layer.name) for layer in pager.layers))
    stalls = tuple(ledger.mean_seconds("stall", layer.name) for layer in pager.layers)
    return Comparison(rates, simulate(pager.plan, rates), stalls, ledger.overlap())
