"""One device's memory for streamed weights: which model holds how much, and which gives when
another needs memory.

A budget set by hand is a ceiling for one model's weights. All streamed models of a device together
hold no more than the largest ceiling among them, so a pair of models takes turns in one budget.
`auto` is the whole card less what ComfyUI reserves for the desktop; at every load ComfyUI's memory
management says how much of that is left for weights, after the activations of the latent at hand.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

import comfy.model_management
import torch

from ...memory import DeviceBudget, OverBudget, RamBudget

GIB = 2**30
LOADER = "FuseStream Diffusion Model Loader"  # the node that messages name by default


class OutOfVram(torch.OutOfMemoryError):
    """Weights do not fit. Of this kind because ComfyUI then unloads everything and still shows the
    message."""

    __module__ = "fusestream"


def out_of_vram(error: OverBudget, loader: str = LOADER) -> OutOfVram:
    """The pager's error as one that ComfyUI handles; its words name the pool, the need, what there
    is and the setting."""
    return OutOfVram(str(error).replace("the VRAM budget", f"vram_budget in the {loader}"))


class Member(Protocol):
    """A holder of a pool's memory."""

    @property
    def ceiling(self) -> int | None:
        """Bytes that it may hold; None: all that there are."""

    @property
    def last_used(self) -> float: ...

    def release_graphs(self) -> int:
        """Drop its CUDA graphs. Returns their bytes. Never waits."""

    def shrink(self, nbytes: int) -> int:
        """Give back about this much, unless it is in use or about to be. Returns the bytes given
        back. Never waits."""


class Pool:
    """The streamed models of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.budget = DeviceBudget(0, str(device))
        self._members: weakref.WeakSet[Member] = weakref.WeakSet()
        self._lock = threading.RLock()

    def join(self, member: Member) -> None:
        with self._lock:
            self._members.add(member)
            self._measure()

    def leave(self, member: Member) -> None:
        with self._lock:
            self._members.discard(member)
            self._measure()

    def release_graphs(self) -> int:
        """Drop the CUDA graphs of all models, because a step ran out of VRAM; they are captured
        again. Returns their bytes."""
        with self._lock:
            members = list(self._members)
        return sum(member.release_graphs() for member in members)

    def make_room(self, asker: Member, nbytes: int) -> int:
        """Let the other members give memory, the one used longest ago first, until this much is
        left. Returns the bytes that are left."""
        with self._lock:
            others = [member for member in self._members if member is not asker]
        for other in sorted(
            others, key=lambda member: member.last_used
        ):  # without the lock, because a member that ends meanwhile takes it
            missing = nbytes - self.budget.left
            if missing > 0:
                other.shrink(missing)
        return self.budget.left

    def measure(self) -> None:
        """Compute anew how much its members may hold in all."""
        with self._lock:
            self._measure()

    def _measure(self) -> None:
        ceilings = [member.ceiling for member in self._members]
        if ceilings:
            self.budget.total = max(whole(self.device) if ceiling is None else ceiling for ceiling in ceilings)


def whole(device: torch.device) -> int:
    """Bytes of a device that plans may count on at all."""
    total: int = comfy.model_management.get_total_memory(device)
    return max(0, int(total - comfy.model_management.extra_reserved_memory()))


def free(device: torch.device) -> int:
    """Bytes of a device that weights could take at this moment, less what ComfyUI leaves for
    computing."""
    management = comfy.model_management
    return max(0, int(management.get_free_memory(device)) - int(management.minimum_inference_memory()))


_pools: dict[torch.device, Pool] = {}
_pools_lock = threading.Lock()


def pool_of(device: torch.device) -> Pool:
    """The device's pool: one for the process, because all models share the device."""
    with _pools_lock:
        if device not in _pools:
            _pools[device] = Pool(device)
        return _pools[device]


def measure_anew() -> None:
    """Compute all pools anew, because ComfyUI's reserve has changed."""
    with _pools_lock:
        pools = list(_pools.values())
    for pool in pools:
        pool.measure()


class CountedRam(RamBudget):
    """Pinned and registered RAM that is counted in ComfyUI's own account too, which would pin
    beyond the system's limit otherwise. Threads of several models take and give back."""

    _counting = threading.Lock()

    def try_take(self, nbytes: int) -> bool:
        taken = super().try_take(nbytes)
        if taken:
            self._count(nbytes)
        return taken

    def give_back(self, nbytes: int) -> None:
        super().give_back(nbytes)
        self._count(-nbytes)

    def _count(self, nbytes: int) -> None:
        with self._counting:
            comfy.model_management.TOTAL_PINNED_MEMORY += nbytes


_ram: RamBudget | None = None
_ram_limit: float | None = None  # GiB; None: as the machine allows


def ram_for(nbytes: int) -> RamBudget:
    """The RAM that all streamed models together may pin, found at the first use. ComfyUI drops as
    many of its own registrations as these bytes need of the system's limit."""
    global _ram  # noqa: PLW0603 - the machine's RAM is one thing too
    with _pools_lock:
        _ram = _ram or CountedRam.auto(_ram_limit)
    comfy.model_management.ensure_pin_registerable(min(nbytes, _ram.total - _ram.taken))
    return _ram


def pinnable() -> tuple[int, int]:
    """Bytes that all streamed models together may pin, and those that they have pinned. Until a
    model has streamed the first is what it would be now."""
    with _pools_lock:
        return (CountedRam.auto(_ram_limit).total, 0) if _ram is None else (_ram.total, _ram.taken)


def limit_ram(gib: float | None) -> None:
    """Let all streamed models together pin no more than this; None: as much as is free. Idle pages
    beyond it are given back at once, others when their model is unloaded."""
    global _ram_limit
    with _pools_lock:
        _ram_limit, ram = gib, _ram
    if ram is not None:
        ram.total = CountedRam.auto(gib).total + (ram.taken if gib is None else 0)
        ram.beg(0)
