"""Opens a model's pager with the backend that serves best on this machine.

    with Checkpoint.open(paths) as source:
        pager = open_pager(source, layers, vram, budget=7 << 30, device="cuda:0")

`auto` chooses by platform first, because managed memory needs a system that pages it; then by what
would cost memory; then by a quick measurement. The reason stands in the ledger, under "backend".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from ..gpu import NoDriver
from ..gpu.nvidia import other_maker
from .backends.backend import Backend, Convert, HostBackend
from .backends.cuda_managed import CudaManagedMemory
from .backends.managed import PAGE, ManagedBackend, pages
from .backends.slots import SlotsBackend
from .budget import DeviceBudget
from .checkpoint import Checkpoint
from .device import CudaDevice
from .host.host import Host, Way
from .host.kept_pages import KeptPages
from .host.ram import RamBudget
from .layer import Layer, rare_of, staging_bytes
from .ledger import Ledger
from .pager import Pager
from .plan import Plan, Rates, aligned, least_budget, make_plan, most_budget
from .rates import BusRates, measure_rates
from .runs import runs_of

BackendName = Literal["auto", "slots", "managed", "host"]
# Managed memory must be this much faster, because filling its pool is one more copy and takes the
# model's size of RAM.
WORTH_IT = 1.05


def open_pager(
    source: Checkpoint,
    layers: Sequence[Layer],
    vram: DeviceBudget,
    budget: int,
    device: str | torch.device = "cuda",
    *,
    backend: BackendName = "auto",
    ram: RamBudget | None = None,
    host: Way = "auto",
    convert: Convert | None = None,
    ledger: Ledger | None = None,
    compute: Sequence[float] | None = None,
    guard: bool = False,
    kept: KeptPages | None = None,
) -> Pager:
    """A pager for these layers of `source`, which stays open as long as the pager is used.

    vram     the budget that all models share on the device
    budget   bytes of it for this model
    ram      what may be pinned or registered; if None, a budget of its own, not shared
    convert  the conversion of staged weights; if None, torch's
    compute  seconds of each layer, if known, for the plan
    guard    refuse managed pools beyond the card's free memory
    kept     registered pages, left by earlier pagers of these layers and by this one
    """
    ledger = ledger or Ledger()
    where = torch.device(device)
    if where.type == "cpu":
        ledger.note("backend", "host: the device is the CPU")
        layers = suited(layers, where)
        made: Backend = HostBackend(source, ledger, convert, staging_bytes(layers))
        return _paged(layers, budget, vram, made, ledger, None)
    if backend == "host":
        raise ValueError(f"the host backend serves the CPU, not {where}")
    if (other := other_maker(where)) is not None:
        raise NoDriver(f"{other}: weights stream to NVIDIA cards, and to the CPU")
    ram = ram or RamBudget.auto()
    cuda = CudaDevice(where.index if where.index is not None else torch.cuda.current_device())
    against_managed = why_not_managed(cuda, layers, ram, guard, budget)
    able = backend == "managed" or (backend == "auto" and against_managed is None)
    bus = measure_rates(cuda, [run for layer in layers for run in runs_of(layer, source.home)], able)
    ledger.note("rates", str(bus))
    name, why = choose_backend(backend, against_managed, bus)
    ledger.note("backend", f"{name}: {why}")
    if name == "managed":
        made = ManagedBackend(cuda, CudaManagedMemory(cuda), source, layers, ram, ledger, convert, guard)
        rate = bus.managed
    else:
        bytes_ = Host(cuda, source, layers, ram, ledger, host, kept)
        try:
            made = SlotsBackend(cuda, layers, bytes_, ledger, convert)
        except BaseException:
            bytes_.close()
            raise
        rate = bus.registered if bytes_.way == "registered" else min(bus.pinned, bus.read * READERS_HELP)
    rates = Rates(rate, tuple(compute)) if compute is not None and rate else None
    return _paged(layers, budget, vram, made, ledger, rates)


# Speed-up by several readers: rates are measured with one, and eight were about four times as fast.
READERS_HELP = 4


def bounds(layers: Sequence[Layer], device: str | torch.device) -> tuple[int, int]:
    """The least budget that these layers can pass through on the device, and the budget in which
    all layers stay that every pass needs. Both are upper bounds, because a room's size depends on
    the backend, which is not chosen yet."""
    rooms, staging = _rooms(layers, device)
    rare = rare_of(layers)
    return least_budget(rooms, rare) + staging, most_budget(rooms, rare) + staging


def plan_of(layers: Sequence[Layer], device: str | torch.device, budget: int) -> Plan:
    """The plan for these layers in this budget, before a backend is chosen. Raises OverBudget."""
    rooms, staging = _rooms(layers, device)
    return make_plan(rooms, budget - staging, rare=rare_of(layers))


def _rooms(layers: Sequence[Layer], device: str | torch.device) -> tuple[list[int], int]:
    """Device bytes of each layer, and of the staging room."""
    where = torch.device(device)
    room = aligned if where.type == "cpu" else pages
    layers = suited(layers, where)
    return [room(layer.nbytes) for layer in layers], room(staging_bytes(layers))


def suited(layers: Sequence[Layer], device: torch.device) -> Sequence[Layer]:
    """The layers as a device wants them: on the CPU every weight is as in the file, because only a
    card's kernels want channels last."""
    return [layer.as_in_file() for layer in layers] if device.type == "cpu" else layers


def _paged(
    layers: Sequence[Layer], budget: int, vram: DeviceBudget, backend: Backend, ledger: Ledger, rates: Rates | None
) -> Pager:
    try:
        return Pager(layers, budget, vram, backend, ledger, rates)
    except BaseException:
        backend.close()
        raise


def why_not_managed(
    device: CudaDevice, layers: Sequence[Layer], ram: RamBudget, guard: bool, budget: int
) -> str | None:
    """The reason against managed memory before anything is measured, or None. budget: bytes of the
    device for these layers."""
    gib = 2**30
    pool = sum(pages(layer.nbytes) for layer in layers) + PAGE
    if not device.is_managed_capable:
        return "this system does not page managed memory (it takes Linux, and not WSL)"
    if budget >= bounds(layers, "cuda")[1]:
        return "all of it stays on the card, where a managed pool is one more copy, and its calls can be no CUDA graphs"
    if sum(layer.nbytes for layer in layers) > 1.01 * sum(layer.stored_bytes for layer in layers):
        return "the weights are stored in a smaller type than they are used in, and managed memory keeps the larger"
    if pool > ram.left():
        return f"a managed pool of {pool / gib:.2f} GiB is more than what is left of the RAM budget"
    if guard and pool > CudaManagedMemory(device).free_bytes():
        return f"a managed pool of {pool / gib:.2f} GiB is more than the card has free, and the guard is on"
    return None


def choose_backend(asked: BackendName, against_managed: str | None, bus: BusRates) -> tuple[BackendName, str]:
    """The backend for a GPU, and why."""
    if asked != "auto":
        return asked, "asked for"
    if against_managed is not None:
        return "slots", against_managed
    slots = max(bus.registered, bus.pinned)
    found = f"measured {slots / 1e9:.1f} GB/s into slots, {bus.managed / 1e9:.1f} GB/s managed"
    return ("managed" if bus.managed > WORTH_IT * slots else "slots"), found
