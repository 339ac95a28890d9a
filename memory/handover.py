"""Registered pages on their way from one pager of a model to the next, which pages the same layers in another order.

To unregister eight gigabytes and register them anew takes the driver a second, in which it serves nobody else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any


class Handover:
    """Of one model. All calls come from the thread that opens and closes its pagers."""

    def __init__(self) -> None:
        self.is_under_way = False
        self._kept: dict[Hashable, tuple[Any, Callable[[Any], None]]] = {}

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """What a pager that is closed meanwhile has registered is the next one's. What that does not take is given back then."""
        self.is_under_way = True
        try:
            yield
        finally:
            self.is_under_way = False
            kept, self._kept = self._kept, {}
            for entry, give_back in kept.values():
                give_back(entry)

    def leave(self, key: Hashable, entry: Any, give_back: Callable[[Any], None]) -> None:
        """An entry, by the pages that it has."""
        self._kept[key] = entry, give_back

    def take(self, key: Hashable) -> Any:
        """The entry with just these pages, or None."""
        return self._kept.pop(key, (None, None))[0]
