"""Errors of results against exact ones, one for each video (the first dimension)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch


def relative(found: torch.Tensor, exact: torch.Tensor) -> list[float]:
    """||found - exact|| / ||exact||."""
    wide, right = _rows(found, exact)
    errors: list[float] = ((wide - right).norm(dim=1) / right.norm(dim=1)).tolist()
    return errors


def decibels(found: torch.Tensor, exact: torch.Tensor, peak: float | None = None) -> list[float]:
    """The peak over the root of the mean square error. peak: unless given, how far the exact values reach. Infinite: the same."""
    wide, right = _rows(found, exact)
    square = (wide - right).square().mean(1)
    reach = right.amax(1) - right.amin(1) if peak is None else torch.full_like(square, peak)
    return [
        math.inf if error == 0 else 10 * math.log10(top * top / error)
        for error, top in zip(square.tolist(), reach.tolist(), strict=True)
    ]


def errors_of(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "worst": max(values)}


def decibels_of(values: Sequence[float]) -> dict[str, float | None]:
    """None in place of infinite, which JSON does not know."""
    told = {"median": statistics.median(values), "worst": min(values)}
    return {name: value if math.isfinite(value) else None for name, value in told.items()}


def _rows(found: torch.Tensor, exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if found.shape != exact.shape:
        raise ValueError(f"{list(found.shape)} is not of the shape {list(exact.shape)}")
    if not found.isfinite().all():
        raise ArithmeticError("the result is not finite")
    return found.flatten(1).double(), exact.flatten(1).double()
