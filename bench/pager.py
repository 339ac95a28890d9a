"""Measure the pager: what streaming adds to compute, its share of the bus, cold and warm files.

    python bench rows pager                       28 GB through 3 GB; writes bench/results/<gpu>.json
    python bench rows pager --gb 3 --dry          quicker and smaller; nothing is written
    python bench rows pager --folder /mnt/disk    where to put the weight file (it is removed again)

The rows are the promises of the pager, each with its bound. Compute is matrix products whose time is tuned to the row.
Managed pools are guarded: none is larger than what the card has free. tests/gpu/test_pager.py compares every byte and
looks for leaks.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..memory import Checkpoint, DeviceBudget, Layer, Ledger, Pager, RamBudget, Rates, Weight, open_pager, simulate
from ..memory.device import CudaDevice
from ..memory.ledger import overlap_of
from . import sources
from .end_to_end.card import Card
from .end_to_end.files import is_in_ram
from .end_to_end.results import card_file, read, rounded, write
from .kernels import environment

GIB, MIB = 2**30, 2**20
LAYERS = 40
WEIGHTS = 8  # of a layer
PASSES = 3  # in a row, where compute is timed
LONGER = 1.3  # compute over copy, where compute is the longer one


class WeightFile:
    """LAYERS equal layers, random bits, on disk and in the page cache."""

    def __init__(self, path: Path, nbytes: int, layers: int = LAYERS) -> None:
        self.path = path
        elements = nbytes // layers // WEIGHTS // 2 // 512 * 512
        names = [f"{i:02}.{w}" for i in range(layers) for w in range(WEIGHTS)]
        header = {
            name: {"dtype": "F16", "shape": [elements], "data_offsets": [n * elements * 2, (n + 1) * elements * 2]}
            for n, name in enumerate(names)
        }
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % 4096)
        self.layer_bytes = elements * 2 * WEIGHTS
        base = torch.randint(-(2**63), 2**63 - 1, (self.layer_bytes // 8,)).view(torch.uint8).numpy()
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.pwrite(handle, len(text).to_bytes(8, "little") + text, 0)

        def write(job: tuple[int, int]) -> None:
            layer, at = job
            os.pwrite(handle, base[at : at + 32 * MIB].data, 8 + len(text) + layer * self.layer_bytes + at)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write, [(i, at) for i in range(layers) for at in range(0, self.layer_bytes, 32 * MIB)]))
        os.fsync(handle)
        os.close(handle)
        self.source = Checkpoint.open(path)
        self.layers = [
            Layer(
                f"layer {i}", tuple(Weight(n, self.source.extents[n]) for n in names[i * WEIGHTS : (i + 1) * WEIGHTS])
            )
            for i in range(layers)
        ]

    def drop_from_cache(self) -> None:
        handle = os.open(self.path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)

    def read_seconds(self, begin: int, nbytes: int, direct: bool, threads: int = 8) -> float:
        """The disk's own time for these bytes, from a cold cache."""
        self.drop_from_cache()
        handle = os.open(self.path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        step = 16 * MIB

        def read(thread: int) -> None:
            room = mmap.mmap(-1, step)
            for at in range(begin + thread * step, begin + nbytes, threads * step):
                os.preadv(handle, [room], at // 4096 * 4096)

        start = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, range(threads)))
        os.close(handle)
        return time.perf_counter() - start


@contextmanager
def opened(
    file: WeightFile, window: int, *, layers: int | None = None, ram: RamBudget | None = None, **options: Any
) -> Iterator[Pager]:
    """A pager over the first layers, in a window of its own."""
    chosen = file.layers[:layers]
    pager = open_pager(
        file.source, chosen, DeviceBudget(window), window, ram=ram or RamBudget.auto(), guard=True, ledger=Ledger(), **options
    )  # fmt: skip
    try:
        yield pager
    finally:
        pager.close()


def seconds_of(run: Callable[[], None], times: int = 1) -> float:
    """Of one of so many runs in a row. What they leave behind on other streams, such as the copy of the layer that comes
    next, is not waited for."""
    stream = torch.cuda.current_stream()
    stream.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        run()
    stream.synchronize()
    return (time.perf_counter() - start) / times


def one_pass(
    pager: Pager, compute: Callable[[], None] = lambda: None, host: list[float] | None = None
) -> Callable[[], None]:
    """host: gets the host's seconds in acquire and release of each layer."""

    def run() -> None:
        for i in range(len(pager.layers)):
            start = time.perf_counter()
            pager.acquire(i)
            acquired = time.perf_counter()
            compute()
            computed = time.perf_counter()
            pager.release(i)
            if host is not None:
                host.append(acquired - start + time.perf_counter() - computed)

    return run


class Compute:
    """Matrix products of about so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.left, self.right = (torch.randn(6144, 6144, device="cuda").half() for _ in range(2))
        self.out = torch.empty_like(self.left)
        self.times = 20
        self()
        one = min(seconds_of(self) for _ in range(3)) / self.times
        self.times = max(1, round(seconds / one))

    def __call__(self) -> None:
        for _ in range(self.times):
            torch.mm(self.left, self.right, out=self.out)


def pinned_rate(device: CudaDevice) -> float:
    """Bytes per second of the bus from pinned memory, in copies of 256 MiB."""
    size = 256 * MIB
    pinned, room = device.pin(size), torch.empty(size, dtype=torch.uint8, device="cuda")
    best = 0.0
    for _ in range(4):
        start = device.copy_event()
        for _ in range(4):
            device.copy_in(room.data_ptr(), pinned.address, size)
        end = device.copy_event()
        end.synchronize()
        best = max(best, 4 * size / (start.elapsed_time(end) * 1e-3))
    device.unpin(pinned)
    return best


def while_copying(run: Callable[[], None], rate: float, longer: float) -> float:
    """Seconds of `run` while the bus is busy for one part in `longer`, with nothing of the pager: what copies cost by
    themselves, in memory and power."""
    device, size = CudaDevice(), 64 * MIB
    pinned, room = device.pin(size), torch.empty(size, dtype=torch.uint8, device="cuda")
    over = threading.Event()

    def copy() -> None:
        device.enter_thread()
        while not over.is_set():
            start = time.perf_counter()
            device.copy_in(room.data_ptr(), pinned.address, size)
            device.copy_event().synchronize()
            time.sleep(max(0.0, size / rate * longer - (time.perf_counter() - start)))

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        return seconds_of(run, PASSES)
    finally:
        over.set()
        thread.join()
        device.unpin(pinned)


class Rows(list[dict[str, Any]]):
    """The rows so far, written after each: a run that is cut short leaves what it has."""

    def __init__(self, head: dict[str, Any] | None, path: Path) -> None:
        super().__init__()
        self._head = head
        self._path = path

    def save(self) -> Path | None:
        if self._head is None:
            return None
        write(self._path, read(self._path) | {"pager": {**self._head, "rows": [rounded(r) for r in self]}})
        return self._path


def row(rows: Rows, label: str, found: float, bound: float | None, unit: str, note: str = "") -> None:
    """found must be at most bound, where there is one."""
    rows.append({"label": label, "found": found, "bound": bound, "unit": unit, "note": note})
    rows.save()
    held = "" if bound is None else ("ok  " if found <= bound else "MISS")
    limit = "" if bound is None else f"<= {bound:.4g}"
    print(f"{label[:62]:62} {found:9.4g} {unit:5} {limit:9} {held:4} {note}", flush=True)


def streaming(rows: Rows, file: WeightFile, window: int, rate: float, backend: str, layers: int | None) -> None:
    """First pass, warm passes, with short and long compute; the driver's count all the while."""
    name = backend if layers is None else f"{backend}, {layers} layers"
    compute = Compute(LONGER * file.layer_bytes / rate)
    count = layers or len(file.layers)

    def computed() -> None:
        for _ in range(count):
            compute()

    alone = seconds_of(computed, PASSES)
    beside_copies = while_copying(computed, rate, LONGER)
    with Card(None) as card, opened(file, window, layers=layers, backend=backend) as pager:
        plan, ledger = pager.plan, pager.ledger
        first = seconds_of(one_pass(pager))
        warm = seconds_of(one_pass(pager), PASSES)
        moved, whole = sum(file.layers[i].nbytes for i in plan.streamed), sum(layer.nbytes for layer in pager.layers)
        bound = 1.1 if backend == "slots" else None
        note = f"{first:.3f} s; byte for byte {first / whole / (warm / moved):.3f} x"
        row(rows, f"{name}: (c) first pass, page cache, over a warm one", first / warm, bound, "x", note)
        note = f"{moved / warm / 1e9:.1f} GB/s, {len(plan.resident)} resident, {plan.slots} slots"
        row(rows, f"{name}: (b) warm pass, no compute, over bytes / rate", warm * rate / moved, 1.03, "x", note)
        copies = [e for e in ledger.entries if e.kind == "copy"][-len(plan.streamed) :]
        busy = sum(e.nbytes for e in copies) / sum(e.end - e.start for e in copies)
        row(rows, f"{name}: (b) pinned rate over rate of copies", rate / busy, 1 / 0.95, "x", f"{busy / 1e9:.1f} GB/s")
        one_pass(pager, compute)()
        host: list[float] = []
        both = seconds_of(one_pass(pager, compute, host), PASSES)
        pager._backend.drain()
        uses, stalls = ([e for e in ledger.entries if e.kind == kind][-PASSES * count :] for kind in ("use", "stall"))
        used = sum(e.end - e.start for e in uses) / PASSES
        waited = sum(e.end - e.start for e in stalls if e.start >= uses[0].start) / PASSES
        note = f"{both:.4f} s against {alone:.4f}; in use {used:.4f}, stalled {waited:.4f}"
        row(rows, f"{name}: (a) compute longer than copy, over it alone", both / alone, 1.01, "x", note)
        note = f"copies of one pinned buffer alone cost {beside_copies / alone:.4f} x"
        row(rows, f"{name}: (a) over compute beside bare copies", both / beside_copies, 1.01, "x", note)
        row(rows, f"{name}: host time of acquire + release", statistics.median(host) * 1e6, None, "us", "a layer")
        over = [e for e in ledger.entries if e.kind == "copy" and e.start >= uses[0].start]
        hidden = overlap_of(over, uses)
        row(rows, f"{name}: (a) share of the copies' time under compute", hidden, None, "")
        predicted = simulate(plan, Rates(busy, (alone / count,) * count)).steady
        row(rows, f"{name}: (a) measured over the plan's prediction", both / predicted, None, "x")
        evictions = [e for e in ledger.entries if e.kind == "evict"]
        if evictions:
            each = sum(e.end - e.start for e in evictions) / len(evictions) / file.layer_bytes * GIB / 2
            row(rows, f"{name}: (d) eviction per 0.5 GiB", each * 1e3, 1.0, "ms", f"{len(evictions)} evictions")
            fills = [e for e in ledger.entries if e.kind == "fill"]
            filled = len(fills) * file.layer_bytes / sum(e.end - e.start for e in fills)
            row(rows, f"{name}: filling the pool", filled / 1e9, None, "GB/s")
        row(rows, f"{name}: (e) own account over budget", ledger.peak("VRAM") / window, 1.0, "x")
        # Pages that left are kept by the driver for the next who asks, and are in its count.
        row(rows, f"{name}: (e) the driver's count over budget", card.peak * GIB / window, 1.02, "x")


def eviction_of_slots(rows: Rows, file: WeightFile, window: int) -> None:
    """A slot is free when its last use is over: releasing it is all there is."""
    with opened(file, window, backend="slots", layers=8) as pager:
        one_pass(pager)()
        torch.cuda.synchronize()
        times = []
        for i in pager.plan.streamed:
            pager.acquire(i)
            start = time.perf_counter()
            pager.release(i)
            times.append(time.perf_counter() - start)
    row(rows, "slots: (d) eviction (a release)", max(times) * 1e3, 1.0, "ms")


def ram_budget(rows: Rows, file: WeightFile, window: int, gib: float) -> None:
    ram = RamBudget(int(gib * GIB))
    with opened(file, window, ram=ram, backend="slots") as pager:
        one_pass(pager)()
        warm = seconds_of(one_pass(pager), PASSES)
        told = pager.ledger.summary()
        locked = told["peak bytes"].get("registered RAM", 0) + told["peak bytes"].get("pinned RAM", 0)
        moved = sum(file.layers[i].nbytes for i in pager.plan.streamed)
        note = f"{moved / warm / 1e9:.1f} GB/s a pass"
        row(rows, f"RAM budget {gib:g} GiB: pinned + registered over it", locked / ram.total, 1.0, "x", note)


def cold(rows: Rows, file: WeightFile, window: int, layers: int) -> None:
    """Nothing in the page cache, nothing loaded."""
    if is_in_ram(file.path):
        print("(c) cold passes: left out, the file is on a file system in RAM; --folder names another place")
        return
    nbytes = layers * file.layer_bytes
    own = min(file.read_seconds(4096, nbytes, direct) for direct in (True, False))
    for way in ("registered", "pinned", "direct"):
        file.drop_from_cache()
        with opened(file, window, layers=layers, backend="slots", host=way) as pager:
            file.drop_from_cache()
            seconds = seconds_of(one_pass(pager))
        row(
            rows,
            f"(c) cold pass, {way}, over the disk's own time",
            seconds / own,
            1.1 if way != "direct" else None,
            "x",
            f"{nbytes / own / 1e9:.2f} GB/s own",
        )


def main(arguments: list[str] | None = None) -> int:
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    cli.add_argument("--gb", type=float, default=28.0, help="of weights")
    cli.add_argument("--window-gb", type=float, help="of VRAM for them; 3 of 28")
    cli.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    cli.add_argument("--results", type=Path, help="the file to merge into; bench/results/<gpu>.json by default")
    cli.add_argument("--dry", action="store_true", help="write no results")
    options = cli.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no NVIDIA GPU on this machine")
        return 1
    window = int((options.window_gb or options.gb * 3 / 28) * 1e9)
    here = {**environment(), "sources": sources.of_folders(sources.PAGER)}
    head = {"environment": here, "gb": options.gb, "window gb": window / 1e9, "layers": LAYERS}
    rows = Rows(None if options.dry else head, options.results or card_file(torch.cuda.get_device_name()))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        start = time.perf_counter()
        file = WeightFile(Path(folder) / "weights.safetensors", int(options.gb * 1e9))
        print(f"{options.gb} GB written in {time.perf_counter() - start:.0f} s", flush=True)
        rate = pinned_rate(CudaDevice())
        row(rows, "pinned host to device", rate / 1e9, None, "GB/s")
        few = min(LAYERS, max(8, round(LAYERS / 5)))
        parts: list[Callable[[], None]] = [
            lambda: streaming(rows, file, window, rate, "slots", None),
            lambda: eviction_of_slots(rows, file, window),
            lambda: ram_budget(rows, file, window, 8 * options.gb / 28),
            lambda: streaming(rows, file, window, rate, "managed", few),
            lambda: cold(rows, file, window, few),
        ]
        for part in parts:
            try:
                part()
            except Exception as error:
                print(f"FAILED: {type(error).__name__}: {error}", flush=True)
                rows.append({"label": "failed", "error": str(error)})
                rows.save()
            torch.cuda.empty_cache()
        file.source.close()
    path = rows.save()
    if path is not None:
        print(f"written to {path}")
    return int(any("error" in r or (r["bound"] is not None and r["found"] > r["bound"]) for r in rows))
