"""Memory of streamed models: what they hold, give back and leave behind, towards ComfyUI's own management."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy.model_management as mm
import comfy.sample
import comfy.sd
import pytest
import torch
from comfy.patcher_extension import CallbacksMP
from live_memory import no_collector

from fusestream import checkpoints
from fusestream.fusion.base.errors import WrongInput
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.fusion.patcher import streaming_patcher
from fusestream.fusion.stream import vram_pool
from fusestream.memory import BadFile, FileChanged, OverBudget

GIB = 2**30
CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "whole_blocks")


@pytest.fixture(autouse=True)
def nothing_loaded() -> Iterator[None]:
    yield
    mm.unload_all_models()
    gc.collect()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory")


def load(folder: Path, storage: str = "fp32", seed: int = 0, layers: float | None = None) -> Any:
    """A streamed model with a budget of so many of its layers."""
    path = checkpoints.write("wan_t2v", folder, storage, seed)
    model = load_streamed_diffusion_model(str(path))
    if layers is not None:
        staging = model.stream.residency.least - 2 * model.stream.layers[0].nbytes
        model.stream.residency.ceiling = int(layers * model.stream.layers[0].nbytes) + staging
    return model


def sample(model: Any, callback: Any = None, steps: int = 2) -> torch.Tensor:
    source = torch.Generator().manual_seed(0)
    words = [[torch.randn(1, 20, checkpoints.T5_WIDTH, generator=source), {}]]
    latent = torch.zeros(1, 16, 2, 8, 8)
    run = ("euler", "simple", words, words, latent)
    noise = comfy.sample.prepare_noise(latent, 1)
    return comfy.sample.sample(model, noise, steps, 1.0, *run, disable_pbar=True, seed=1, callback=callback)


@pytest.fixture(scope="module")
def expected(folder: Path) -> torch.Tensor:
    return sample(comfy.sd.load_diffusion_model(str(checkpoints.write("wan_t2v", folder, "fp32"))))


# ------------------------------------------------------------------------------------------------------------ budgets


@pytest.mark.every_other
@pytest.mark.parametrize("layers", [2, 2.5, 3, 3.9, 4, 10])
@pytest.mark.parametrize("storage", ["fp32", "fp16"])  # fp16 is converted as it comes, by way of a staging room
def test_the_budget_is_never_exceeded(folder: Path, storage: str, layers: float) -> None:
    model = load(folder, storage, layers=layers)
    stream = model.stream
    assert sample(model).isfinite().all()
    assert (
        0 < stream.residency.held <= stream.residency.ceiling
        and stream.residency.ledger.peak("VRAM") <= stream.residency.ceiling
    )
    assert stream.residency.held == stream.residency.ledger.held("VRAM") == vram_pool.pool_of(CPU).budget.taken
    assert len(stream.residency.pager.plan.resident) == {2: 0, 2.5: 0, 3: 1, 3.9: 1, 4: 4, 10: 4}[layers]
    rest = sum(t.nbytes for name, t in model.model.named_parameters() if name not in stream.keys)
    rest += sum(buffer.nbytes for buffer in model.model.buffers())
    assert model.loaded_size() == model.model.model_loaded_weight_memory == stream.residency.held + rest
    assert model.loaded_size() <= model.model_size() == rest + min(stream.residency.most, stream.residency.ceiling)


def test_auto_takes_what_stock_gives(folder: Path) -> None:
    model = load(folder)
    assert model.stream.residency.ceiling is None
    mm.load_models_gpu([model])  # on the CPU stock gives everything
    assert len(model.stream.residency.pager.plan.resident) == 4


def test_a_budget_too_small_says_so_at_once(folder: Path) -> None:
    path = str(checkpoints.write("wan_t2v", folder, "fp32"))
    with pytest.raises(WrongInput, match=r"need at least 0\.003 GiB.*vram_budget is 0\.001.*Raise vram_budget"):
        load_streamed_diffusion_model(path, 0.001)


def test_out_of_memory_is_comfyuis_kind_and_names_the_knob() -> None:
    error = vram_pool.out_of_vram(
        OverBudget("Weights need 3. Raise the VRAM budget, or close what else uses the card.")
    )
    assert isinstance(error, torch.OutOfMemoryError)
    assert str(error) == (
        "Weights need 3. Raise vram_budget in the FuseStream Diffusion Model Loader, or close what else uses the card."
    )


def test_two_models_take_turns_in_one_budget(folder: Path, expected: torch.Tensor) -> None:
    one, two = load(folder, layers=3), load(folder, seed=1, layers=3)
    budget = vram_pool.pool_of(CPU).budget
    wanted = sample(comfy.sd.load_diffusion_model(str(checkpoints.write("wan_t2v", folder, "fp32", seed=1))))
    for _ in range(3):
        assert torch.equal(sample(one), expected)
        assert one.stream.residency.held == budget.taken <= budget.total == one.stream.residency.ceiling
        assert torch.equal(sample(two), wanted)
        assert two.stream.residency.held == budget.taken <= budget.total
        assert one.loaded_size() == one._rest_size(), "it gave everything"


def test_two_models_that_fit_both_stay(folder: Path, expected: torch.Tensor) -> None:
    one, two = load(folder, layers=8), load(folder, seed=1, layers=3)
    sample(one)
    sample(two)
    pager = one.stream.residency.pager
    assert one.stream.residency.held + two.stream.residency.held == vram_pool.pool_of(CPU).budget.taken
    assert torch.equal(sample(one), expected) and one.stream.residency.pager is pager
    assert max(entry.nbytes for entry in one.stream.residency.ledger.entries if entry.kind == "copy") > 0
    assert sum(entry.kind == "copy" for entry in one.stream.residency.ledger.entries) == 4


# -------------------------------------------------------------------------------------------------- stock's management


def test_stock_loads_and_unloads_it(folder: Path, expected: torch.Tensor) -> None:
    model = load(folder)
    assert not model.is_dynamic()
    mm.load_models_gpu([model])
    assert model.loaded_size() == model.model_size() and model.current_loaded_device() == CPU
    assert model.model.current_weight_patches_uuid == model.patches_uuid
    calls = []
    model.add_callback(CallbacksMP.ON_LOAD, lambda *args: calls.append(args))
    mm.unload_all_models()
    assert model.stream.residency.pager is None and model.loaded_size() == 0 == model.stream.residency.ledger.held(
        "VRAM"
    )
    assert torch.equal(sample(model), expected)
    assert len(calls) == 1
    assert torch.equal(sample(model), expected)
    assert len(calls) == 1, "it was loaded already"


def test_stock_gets_back_what_it_asks_for(folder: Path, expected: torch.Tensor) -> None:
    model = load(folder)
    mm.load_models_gpu([model])
    stream, layer = model.stream, model.stream.layers[0].nbytes
    held = stream.residency.held
    freed = model.partially_unload(CPU, layer // 2)
    assert freed == held - stream.residency.held >= layer // 2
    assert stream.residency.pager.plan.slots == 2 and len(stream.residency.pager.plan.resident) == 1, "residents first"
    assert model.partially_unload(CPU, layer) == layer and not stream.residency.pager.plan.resident
    assert torch.equal(sample(model), expected), "and it was given more to sample"
    assert model.partially_unload(CPU, stream.residency.held) == held and stream.residency.pager is None, (
        "the window too"
    )
    assert model.partially_unload(CPU, 1) == 0


def test_stock_gives_little_and_more_and_takes_it_again(folder: Path, expected: torch.Tensor) -> None:
    model = load(folder)
    stream, layer = model.stream, model.stream.layers[0].nbytes
    taken = model.partially_load(CPU, 0.1)
    assert taken == model.loaded_size() and stream.residency.held == stream.residency.least
    assert model.partially_load(CPU, layer) == layer and len(stream.residency.pager.plan.resident) == 1
    assert model.partially_load(CPU, 0) == 0
    assert model.partially_load(CPU, -layer) == 0 and stream.residency.held == stream.residency.least
    assert model.partially_load(CPU, 1e32) == stream.residency.most - stream.residency.least
    assert model.partially_load(CPU, 1e32) == 0
    assert torch.equal(sample(model), expected)


def test_other_patches_do_not_change_what_it_holds(folder: Path) -> None:
    model = load(folder)
    model.partially_load(CPU, 0.1)
    patched = model.clone()
    patched.add_patches({"diffusion_model.blocks.2.ffn.0.weight": ("diff", (torch.ones(640, 256),))}, 0.1)
    layer, held = model.stream.layers[0].nbytes, model.loaded_size()
    assert patched.partially_load(CPU, 0) == 0 and model.loaded_size() == held
    assert model.partially_load(CPU, layer) == layer
    assert patched.partially_load(CPU, -layer) == -layer and model.loaded_size() == held


def test_loaded_model_as_stock_frees_it(folder: Path) -> None:
    """Through LoadedModel: first what it asks for, and everything when that is not enough."""
    model = load(folder)
    mm.load_models_gpu([model])
    loaded = next(entry for entry in mm.current_loaded_models if entry.model is model)
    assert loaded.model_memory() == loaded.model_loaded_memory() and loaded.model_offloaded_memory() == 0
    assert not loaded.model_unload(1000)
    assert model.stream.residency.pager is not None and loaded.model_offloaded_memory() > 0
    assert loaded.model_unload(1e32)
    assert model.stream.residency.pager is None
    mm.current_loaded_models.remove(loaded)


def test_free_memory_is_what_is_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(folder)
    monkeypatch.setattr(mm, "get_free_memory", lambda device: 12345)
    assert model.get_free_memory(CPU) == 12345


def test_what_weights_that_pass_through_can_do_without_is_free_for_a_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of prompts is worth more than residents or blocks as a whole. Not where nothing passes: then they cost nothing."""
    model = load(folder)
    stream, reckoning = model.stream, model.model.fusestream_reckoning
    mm.load_models_gpu([model])
    monkeypatch.setattr(mm, "get_free_memory", lambda device: 12345)

    def free_for_a_batch() -> int:
        with reckoning.batching():
            return int(model.get_free_memory(CPU))

    stream.residency.load(CPU, stream.residency.whole)
    assert stream.residency.pager.plan.streamed and model.get_free_memory(CPU) == 12345
    assert free_for_a_batch() == 12345 + stream.residency.held - stream.residency.narrow > 12345
    stream.residency.load(CPU, stream.residency.most)
    assert not stream.residency.pager.plan.streamed and free_for_a_batch() == 12345


def test_the_rest_of_the_model_moves_and_the_stand_ins_do_not(folder: Path) -> None:
    model = load(folder, "fp8_scaled")
    mm.load_models_gpu([model])
    model.unpatch_model(torch.device("cpu"))
    assert all(
        getattr(t, "_qdata", t).is_meta == (name in model.stream.keys) for name, t in model.model.named_parameters()
    )


def test_pinned_memory_is_in_stocks_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mm, "TOTAL_PINNED_MEMORY", 100)
    ram = vram_pool.CountedRam(50)
    assert ram.try_take(30) and not ram.try_take(30)
    assert mm.TOTAL_PINNED_MEMORY == 130
    ram.give_back(30)
    assert mm.TOTAL_PINNED_MEMORY == 100
    asked: list[int] = []
    monkeypatch.setattr(vram_pool, "_ram", ram)
    monkeypatch.setattr(mm, "ensure_pin_registerable", asked.append)
    assert vram_pool.ram_for(20) is vram_pool.ram_for(60) is ram and asked == [20, 50]


# ------------------------------------------------------------------------------------------------- in the middle of it


class Inside:
    """Does something in the middle of one block of one step."""

    def __init__(self, deed: Any, call: int) -> None:
        self.deed, self.left = deed, call

    def __call__(self, args: dict[str, Any]) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            self.deed()
        return args["x"]


def with_deed(model: Any, deed: Any, call: int = 6) -> Any:
    model = model.clone()
    model.set_model_attn1_patch(Inside(deed, call))
    return model


@pytest.mark.every_other
@pytest.mark.parametrize("call", [1, 4, 6])
@pytest.mark.parametrize("layers", [2, 4])
def test_interrupted_and_run_again(folder: Path, expected: torch.Tensor, layers: int, call: int) -> None:
    model = load(folder, layers=layers)
    with pytest.raises(mm.InterruptProcessingException):
        sample(with_deed(model, mm.interrupt_current_processing, call))
    stream = model.stream
    assert not stream.residency.in_use
    assert all(tensor.is_meta for name, tensor in model.model.named_parameters() if name in stream.keys)
    assert torch.equal(sample(model), expected)
    assert stream.residency.ledger.peak("VRAM") <= stream.residency.ceiling


def test_unloaded_between_two_steps(folder: Path, expected: torch.Tensor) -> None:
    model = load(folder, layers=3)
    held = []

    def unload(*_: Any) -> None:
        mm.unload_all_models()
        held.append(model.stream.residency.held)

    assert torch.equal(sample(model, unload), expected)
    assert held[0] == 0 and model.stream.residency.held == 0 == model.loaded_size(), (
        "stock believes that it is unloaded"
    )
    assert torch.equal(sample(model), expected) and model.stream.residency.held > 0


def test_unloaded_within_a_block(folder: Path, expected: torch.Tensor) -> None:
    """The block ends with the weights that it has; then they go, and the next block brings its own."""
    model = load(folder, layers=3)
    pagers = []

    def unload() -> None:
        pagers.append(weakref.ref(model.stream.residency.pager))
        assert model.partially_unload(CPU, 1000) == 0, "nothing goes from under a running block"
        mm.unload_all_models()

    assert torch.equal(sample(with_deed(model, unload)), expected)
    gc.collect()
    assert pagers[0]() is None and model.stream.residency.held == 0
    assert model.stream.residency.ledger.peak("VRAM") <= model.stream.residency.ceiling


def test_another_model_is_sampled_within_a_block(folder: Path, expected: torch.Tensor) -> None:
    model, other = load(folder, layers=4), load(folder, seed=1, layers=2)
    vram_budget = vram_pool.pool_of(CPU).budget
    found = []

    def nested() -> None:
        with pytest.raises(torch.OutOfMemoryError, match="other models hold") as caught:
            sample(other)
        found.append(caught)

    assert torch.equal(sample(with_deed(model, nested)), expected) and found
    assert vram_budget.taken == model.stream.residency.held + other.stream.residency.held


def test_one_that_runs_before_it_is_loaded_says_so(folder: Path) -> None:
    model = load(folder)
    with pytest.raises(RuntimeError, match="before ComfyUI's memory management has loaded it"):
        model.model.diffusion_model.blocks[0](torch.zeros(1, 4, 256))


def test_a_file_that_changes_is_named_and_no_result_leaves(tmp_path: Path) -> None:
    model = load(tmp_path, layers=2)
    path = checkpoints.write("wan_t2v", tmp_path, "fp32")

    def touch(*_: Any) -> None:
        content = path.read_bytes()
        path.write_bytes(content[:-1] + b"x")

    with pytest.raises(FileChanged, match=rf"{path.name}.*Press Run again"):
        sample(model, touch)


def touch(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))


def write_again(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content)
    touch(path)


def move_away_and_back(path: Path) -> None:
    away = path.rename(path.with_suffix(".away"))
    away.rename(path)
    touch(path)


def put_a_copy_in_its_place(path: Path) -> None:
    copy = path.with_suffix(".copy")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)


@pytest.mark.every_other
@pytest.mark.parametrize("deed", [touch, write_again, move_away_and_back, put_a_copy_in_its_place])
@pytest.mark.parametrize(("layers", "between"), [(2, True), (2, False), (4, False)])
def test_a_file_that_is_whole_again_streams_on(
    tmp_path: Path, expected: torch.Tensor, deed: Any, layers: int, between: bool
) -> None:
    """Between two prompts, or in one, which then fails if weights are still to come."""
    model = load(tmp_path, layers=layers)
    path = checkpoints.write("wan_t2v", tmp_path, "fp32")
    assert torch.equal(sample(model), expected)
    if between:
        deed(path)
    elif layers == 2:
        with pytest.raises(FileChanged, match="Press Run again"):
            sample(model, lambda *_: deed(path))
    else:
        assert torch.equal(sample(model, lambda *_: deed(path)), expected)
    for _ in range(2):
        assert torch.equal(sample(model), expected)
    assert model.stream.residency.held == vram_pool.pool_of(CPU).budget.taken <= model.stream.residency.ceiling


def test_a_file_that_was_away_for_a_while_streams_on(tmp_path: Path, expected: torch.Tensor) -> None:
    """The very same one: a drive that was unplugged."""
    model = load(tmp_path, layers=2)
    path = checkpoints.write("wan_t2v", tmp_path, "fp32")
    away = path.with_suffix(".away")
    with pytest.raises(FileChanged, match="moved or deleted"):
        sample(model, lambda *_: path.exists() and path.rename(away))
    with pytest.raises(BadFile, match="cannot be read"):
        sample(model)
    away.rename(path)
    assert torch.equal(sample(model), expected)


@pytest.mark.parametrize("seed", [0, 1])
def test_another_model_under_the_name_is_never_mixed_with_this_one(tmp_path: Path, seed: int) -> None:
    """Of another seed; or of the same in all but one tensor that is not paged."""
    model = load(tmp_path, layers=2)
    path = checkpoints.write("wan_t2v", tmp_path, "fp32")
    sample(model)
    other = tmp_path / "other"
    other.mkdir()
    content = bytearray(checkpoints.write("wan_t2v", other, "fp32", seed).read_bytes())
    if seed == 0:
        extent = model.stream.residency.source.extents["head.modulation"]
        content[extent.end - 1] ^= 1
    path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(FileChanged, match=r"another model.*Press Run again"):
            sample(model)


def test_a_file_cut_short_says_so(tmp_path: Path, expected: torch.Tensor) -> None:
    model = load(tmp_path, layers=2)
    path = checkpoints.write("wan_t2v", tmp_path, "fp32")
    sample(model)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(BadFile, match="cut short"):
        sample(model)
    path.write_bytes(content)
    assert torch.equal(sample(model), expected)


def test_it_checks_after_a_run_that_went_well_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(folder)
    sample(model)

    def changed() -> None:
        raise FileChanged("it changed")

    monkeypatch.setattr(model.stream.residency.pager, "check", changed)
    with pytest.raises(FileChanged):
        model.cleanup()
    try:
        raise KeyError("what went wrong first")
    except KeyError:
        model.cleanup()


# ---------------------------------------------------------------------------------------------------- what is left over


def own_threads() -> int:
    """Not those that other libraries start at their first use, and keep."""
    return sum(thread.name.startswith("fusestream") for thread in threading.enumerate())


def open_files(path: Path) -> int:
    links = Path("/proc/self/fd")
    return sum(os.path.realpath(link) == str(path.resolve()) for link in links.iterdir())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted on Linux")
@pytest.mark.parametrize("how", ["loaded", "sampled", "interrupted", "cloned"])
def test_nothing_is_left_of_a_deleted_model(folder: Path, how: str) -> None:
    path = checkpoints.write("wan_t2v", folder, "fp32")
    gc.collect()
    threads, files, taken = own_threads(), open_files(path), vram_pool.pool_of(CPU).budget.taken
    model = load(folder, layers=3)
    assert open_files(path) == files + 1
    if how == "sampled":
        sample(model)
    if how == "interrupted":
        with pytest.raises(mm.InterruptProcessingException):
            sample(with_deed(model, mm.interrupt_current_processing))
    if how == "cloned":
        clone = model.clone()
        sample(clone)
        del clone
    stream = model.stream
    gone = [weakref.ref(thing) for thing in (model, model.model, model.model.diffusion_model.blocks[0], stream)]
    del model, stream
    gc.collect()
    mm.cleanup_models_gc()
    assert [ref() for ref in gone] == [None] * 4
    assert (own_threads(), open_files(path), vram_pool.pool_of(CPU).budget.taken) == (threads, files, taken)


def test_a_deleted_model_needs_no_collector(folder: Path) -> None:
    """Its memory goes with the last reference: ComfyUI warns of models that need more."""
    model = load(folder, layers=3)
    sample(model)
    stream, net = model.stream, weakref.ref(model.model)
    mm.unload_all_models()
    sample(model)
    with no_collector():
        del model
        assert net() is None and stream.residency.pager is None and stream.residency.held == 0


def test_the_collector_may_run_in_the_pagers_own_thread(folder: Path) -> None:
    """Closing from there would wait for itself."""
    model = load(folder, layers=3)
    sample(model)
    stream = model.stream
    thread = threading.Thread(target=streaming_patcher._end, args=(stream,), name="fusestream-copies")
    thread.start()
    thread.join()
    for closing in [t for t in threading.enumerate() if t.name == "closing"]:
        closing.join()
    assert stream.residency.pager is None and stream.residency.held == 0


def test_nobody_waits_for_a_model_that_another_thread_loads(folder: Path) -> None:
    model = load(folder)
    sample(model)
    with model.stream.residency.lock:
        found: list[int] = []
        asking = threading.Thread(target=lambda: found.append(model.stream.residency.shrink(1000)))
        asking.start()
        asking.join(10)
        assert found == [0]
    assert model.stream.residency.shrink(1000) > 0


@pytest.mark.deep
def test_many_runs_leave_nothing(folder: Path) -> None:
    one, two = load(folder, layers=3), load(folder, seed=1, layers=3)
    patched = one.clone()
    patched.add_patches({"diffusion_model.blocks.2.ffn.0.weight": ("diff", (torch.ones(640, 256),))}, 0.1)
    counts = []
    for _ in range(6):
        for model in (one, two, patched):
            sample(model, steps=1)
        gc.collect()
        tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        counts.append((own_threads(), vram_pool.pool_of(CPU).budget.taken, tensors))
    assert len(set(counts[2:])) == 1, counts
