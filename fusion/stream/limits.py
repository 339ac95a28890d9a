"""What a user leaves to others, in GiB, beside what a vram_budget says: VRAM that no model takes,
and RAM that is not pinned.

It holds for the process: for models that are loaded already as for those to come. 0 is as without.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import comfy.cli_args
import comfy.model_management

from . import vram_pool

MOST = 1024.0  # GiB


@dataclass(frozen=True)
class Limits:
    """reserve: VRAM for others; ram: that may be pinned or registered by all streamed models
    together."""

    reserve: float = 0.0
    ram: float = 0.0

    @classmethod
    def of(cls, reserve: Any, ram: Any) -> Limits:
        """As somebody has typed them; what is no such number is 0."""
        return cls(*(float(gib) if _is_limit(gib) else 0.0 for gib in (reserve, ram)))


def _is_limit(gib: Any) -> bool:
    is_number = isinstance(gib, (int, float)) and not isinstance(gib, bool)
    return is_number and math.isfinite(gib) and 0 <= gib <= MOST


# ComfyUI's own, as it started: what was said there by `--reserve-vram` is what counts.
_started_with = comfy.cli_args.args.reserve_vram, comfy.model_management.EXTRA_RESERVED_VRAM
_now = Limits()


def apply(limits: Limits) -> None:
    """The reserve as `--reserve-vram` would set it, for all of ComfyUI's models."""
    global _now
    before, _now = _now, limits
    if limits.reserve != before.reserve and _started_with[0] is None:
        given = limits.reserve or None
        comfy.cli_args.args.reserve_vram = given
        mm = comfy.model_management
        mm.EXTRA_RESERVED_VRAM = _started_with[1] if given is None else given * vram_pool.GIB
        vram_pool.measure_anew()
    if limits.ram != before.ram:
        vram_pool.limit_ram(limits.ram or None)
