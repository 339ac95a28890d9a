"""What the fused blocks of a Wan handed back to stock, and how far its halves are."""

from __future__ import annotations

import torch

from fusestream.kernels_cuda import LEDGER


def handed_back() -> set[str]:
    """Why blocks were stock's."""
    return {refusal.reason for refusal in LEDGER.refusals if refusal.op == "wan block"}


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """In float64: halves are compared."""
    return float((one.double() - other).norm() / other.double().norm())
