"""Words of messages and reports. Standard library only."""

from __future__ import annotations

from typing import Final

# The loaders' names for the precisions of a `KernelPolicy`: the default first, then each permits
# more than the one before.
QUALITIES = {"auto": "auto", "Exact": "precise", "Balanced": "fast", "Fastest": "turbo"}
IN_BYTES: Final = "turbo"  # what `auto` is on a card that is quick in bytes alone
DRAFT = "Draft"  # Fastest with less work: `fusion/load/draft_quality.py`
OF_MODELS = {DRAFT: QUALITIES["Fastest"]}  # further ones, of diffusion models alone


def quality(precision: str) -> str:
    """The loaders' name for this precision; a further quality is its own name."""
    return precision if precision in OF_MODELS else next(name for name, one in QUALITIES.items() if one == precision)


def counted(count: int, one: str, many: str = "") -> str:
    """`1 pack`, `3 packs`. many: the plural, if it is not formed with an s."""
    return f"{count} {one}" if count == 1 else f"{count} {many or one + 's'}"


def took(seconds: float) -> str:
    """Seconds for people: `0.45 s`, `38 s`, `8 min`, `2 h 5 min`."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    if round(seconds) < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")
