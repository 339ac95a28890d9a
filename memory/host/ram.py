"""RAM that the device reads by itself: how much all models of the process may pin or register.

Such pages cannot be evicted or swapped, so they are taken from everything else on the machine. One
number, given or found from what is free, bounds them: bytes are taken from it before anything is
pinned or registered.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..plan import OverBudget

GIB = 2**30
# Share of all RAM that is left to the rest of the machine when the budget is found automatically.
LEFT_TO_OTHERS = 0.25
LEAST_LEFT = 2 * GIB
LEAST_BUDGET = GIB // 8  # for a small ring of pinned buffers, without which nothing streams


class Lender(Protocol):
    """A holder of RAM that may do without some of it."""

    def lendable(self) -> int:
        """Bytes that are idle."""

    def relent(self, nbytes: int) -> None:
        """Give back about `nbytes` of what is idle."""


@dataclass(frozen=True)
class Ram:
    """Bytes of RAM: all, and what could be taken now, page cache included."""

    total: int
    available: int


class RamBudget:
    """Bytes that may be pinned or registered in all. May be used from any thread."""

    def __init__(self, total: int) -> None:
        self.total = total
        # taken again where a model is collected by the thread that has it, which gives its RAM back
        self._lock = threading.RLock()
        self._taken = 0
        self._lenders: list[Lender] = []
        self._keepers: list[Lender] = []  # holders of RAM that no loaded model uses

    @classmethod
    def auto(cls, gib: float | None = None, ram: Ram | None = None) -> RamBudget:
        """A budget of `gib` GiB if given; else of what is free, less a share for everything
        else."""
        if gib is not None:
            return cls(int(gib * GIB))
        ram = ram or measure_ram()
        return cls(max(ram.available - max(int(ram.total * LEFT_TO_OTHERS), LEAST_LEFT), LEAST_BUDGET))

    @property
    def taken(self) -> int:
        with self._lock:
            return self._taken

    def try_take(self, nbytes: int) -> bool:
        with self._lock:
            if self._taken + nbytes > self.total:
                return False
            self._taken += nbytes
            return True

    def take(self, nbytes: int, what: str) -> None:
        """Take bytes that cannot be done without; other holders give back what they do not need.
        Raises OverBudget, and takes nothing, if that is not enough."""
        if not self.try_take(nbytes):
            self.beg(nbytes)
            if not self.try_take(nbytes):
                raise OverBudget(
                    f"{what} needs {nbytes / GIB:.2f} GiB of pinned RAM, and of the RAM budget of {self.total / GIB:.2f} GiB "
                    f"{self.taken / GIB:.2f} are taken. Raise the RAM budget, or unload other models."
                )

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            assert nbytes <= self._taken, "more given back than was taken"
            self._taken -= nbytes

    def join(self, lender: Lender, *, keeps: bool = False) -> None:
        """Register a holder. keeps: it holds RAM that no loaded model uses, and is asked first."""
        with self._lock:
            (self._keepers if keeps else self._lenders).append(lender)

    def leave(self, lender: Lender) -> None:
        with self._lock:
            (self._keepers if lender in self._keepers else self._lenders).remove(lender)

    def kept(self) -> int:
        """Taken bytes that no loaded model uses."""
        with self._lock:
            keepers = list(self._keepers)
        return sum(keeper.lendable() for keeper in keepers)

    def left(self) -> int:
        """Bytes that loaded models do not use."""
        return self.total - self.taken + self.kept()

    def within_reach(self, asker: Lender) -> int:
        """Bytes that are left, and those that other holders could give back."""
        with self._lock:
            others = [lender for lender in self._keepers + self._lenders if lender is not asker]
            left = self.total - self._taken
        return left + sum(lender.lendable() for lender in others)

    def beg(self, nbytes: int, asker: Lender | None = None) -> None:
        """Make other holders give back what they do not need. The asker holds no lock, because
        others may be asking it."""
        with self._lock:
            others = [lender for lender in self._keepers + self._lenders if lender is not asker]
        self._ask(others, nbytes)

    def beg_keepers(self, nbytes: int) -> None:
        """Make those holders give back that keep RAM which no loaded model uses."""
        with self._lock:
            keepers = list(self._keepers)
        self._ask(keepers, nbytes)

    def _ask(self, lenders: Sequence[Lender], nbytes: int) -> None:
        for lender in lenders:
            with self._lock:
                missing = self._taken + nbytes - self.total
            if missing <= 0:
                return
            lender.relent(missing)


def measure_ram() -> Ram:
    """RAM as the system reports it; on Linux, within the container's limit."""
    if sys.platform == "win32":
        return _windows_ram()
    try:
        fields = {}
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            fields[name] = int(value.split()[0]) * 1024
        ram = Ram(fields["MemTotal"], fields["MemAvailable"])
    except (OSError, KeyError, ValueError, IndexError):
        page = os.sysconf("SC_PAGE_SIZE")
        ram = Ram(os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page // 2)
    return within_container(ram)


def within_container(ram: Ram, folder: Path = Path("/sys/fs/cgroup")) -> Ram:
    """Bound `ram` by the container's own limit (cgroup v2). Page cache within it counts as
    available."""
    try:
        limit = int((folder / "memory.max").read_text(encoding="ascii"))
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        cache = sum(int(line.split()[1]) for line in lines if line.split()[0] in ("active_file", "inactive_file"))
    except (OSError, ValueError, IndexError):  # no limit, or no such system
        return ram
    return Ram(min(ram.total, limit), max(0, min(ram.available, limit - used + cache)))


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX"""

    _fields_ = [
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total_physical", ctypes.c_uint64),
        ("available_physical", ctypes.c_uint64),
        ("total_page_file", ctypes.c_uint64),
        ("available_page_file", ctypes.c_uint64),
        ("total_virtual", ctypes.c_uint64),
        ("available_virtual", ctypes.c_uint64),
        ("available_extended", ctypes.c_uint64),
    ]


def _windows_ram() -> Ram:
    status = _MemoryStatus()
    status.length = ctypes.sizeof(status)
    kernel: object = getattr(ctypes, "windll").kernel32  # noqa: B009 - unknown to mypy elsewhere than on Windows
    if not kernel.GlobalMemoryStatusEx(ctypes.byref(status)):  # type: ignore[attr-defined]
        raise OSError("Windows does not say how much RAM is free (GlobalMemoryStatusEx)")
    return Ram(status.total_physical, status.available_physical)
