"""The permitted values of the input vram_budget. Standard library only, because it is needed before
anything runs."""

from __future__ import annotations

import math

AUTO = -1.0  # all free VRAM
MOST = 1024.0  # GiB


def refusal(vram_budget: float) -> str | None:
    """Why this is no budget, in a sentence; None: it is one."""
    if math.isfinite(vram_budget) and (vram_budget == AUTO or 0 <= vram_budget <= MOST):
        return None
    return (
        f"vram_budget is {vram_budget}: give -1 (what is free), 0 (ComfyUI's own memory management) or a number of GiB up to "
        f"{MOST:.0f}."
    )


def refuse_odd(vram_budget: float) -> None:
    reason = refusal(vram_budget)
    if reason is not None:
        raise ValueError(reason)
