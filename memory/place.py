"""A piece of the device's memory that the pager brings layers into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .backends.backend import Copy, Ticket


@dataclass(eq=False)
class Place:
    """Room for a layer: a resident's own, or a slot of the ring."""

    room: Any
    nbytes: int
    layer: int | None = None
    copy: Copy | None = None
    users: int = 0
    # ends of its last uses, for which the next copy into this room waits
    released: tuple[Ticket, ...] = ()
    begun: Ticket | None = None  # the use under way

    def is_released_at(self, point: Ticket) -> None:
        """Add the end of a use. Of the points of one order only the last is kept."""
        self.released = (*(t for t in self.released if t.order != point.order), point)
