"""A program that dies of an error with a pager open whose copying thread is at work within torch: what its end looks like.

    python tests/left_open.py DEVICE ROUTE FOLDER

DEVICE is one of torch's, or `plain`: memory with a thread for a stream.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from bed import pack

pack.load()

from plain_device import PlainDevice, PlainManagedMemory  # noqa: E402 - the pack has its name from now on

from fusestream.memory import (  # noqa: E402
    Checkpoint,
    DeviceBudget,
    Encoding,
    Layer,
    Ledger,
    Pager,
    RamBudget,
    Weight,
    open_pager,
)
from fusestream.memory.backends.managed import ManagedBackend  # noqa: E402
from fusestream.memory.backends.slots import SlotsBackend  # noqa: E402
from fusestream.memory.host.host import Host  # noqa: E402

COUNT, ELEMENTS = 6, 1 << 20
BUDGET = 16 << 20
TIMES = 10  # sorting takes long, so this is where Python's end finds the thread


class Mistake(Exception):
    """What the program dies of."""


def convert(stored: torch.Tensor, out: torch.Tensor, _encoding: Encoding) -> None:
    for _ in range(TIMES):
        stored.float().sort()
    out.copy_(stored)


def opened(device: str, route: str, folder: Path) -> Pager:
    path = folder / "weights.safetensors"
    save_file({f"{i}": torch.full((ELEMENTS,), i, dtype=torch.bfloat16) for i in range(COUNT)}, path)
    source = Checkpoint.open(path)
    layers = [Layer(name, (Weight(name, at, torch.float16),)) for name, at in sorted(source.extents.items())]
    vram, ram, ledger = DeviceBudget(BUDGET), RamBudget(1 << 30), Ledger()
    managed = route == "managed"
    if device != "plain":
        kind = {"backend": "managed" if managed else "slots", "host": "auto" if managed else route}
        options = {} if device == "cpu" else {**kind, "guard": True, "ram": ram}
        return open_pager(source, layers, vram, BUDGET, device, convert=convert, **options)
    plain = PlainDevice()
    if managed:
        backend = ManagedBackend(plain, PlainManagedMemory(plain), source, layers, ram, ledger, convert)
    else:
        backend = SlotsBackend(plain, layers, Host(plain, source, layers, ram, ledger, route), ledger, convert)
    return Pager(layers, BUDGET, vram, backend, ledger)


if __name__ == "__main__":
    torch.set_num_threads(1)
    pager = opened(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    with pager.use(0):
        raise Mistake("the caller's own")
