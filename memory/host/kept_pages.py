"""Registered pages of a model whose pager has closed, kept for its next one.

To unregister eight gigabytes and register them anew takes the driver a second, in which it serves
no other call. With 8 GB of VRAM, where text encoder and diffusion model take turns, every picture
would pay for that. So pages stay registered when a model leaves the card, as far as the RAM budget
allows. They are the first to be given back when another model asks for RAM.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from .ram import RamBudget

SHARE = 0.75  # the most of the RAM budget that models which are not loaded may keep


@dataclass(frozen=True)
class Kept:
    entry: Any
    nbytes: int
    give_back: Callable[[Any], None]


class KeptPages:
    """Kept pages of one model. One thread at a time opens and closes its pagers; any thread may ask
    for the RAM back."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Kept] = {}
        self._ram: RamBudget | None = None  # the budget they were taken from
        self._returns = False
        # guards the fields above; nothing is given back while it is held, unless the model is
        # collected by the thread that has it
        self._lock = threading.RLock()
        _all.add(self)

    @contextlib.contextmanager
    def returning(self) -> Iterator[None]:
        """While active, pages of a closing pager are kept without limit, because the model's next
        pager opens at once."""
        self._returns = True
        try:
            yield
        finally:
            self._returns = False

    def leave(self, key: Hashable, entry: Any, nbytes: int, ram: RamBudget, give_back: Callable[[Any], None]) -> None:
        """Keep an entry under the pages that it has. If kept pages would exceed their share of the
        budget, or another layer on the same pages has left them, give the entry back at once."""
        if self._ram is not ram:
            self.give_back()
        with self._lock:
            is_double = key in self._kept
        if is_double or (not self._returns and ram.kept() + nbytes > SHARE * ram.total):
            give_back(entry)
            return
        with self._lock:
            is_first, self._ram = self._ram is None, ram
            self._kept[key] = Kept(entry, nbytes, give_back)
        if is_first:
            ram.join(self, keeps=True)

    def take(self, key: Hashable, ram: RamBudget) -> Any:
        """The entry with exactly these pages, if it was taken from the same budget; else None."""
        with self._lock:
            if self._ram is not ram:
                return None
            found = self._kept.pop(key, None)
        return None if found is None else found.entry

    def give_back(self) -> None:
        """Give back all entries."""
        self.relent(self.lendable())
        with self._lock:
            ram, self._ram = self._ram, None
        if ram is not None:
            ram.leave(self)

    def lendable(self) -> int:
        with self._lock:
            return sum(each.nbytes for each in list(self._kept.values()))

    def relent(self, nbytes: int) -> None:
        """Give back entries until `nbytes` are free. The last one left goes first, because of
        models that take turns it is needed latest."""
        while nbytes > 0:
            with self._lock:
                if not self._kept:
                    return
                _, last = self._kept.popitem()
            last.give_back(last.entry)
            nbytes -= last.nbytes


_all: weakref.WeakSet[KeptPages] = weakref.WeakSet()


@atexit.register
def _give_all_back() -> None:
    """Unregister memory that the driver knows before it vanishes. Open pagers close earlier and
    leave their pages here, because their module is loaded after this one (`atexit` runs in reverse
    order)."""
    for each in list(_all):
        with contextlib.suppress(Exception):  # a device that has failed
            each.give_back()
