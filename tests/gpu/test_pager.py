"""The pager on a GPU: the file's bytes, in time, within the budget, by every route and whatever happens.

Managed pools are guarded in every test: none is larger than what the card has free.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from interrupting import Interrupt
from prediction import compare
from safetensors.torch import save_file

from fusestream.memory import (
    Checkpoint,
    DeviceBudget,
    FileChanged,
    KeptPages,
    Layer,
    Ledger,
    OverBudget,
    RamBudget,
    Weight,
    open_pager,
)

MIB = 1 << 20
ROUTES = ("registered", "pinned", "direct", "managed")
LAYERS, ELEMENTS = 12, 2 * MIB  # of 8 MiB: two weights of fp16
ROOM = 10 * MIB  # a weight of odd size makes it a page more


class Model:
    """A weight file and its pagers."""

    def __init__(self, path: Path, seed: int, dtype: torch.dtype = torch.float16) -> None:
        self.path = path
        generator = torch.Generator().manual_seed(seed)
        shape = LAYERS, 2 * ELEMENTS + 77
        if dtype is not torch.float16:  # bits of any kind, or numbers that survive a conversion
            values = torch.randn(shape, generator=generator).to(dtype)
        else:
            values = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16).view(dtype)
        self.stored = {}
        for i in range(LAYERS):
            self.stored[f"{i:02}.b"] = values[i, : ELEMENTS + 77].contiguous()
            self.stored[f"{i:02}.a"] = values[i, ELEMENTS + 77 :].contiguous()
        save_file(self.stored, path)
        self.source = Checkpoint.open(path)
        self.want = {name: t.half().cuda() for name, t in self.stored.items()}
        self.layers = [
            Layer(
                f"layer {i}",
                tuple(Weight(name, self.source.extents[name], torch.float16) for name in (f"{i:02}.a", f"{i:02}.b")),
            )
            for i in range(LAYERS)
        ]
        self.pagers = []

    def open(self, route, budget, vram=None, ram=None, ledger=None, **options):
        backend, host = ("managed", "auto") if route == "managed" else ("slots", route)
        if route == "auto":
            backend = host = "auto"
        pager = open_pager(
            self.source, self.layers, vram or DeviceBudget(budget), budget, backend=backend, host=host, guard=True,
            ram=ram or RamBudget(1024 * MIB), ledger=ledger or Ledger(), **options,
        )  # fmt: skip
        self.pagers.append(pager)
        return pager

    def differs(self, weights) -> torch.Tensor:
        """On the device, without waiting: how many elements differ."""
        wrong = [(w.view(torch.int16) != self.want[name].view(torch.int16)).sum() for name, w in weights.items()]
        return torch.stack(wrong).sum()

    def passes(self, pager, order=range(LAYERS), times=1) -> int:
        wrong = []
        for _ in range(times):
            for i in order:
                with pager.use(i) as weights:
                    wrong.append(self.differs(weights))
        return int(torch.stack(wrong).sum())

    def close(self) -> None:
        for pager in self.pagers:
            pager.close()
        self.source.close()


@pytest.fixture(scope="module")
def module_model(tmp_path_factory):
    model = Model(tmp_path_factory.mktemp("pager") / "a.safetensors", 1)
    with model.path.open("rb") as file:
        os.fsync(file.fileno())  # reads past the page cache would write it piece by piece
    yield model
    model.close()


@pytest.fixture
def model(module_model):
    yield module_model
    for pager in module_model.pagers:
        pager.close()
    module_model.pagers.clear()


@pytest.mark.parametrize("route", ROUTES)
def test_right_bytes_in_order_and_in_any_order(model, route):
    ledger = Ledger()
    pager = model.open(route, 5 * ROOM, ledger=ledger)
    assert len(pager.plan.resident) == 3 and pager.plan.slots == 2
    assert model.passes(pager, times=3) == 0
    orders = random.Random(torch.initial_seed())
    assert model.passes(pager, [orders.randrange(LAYERS) for _ in range(60)]) == 0
    pager.check()
    summary = ledger.summary()
    assert summary["counts"]["copy"] >= 3 * 9 and summary["counts"]["use"] >= 96
    assert summary["notes"]["backend"].endswith("asked for") and "GB/s" in summary["notes"]["rates"]
    assert summary["peak bytes"]["VRAM"] <= 5 * ROOM
    found = compare(pager)
    assert found.rates.bus > 1e9 and 0 <= found.overlap <= 1
    if route == "registered":
        assert summary["bytes by route"].keys() == {"registered"}


@pytest.mark.parametrize("route", ROUTES)
def test_compute_that_lags_far_behind_is_not_overwritten(model, route):
    """The host asks for whole passes while the device still sleeps: only events keep weights in place."""
    pager = model.open(route, 2 * ROOM)
    assert model.passes(pager) == 0
    wrong = []
    for i in [*range(LAYERS), *range(LAYERS)]:
        with pager.use(i) as weights:
            torch.cuda._sleep(3_000_000)
            wrong.append(model.differs(weights))
            torch.cuda._sleep(1_000_000)
    assert int(torch.stack(wrong).sum()) == 0


@pytest.mark.parametrize("route", ROUTES)
def test_interrupted_anywhere_it_goes_on(model, route):
    pager = model.open(route, 3 * ROOM)
    model.passes(pager)
    when, interrupts = random.Random(torch.initial_seed()), 0
    for _ in range(4 if route == "direct" else 12):  # each comes from the disk again
        interrupt = Interrupt(when.uniform(0, 0.02))
        try:
            interrupt.soon()
            for _ in range(3):
                model.passes(pager)
            interrupt.join()
        except KeyboardInterrupt:
            interrupts += 1
        interrupt.join()
        pager.abandon()
        assert model.passes(pager) == 0
    assert interrupts


def test_stored_types_are_converted_on_the_copy_stream(tmp_path):
    model = Model(tmp_path / "bf16.safetensors", 5, torch.bfloat16)
    calls = []

    def convert(stored, out, _encoding):
        calls.append(torch.cuda.current_stream())
        out.copy_(stored)

    for route in ROUTES:
        pager = model.open(route, 3 * ROOM + 6 * MIB, convert=convert)
        assert model.passes(pager, times=2) == 0, route
        pager.close()
        if route == "registered":
            assert calls and all(stream != torch.cuda.default_stream() for stream in calls)
    model.close()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_channels_lie_last_by_every_route(tmp_path, route, stored):
    """Laid out on the copy stream, or once where managed memory is filled; compute that lags behind finds the right numbers."""
    generator = torch.Generator().manual_seed(9)
    shapes = [(256, 320, 3, 3), (320, 256, 3, 3), (64, 4, 3, 3)]
    tensors = {}
    for i in range(LAYERS):
        numbers = torch.randn(shapes[i % 3], generator=generator).to(stored)
        tensors |= {f"{i:02}.weight": numbers, f"{i:02}.bias": numbers[:, 0, 0, 0].clone()}
    save_file(tensors, tmp_path / "x.safetensors")
    want = {name: t.half().cuda() for name, t in tensors.items()}
    with Checkpoint.open(tmp_path / "x.safetensors") as source:
        layers = [
            Layer(
                f"{i}",
                tuple(
                    Weight(f"{i:02}.{name}", source.extents[f"{i:02}.{name}"], torch.float16, name == "weight")
                    for name in ("weight", "bias")
                ),
            )
            for i in range(LAYERS)
        ]
        backend, host = ("managed", "auto") if route == "managed" else ("slots", route)
        budget, ledger = 10 * MIB, Ledger()
        pager = open_pager(
            source, layers, DeviceBudget(budget), budget, backend=backend, host=host, guard=True,
            ram=RamBudget(256 * MIB), ledger=ledger,
        )  # fmt: skip
        assert pager.plan.streamed
        wrong = []
        for _ in range(3):
            for i in range(LAYERS):
                with pager.use(i) as weights:
                    torch.cuda._sleep(1_000_000)
                    weight = weights[f"{i:02}.weight"]
                    assert weight.is_contiguous(memory_format=torch.channels_last) and weight.data_ptr() % 16 == 0
                    wrong += [(found != want[name]).sum() for name, found in weights.items()]
        assert int(torch.stack(wrong).sum()) == 0
        pager.check()
        assert ledger.peak("VRAM") <= budget
        pager.close()


def test_two_models_on_one_budget(model, tmp_path):
    other, vram, ram = Model(tmp_path / "b.safetensors", 2), DeviceBudget(6 * ROOM), RamBudget(64 * MIB)
    one, two = model.open("registered", 3 * ROOM, vram, ram), other.open("registered", 3 * ROOM, vram, ram)
    assert vram.left == 0
    for _ in range(3):
        wrong = []
        for i in range(LAYERS):
            with one.use(i) as left, two.use(i) as right:
                wrong += [model.differs(left), other.differs(right)]
        assert int(torch.stack(wrong).sum()) == 0
        assert ram.taken <= 64 * MIB
    with pytest.raises(OverBudget, match="other models hold"):
        model.open("registered", 2 * ROOM, vram, ram)
    other.close()
    model.passes(one)


@pytest.mark.parametrize("route", ROUTES)
def test_two_threads_two_streams(model, route):
    pager = model.open(route, 5 * ROOM)
    wrong, errors = [], []

    def run(order):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                wrong.extend(model.passes(pager, order) for _ in range(2))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(order,)) for order in (range(LAYERS), range(LAYERS - 1, -1, -1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and wrong == [0] * 4


@pytest.mark.parametrize("route", ["registered", "managed"])
def test_less_and_more_without_starting_anew(model, route):
    vram = DeviceBudget(9 * ROOM)
    pager = model.open(route, 5 * ROOM, vram)
    for budget in (5, 9, 2, 7):
        pager.resize(budget * ROOM)
        assert vram.taken <= budget * ROOM
        assert model.passes(pager, times=2) == 0
    with pytest.raises(OverBudget):
        pager.resize(ROOM)
    assert model.passes(pager) == 0


@pytest.mark.parametrize("route", ["registered", "pinned", "managed"])
def test_under_inference_mode_and_outside(model, route):
    with torch.inference_mode():
        pager = model.open(route, 3 * ROOM)
        assert model.passes(pager) == 0
    assert model.passes(pager) == 0
    with pager.use(0) as weights:
        assert not next(iter(weights.values())).is_inference()


@pytest.mark.parametrize("ram", [16, 48])
def test_the_ram_budget_holds(model, ram):
    ledger, budget = Ledger(), RamBudget(ram * MIB)
    pager = model.open("registered", 3 * ROOM, ram=budget, ledger=ledger)
    assert model.passes(pager, times=3) == 0
    peaks = ledger.summary()["peak bytes"]
    assert peaks["registered RAM"] + peaks["pinned RAM"] <= ram * MIB and budget.taken <= ram * MIB
    assert ledger.summary()["bytes by route"].keys() == {"registered", "page cache or disk"}
    pager.close()
    assert budget.taken == 0


def test_auto_says_what_it_chose_and_why(model):
    ledger = Ledger()
    pager = model.open("auto", 3 * ROOM, ledger=ledger)
    assert model.passes(pager) == 0
    notes = ledger.summary()["notes"]
    assert notes["backend"].split(":")[0] in ("slots", "managed") and notes["backend"].split(": ", 1)[1]
    if notes["backend"].startswith("slots"):
        assert notes["host"].split(":")[0] in ("registered", "pinned")


def test_the_drivers_own_count_stays_within_the_budget(model):
    """Rooms are taken and given back: what the driver counts never exceeds the largest budget by more than 2 %."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    pager = model.open("registered", 5 * ROOM, DeviceBudget(9 * ROOM))
    largest = 0
    for budget in (5, 3, 5, 9, 2):
        pager.resize(budget * ROOM)
        largest = max(largest, budget * ROOM)
        for i in range(LAYERS):
            with pager.use(i):
                assert before - torch.cuda.mem_get_info()[0] <= largest * 1.02 + 2 * MIB
    assert before - torch.cuda.mem_get_info()[0] <= 2 * ROOM * 1.02 + 2 * MIB
    pager.close()
    assert before - torch.cuda.mem_get_info()[0] <= 2 * MIB


def test_a_graph_replays_over_managed_addresses(model):
    """Captured once with whatever was there, replayed when the pages are back: a layer's address is its own."""
    pager = model.open("managed", 2 * ROOM)
    outputs, graphs = [], []
    for i in range(4):
        with pager.use(i) as weights:
            total = torch.zeros((), dtype=torch.int64, device="cuda")
            pager._backend.drain()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                total.copy_(sum(w.view(torch.int16).sum(dtype=torch.int64) for w in weights.values()))
            outputs.append(total)
            graphs.append(graph)
    model.passes(pager)
    want = [
        sum(int(model.want[w.name].view(torch.int16).sum(dtype=torch.int64)) for w in model.layers[i].weights)
        for i in range(4)
    ]
    for _ in range(2):
        for i in (0, 2, 1, 3):
            outputs[i].zero_()
            with pager.use(i):
                graphs[i].replay()
        torch.cuda.synchronize()
        assert [int(total) for total in outputs] == want
    del graphs


def test_the_guard_refuses_what_the_card_has_not_free(model, monkeypatch):
    from fusestream.memory.backends import cuda_managed

    monkeypatch.setattr(cuda_managed.CudaManagedMemory, "free_bytes", lambda self: 64 * MIB)
    with pytest.raises(OverBudget, match="guard"):
        model.open("managed", 3 * ROOM)
    ledger = Ledger()
    model.open("auto", 3 * ROOM, ledger=ledger)
    assert "the guard is on" in ledger.summary()["notes"]["backend"]


def test_a_managed_view_outlives_its_pager(model):
    pager = model.open("managed", 2 * ROOM)
    with pager.use(3) as weights:
        kept = dict(weights)
    pager.close()
    assert int(model.differs(kept)) == 0
    del weights


def test_a_file_that_changes_while_it_streams(tmp_path):
    model = Model(tmp_path / "c.safetensors", 3)
    pagers = [model.open(route, 3 * ROOM) for route in ROUTES[:3]]
    for pager in pagers:
        model.passes(pager)
    with model.path.open("r+b") as file:
        file.truncate(model.path.stat().st_size - 5 * ROOM)
    for pager in pagers:
        with pytest.raises(FileChanged, match=model.path.name):
            model.passes(pager)
            pager.check()
    model.close()


def resident_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def test_a_model_that_comes_back_finds_its_pages_registered(model):
    """As two models that take turns on the card do; the other registers first what is given back."""
    kept, ram, ledger = KeptPages(), RamBudget(1024 * MIB), Ledger()

    def load_and_run(budget):
        pager = model.open("registered", budget, ram=ram, ledger=ledger, kept=kept)
        assert model.passes(pager, times=2) == 0
        pager.close()

    load_and_run(20 * ROOM)
    held = ledger.held("registered RAM")
    assert ram.kept() == ram.taken == held >= LAYERS * 8 * MIB
    for budget in (2, 5, 20):
        load_and_run(budget * ROOM)
        assert ledger.summary()["peak bytes"]["registered RAM"] == ledger.held("registered RAM") == held
    ram.total = held + MIB * 8
    other = model.open("registered", 3 * ROOM, ram=ram)
    assert model.passes(other, times=2) == 0 and ram.taken <= ram.total
    other.close()
    kept.give_back()
    assert ram.taken == ledger.held("registered RAM") == 0


@pytest.mark.parametrize("route", ROUTES)
def test_nothing_is_left_behind(model, route):
    used = range(4 if route == "direct" else LAYERS)  # a pass comes from the disk again

    def cycle():
        pager = model.open(route, 3 * ROOM, ram=RamBudget(192 * MIB))
        model.passes(pager, used)
        pager.close()
        model.pagers.clear()

    for _ in range(3):
        cycle()
    gc.collect()
    torch.cuda.empty_cache()
    threads, free, rss = threading.active_count(), torch.cuda.mem_get_info()[0], resident_kib()
    for _ in range(10):
        cycle()
    gc.collect()
    torch.cuda.empty_cache()
    assert threading.active_count() == threads
    assert free - torch.cuda.mem_get_info()[0] <= 2 * MIB
    assert resident_kib() - rss <= 24 * 1024


def test_a_process_that_dies_with_a_pager_open_says_why(tmp_path):
    """Side by side, because most of their time goes into their start."""
    program = Path(__file__).resolve().parents[1] / "left_open.py"
    with contextlib.ExitStack() as ending:
        processes = {}
        for route in ROUTES:
            folder = tmp_path / route
            folder.mkdir()
            command = [sys.executable, str(program), "cuda", route, str(folder)]
            processes[route] = ending.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
            ending.callback(processes[route].kill)  # one that hangs
        for route, process in processes.items():
            said = process.communicate(timeout=120)[1]
            assert process.returncode == 1, (route, said)
            assert said.splitlines()[-1] == "Mistake: the caller's own", route
