"""Measures how fast weights reach a card: opens the pager on a small file and moves it as it would
a model."""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from ...memory import BadFile, Checkpoint, DeviceBudget, Layer, Ledger, RamBudget, Weight, bounds, open_pager
from ...memory.device import CudaDevice
from ...memory.host.unbuffered import SUPPORTED, unbuffered
from ...memory.open_file import Stamp, reader
from ...memory.rates import unremembered
from ...memory.shared_open import shared
from .findings import ADVICE, STOPS

MIB = 2**20
LAYERS, LAYER_BYTES = 4, 32 * MIB
DISK_BYTES, PIECE, READERS = 256 * MIB, 8 * MIB, 4
SLOW_DISK = 1e9
FASTEST_DISK = 16e9  # bytes a second: what PCIe 5 has room for
# Whether the system can be asked to forget what it has read. If not, such as Windows, reads go past its cache.
CAN_FORGET = hasattr(os, "posix_fadvise")


def pager() -> Iterator[str]:
    """The backend that serves, why, its rates, and whether the bytes arrive as they are in the
    file."""
    is_there = torch.cuda.is_available() and not torch.version.hip
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if is_there else ["cpu"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        write_layers(path)
        for device in devices:
            yield from _one(path, device)


def write_layers(path: Path) -> None:
    """A weight file of LAYERS tensors of random bytes."""
    header = {
        f"layer {i}": {"dtype": "U8", "shape": [LAYER_BYTES], "data_offsets": [i * LAYER_BYTES, (i + 1) * LAYER_BYTES]}
        for i in range(LAYERS)
    }
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(LAYERS):
            file.write(os.urandom(LAYER_BYTES))
        file.flush()
        os.fsync(file.fileno())


def _one(path: Path, device: str) -> Iterator[str]:
    where, ledger = torch.device(device), Ledger()
    with Checkpoint.open(path) as source, torch.inference_mode(False), unremembered():
        layers = [Layer(name, (Weight(name, extent),)) for name, extent in source.extents.items()]
        if where.type == "cuda":
            capable = CudaDevice(where.index or 0).is_managed_capable
            yield f"{device}: managed memory is {'paged by this system' if capable else 'not paged here (it takes Linux, not WSL)'}"
        least, _ = bounds(layers, where)
        ram = RamBudget.auto() if where.type == "cuda" else None
        moved = open_pager(
            source, layers, DeviceBudget(least, device), least, where, ram=ram, ledger=ledger, guard=True
        )
        with contextlib.closing(moved):
            wrong = sum(not _same(moved.use(i), source, layers[i]) for i in range(len(layers)))
            moved.check()
        for name, note in ledger.summary()["notes"].items():
            yield f"{device}: {name}: {note}"
        if wrong:
            yield f"{STOPS}{wrong} of {LAYERS} layers arrived damaged"
        else:
            yield f"{device}: {LAYERS} layers arrived as they are in the file"


def _same(use: contextlib.AbstractContextManager[object], source: Checkpoint, layer: Layer) -> bool:
    weight = layer.weights[0]
    wanted = source.read(weight.extent)
    with use as weights:
        return torch.equal(weights[weight.name].cpu(), wanted)  # type: ignore[index]


def disk(model: Path | None) -> Iterator[str]:
    """The rate of cold reads from a model file's disk, else from the temporary folder's."""
    if not CAN_FORGET and not SUPPORTED:
        yield "not measured: this system neither forgets what it has read nor reads past its cache"
        return
    if model is not None:
        yield from _disk_rate(model, "the disk of the model files")
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        write_layers(path)
        yield from _disk_rate(path, "the disk of the temporary folder (no model file was found)")


def _disk_rate(path: Path, what: str) -> Iterator[str]:
    size = min(DISK_BYTES, path.stat().st_size)
    opener = shared if CAN_FORGET else unbuffered
    handle = opener(path, os.O_RDONLY)
    reads = reader(handle, path, Stamp.of(os.fstat(handle)), opener)
    try:
        if CAN_FORGET:
            os.posix_fadvise(handle, 0, size, os.POSIX_FADV_DONTNEED)
        places = itertools.count()
        failed: list[OSError | BadFile] = []

        def read() -> None:
            try:
                with mmap.mmap(-1, PIECE) as room, memoryview(room) as target:
                    while (at := next(places) * PIECE) < size:
                        reads.read_at(target, at)
            except (OSError, BadFile) as error:
                failed.append(error)

        start = time.perf_counter()
        threads = [threading.Thread(target=read) for _ in range(READERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rate = size / (time.perf_counter() - start)
    finally:
        reads.close()
        os.close(handle)
    if failed:
        raise failed[0]
    cached = " (more than a disk can do: it was still cached)" if rate > FASTEST_DISK else ""
    yield f"{what}: {rate / 1e9:.1f} GB/s, {size / MIB:.0f} MiB by {READERS} threads{cached}"
    if rate < SLOW_DISK:
        yield f"{ADVICE}models are on a slow disk: the first step of each start waits for it"
