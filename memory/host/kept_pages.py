"""Registered pages of a model whose pager has closed, for its next one.

To unregister eight gigabytes and register them anew takes the driver a second, in which it serves nobody else: with 8 GB of VRAM
that is what text encoder and diffusion model, which take turns there, would pay for at each picture. So pages stay registered when
a model leaves the card, as far as the RAM budget goes. They are the first that are given back when another model asks for RAM.
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

SHARE = 0.75  # of the RAM budget, at the most, for models that are not loaded


@dataclass(frozen=True)
class Kept:
    entry: Any
    nbytes: int
    give_back: Callable[[Any], None]


class KeptPages:
    """Of one model. Its pagers are opened and closed by one thread at a time; RAM may be asked back by any."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Kept] = {}
        self._ram: RamBudget | None = None  # that they were taken from
        self._returns = False
        self._lock = threading.Lock()  # what is above; nothing is given back within
        _all.add(self)

    @contextlib.contextmanager
    def returning(self) -> Iterator[None]:
        """The model's next pager opens at once: pages of one that closes meanwhile are kept however many they are."""
        self._returns = True
        try:
            yield
        finally:
            self._returns = False

    def leave(self, key: Hashable, entry: Any, nbytes: int, ram: RamBudget, give_back: Callable[[Any], None]) -> None:
        """An entry, by the pages that it has, or it is given back: where others keep as much as may be."""
        if self._ram is not ram:
            self.give_back()
        if not self._returns and ram.kept() + nbytes > SHARE * ram.total:
            give_back(entry)
            return
        with self._lock:
            is_first, self._ram = self._ram is None, ram
            self._kept[key] = Kept(entry, nbytes, give_back)
        if is_first:
            ram.join(self, keeps=True)

    def take(self, key: Hashable, ram: RamBudget) -> Any:
        """The entry with just these pages, taken from the same budget, or None."""
        with self._lock:
            if self._ram is not ram:
                return None
            found = self._kept.pop(key, None)
        return None if found is None else found.entry

    def give_back(self) -> None:
        """All of them."""
        self.relent(self.lendable())
        with self._lock:
            ram, self._ram = self._ram, None
        if ram is not None:
            ram.leave(self)

    def lendable(self) -> int:
        with self._lock:
            return sum(each.nbytes for each in self._kept.values())

    def relent(self, nbytes: int) -> None:
        """What was left last goes first: of models that take turns it is wanted latest."""
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
    """Memory that the driver knows is not to vanish under it. Pagers that are open close before, and leave their pages here:
    their module is loaded after this one."""
    for each in list(_all):
        with contextlib.suppress(Exception):  # a device that has failed
            each.give_back()
