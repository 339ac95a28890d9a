"""Words of messages and reports. Standard library only."""

from __future__ import annotations


def counted(count: int, one: str, many: str = "") -> str:
    """`1 pack`, `3 packs`; many: where it takes more than an s."""
    return f"{count} {one}" if count == 1 else f"{count} {many or one + 's'}"
