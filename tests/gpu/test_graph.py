"""Calls that are captured as CUDA graphs: what comes out is what comes out without, bit for bit, and no VRAM is left behind.

The same again under ComfyUI's usual allocator, in a process of its own: torch chooses one as it starts.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.models import load, sample, with_loras
from gpu.support import ASYNC, under_comfyuis_allocator, until_chosen

from fusestream import checkpoints
from fusestream.kernels_cuda import LEDGER, OPS, KernelPolicy

pytestmark = [
    pytest.mark.usefixtures("as_comfyui_runs"),
    pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI"),
]

MIB = 2**20


@pytest.fixture(autouse=True)
def small_ones_too() -> Iterator[None]:
    import comfy

    from fusestream.checkpoints import narrow

    LEDGER.clear()
    with narrow.opened(comfy):
        yield


def whole(path: Path, policy: KernelPolicy | None = None) -> Any:
    """All of it stays on the card."""
    model = load(path, policy or KernelPolicy())
    model.stream.residency.ceiling = None
    model.stream.residency.pager_options = {"backend": "slots"}
    return model


def without_graphs(path: Path, run: Callable[[Any], torch.Tensor], *loras: tuple[str, float]) -> torch.Tensor:
    model = whole(path)
    model.stream.residency.graphs = None
    model.model.diffusion_model.__dict__["fusestream_graphs"]._recorder = Nothing()
    changed = with_loras(model, path.parent, *loras)
    found: torch.Tensor = until_chosen(lambda: run(changed))
    return found


class Nothing:
    """Records nothing."""

    def obstacle(self, _device: torch.device) -> str:
        return "not in this test"


def reasons() -> set[str]:
    return {refusal.reason for refusal in LEDGER.refusals if refusal.op == "model call"}


def pays(model: Any) -> Any:
    """It is captured even where the card is the bound: poisoned outputs cost it time."""
    graphs = model.stream.residency.graphs
    timed = graphs._recorder.timed
    recorder = type("Pays", (type(graphs._recorder),), {})()
    recorder.timed = lambda device, work: timed(device, work)._replace(host=1.0, whole=1.0)
    graphs._recorder = recorder
    return model


def warmed(path: Path, times: int = 4) -> tuple[Any, torch.Tensor]:
    want = without_graphs(path, sample)
    model = pays(whole(path))
    for i in range(times):
        assert torch.equal(sample(model), want), f"run {i}"
    assert model.stream.residency.graphs.replayed >= 2, (reasons(), model.stream.residency.ledger.summary()["notes"])
    return model, want


def used() -> float:
    """MiB of the card."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / MIB


# ------------------------------------------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("kind", checkpoints.wan.SIZES)
def test_wan_is_the_same(folder: Path, kind: str) -> None:
    warmed(checkpoints.write(kind, folder))
    assert not reasons()


@pytest.mark.parametrize("kind", ["flux1", "flux2", "z_image", "sd15", "sdxl"])
def test_pictures_are_the_same(folder: Path, kind: str) -> None:
    import family_scenes
    import scenes

    path = checkpoints.write(kind, folder)
    scene = family_scenes.inputs(kind)
    want = without_graphs(path, lambda model: scenes.sample(model, scene))
    model = pays(whole(path))
    for _ in range(4):
        assert torch.equal(scenes.sample(model, scene), want)
    assert model.stream.residency.graphs.replayed >= 2 and not reasons(), (
        reasons(),
        model.stream.residency.ledger.summary()["notes"],
    )


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "bf16"])
def test_packed_weights_are_the_same(folder: Path, storage: str) -> None:
    warmed(checkpoints.write("wan_t2v", folder, storage))


@pytest.mark.parametrize(("kind", "type_", "name"), [("qwen3", "lumina2", "qwen3_4b"), ("umt5", "wan", "umt5xxl")])
def test_encodings_are_the_same(folder: Path, kind: str, type_: str, name: str) -> None:
    from fusestream.fusion.load.text import load_streamed_text_encoder

    path = checkpoints.write(kind, folder)
    options = checkpoints.model_options(path)

    def encode(clip: Any, first: int) -> torch.Tensor:
        rows = [[(first + i, 1.0) for i in range(length)] + [(100, 1.0)] * (9 - length) for length in (7, 5)]
        out: torch.Tensor = clip.encode_from_tokens({name: rows})
        return out

    plain, clip = (load_streamed_text_encoder(str(path), [], kind=type_, options=options) for _ in range(2))
    plain.patcher.stream.residency.graphs = None
    pays(clip.patcher)
    until_chosen(lambda: encode(plain, 3))
    for first in range(3, 9):
        assert torch.equal(encode(clip, first), encode(plain, first))
    graphs = clip.patcher.stream.residency.graphs
    assert graphs.replayed >= 2 and not reasons(), (reasons(), clip.patcher.stream.residency.ledger.summary()["notes"])


# ---------------------------------------------------------------------------------------------------------------- texts


def writers(folder: Path, storage: str = "fp16") -> tuple[Any, Any]:
    """One without graphs, and one that has them; kernels are chosen, and neither keeps a vision tower that it does not use."""
    from fusestream.fusion.load.text import load_streamed_text_encoder

    path = checkpoints.write("qwen3_vl", folder, storage)
    plain, clip = (load_streamed_text_encoder(str(path), []) for _ in range(2))
    plain.patcher.stream.residency.graphs = None
    pays(clip.patcher)
    until_chosen(lambda: write(plain))
    write(clip, 1)
    return plain, clip


def write(clip: Any, most: int = 40, **options: Any) -> list[int]:
    asked = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "seed": 3}
    prompt = {"qwen3vl_8b": [[(word, 1.0) for word in (5, 7, 9, 200, 7)]]}
    tokens: list[int] = clip.generate(prompt, max_length=most, repetition_penalty=1.0, **{**asked, **options})
    return tokens


@pytest.mark.parametrize("storage", ["fp16", "fp8_e4m3fn"])
def test_texts_are_the_same(folder: Path, storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token for token, while room for keys grows; drawn, too."""
    from fusestream.fusion.text import cache

    monkeypatch.setattr(cache, "AT_FIRST", 1)
    monkeypatch.setattr(cache, "STEP", 16)
    plain, clip = writers(folder, storage)
    graphs = clip.patcher.stream.residency.graphs
    for options in ({}, {}, {"do_sample": True, "temperature": 0.9, "seed": 11}):
        before = graphs.tokens
        assert write(clip, **options) == write(plain, **options)
        assert graphs.tokens >= before + 20, (reasons(), clip.patcher.stream.residency.ledger.summary()["notes"])
        assert graphs.nbytes == clip.patcher.stream.residency.beside == 0, "it went with the text"
    assert not reasons()


def test_an_interrupt_between_two_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And memory that is wanted there."""
    import comfy.model_management as mm

    from fusestream.fusion.text import writing

    plain, clip = writers(folder)
    stream, want, following = clip.patcher.stream, write(plain), writing.Text.next

    def interrupts(self: Any, sampler: Any) -> int:
        if self._written == 20:
            mm.interrupt_current_processing()
        return following(self, sampler)

    def gives_back(self: Any, sampler: Any) -> int:
        if self._written % 12 == 11:
            assert stream.residency.release_graphs()
        return following(self, sampler)

    assert write(clip) == want
    monkeypatch.setattr(writing.Text, "next", interrupts)
    with pytest.raises(mm.InterruptProcessingException):
        write(clip)
    assert stream.residency.beside == 0
    monkeypatch.setattr(writing.Text, "next", gives_back)
    assert write(clip) == want and stream.residency.beside == 0
    monkeypatch.undo()
    mm.interrupt_current_processing(False)
    assert write(clip) == want


def test_100_texts_leave_no_vram(folder: Path) -> None:
    plain, clip = writers(folder)
    want, before, graphs = write(plain, 12), 0.0, clip.patcher.stream.residency.graphs
    for i in range(100):
        if i == 10:
            before = used()
        captured = graphs.captured
        assert write(clip, 12) == want
        assert i < 2 or graphs.captured == captured + 1, (i, reasons())
    after = used()
    print(f"{before:.0f} MiB after 10 texts, {after:.0f} after 100")
    assert after <= before + 2 and len(graphs._calls) < 4


# --------------------------------------------------------------------------------------------------- between two steps


def test_a_lora_swapped_between_steps(folder: Path) -> None:
    """Two branches in turns, and strengths: each finds its own weights."""
    path = checkpoints.write("wan_t2v", folder)
    model, plain = warmed(path)
    for loras in ((("lora_ab", 0.8),), (("lora_ab", 0.3),), (("lora_ab", 0.3), ("lora_kohya", -0.5))):
        want = without_graphs(path, sample, *loras)
        patched = with_loras(model, folder, *loras)
        for _ in range(3):
            assert torch.equal(sample(patched), want) and torch.equal(sample(model), plain)
        for _ in range(2):
            assert torch.equal(sample(patched), want)


def test_an_interrupt_before_a_replay_and_within_a_capture(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.model_management as mm

    model, want = warmed(checkpoints.write("wan_t2v", folder))
    graphs, block = model.stream.residency.graphs, model.model.diffusion_model.blocks[1]
    settled = type(model.stream).settled

    def press(stream: Any) -> Any:
        mm.interrupt_current_processing()
        return settled(stream)

    monkeypatch.setattr(type(model.stream), "settled", press)
    with pytest.raises(mm.InterruptProcessingException):
        sample(model)
    monkeypatch.undo()
    mm.interrupt_current_processing(False)
    assert torch.equal(sample(model), want)

    graphs.release()
    forward, recording = type(block).forward, []

    def presses(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_current_stream_capturing() and not recording:
            recording.append(1)
            mm.interrupt_current_processing()
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(block), "forward", presses)
    with pytest.raises(mm.InterruptProcessingException):
        sample(model)
    monkeypatch.undo()
    mm.interrupt_current_processing(False)
    assert recording and block.ffn[0].weight.is_meta
    replayed = graphs.replayed
    for _ in range(3):
        assert torch.equal(sample(model), want)
    assert graphs.replayed > replayed, reasons()


def test_a_second_model_takes_the_memory(folder: Path) -> None:
    path = checkpoints.write("wan_t2v", folder)
    model, want = warmed(path)
    beside = model.stream.residency.beside
    assert (
        beside > 0 and model.partially_unload(torch.device("cpu"), 1) == beside and model.stream.residency.beside == 0
    )
    other, _ = warmed(checkpoints.write("wan_i2v", folder))
    for _ in range(3):
        assert torch.equal(sample(model), want)
    import comfy.model_management as mm

    mm.unload_all_models()
    assert model.stream.residency.beside == other.stream.residency.beside == 0
    assert torch.equal(sample(model), want)


def test_200_captures_and_releases_leave_no_vram(folder: Path) -> None:
    model, want = warmed(checkpoints.write("wan_t2v", folder))
    graphs = model.stream.residency.graphs
    before = 0.0
    for i in range(200):
        graphs.release()
        if i == 10:
            before = used()
        captured = graphs.captured
        assert torch.equal(sample(model), want)
        assert graphs.captured > captured, (
            i,
            reasons(),
            model.stream.residency.ledger.summary()["notes"].get("CUDA graphs"),
        )
    graphs.release()
    after = used()
    print(f"{before:.0f} MiB after 10 captures, {after:.0f} after 200")
    assert after <= before + 2


def test_what_a_graph_takes_is_what_the_card_lacks(folder: Path) -> None:
    model, _ = warmed(checkpoints.write("wan_t2v", folder))
    beside = model.stream.residency.beside / MIB
    held = used()
    freed = model.stream.residency.release_graphs() / MIB
    print(f"graphs say {beside:.1f} MiB; the card had {held - used():.1f} more free after their release")
    granule = 32 if torch.cuda.get_allocator_backend() == ASYNC else 0  # of what the driver's pool gives back
    assert freed == beside and abs(held - used() - beside) <= 8 + granule


# ------------------------------------------------------------------------------------- what a graph holds is there as long


def test_what_launches_were_prepared_with_may_go(folder: Path) -> None:
    """Plans of ops, workspaces of cuBLAS, what torch's allocator has cached: none of it is memory that a graph reads or writes."""
    model, want = warmed(checkpoints.write("wan_t2v", folder))
    for op in OPS.values():
        op.forget()
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    rubble = [
        torch.full((64 * MIB,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(min(32, free // (128 * MIB)))
    ]
    replayed = model.stream.residency.graphs.replayed
    for _ in range(3):
        assert torch.equal(sample(model), want)
    assert model.stream.residency.graphs.replayed > replayed and rubble


def test_a_lora_right_behind_a_replay(folder: Path) -> None:
    """The host does not wait: weights come anew while what was replayed with the old ones may still run."""
    path = checkpoints.write("wan_t2v", folder)
    model, want = warmed(path)
    lora = (("lora_ab", 0.8),)
    patched_want = without_graphs(path, sample, *lora)
    net, stream = model.model.diffusion_model, model.stream
    patched = with_loras(model, folder, *lora)
    for _ in range(3):
        torch.cuda._sleep(200_000_000)  # what follows is asked for long before it is done
        plain = sample(model)
        torch.cuda._sleep(200_000_000)
        changed = sample(patched)
        assert torch.equal(plain, want) and torch.equal(changed, patched_want)
    assert net is model.model.diffusion_model and stream.residency.pager is not None


# ------------------------------------------------------------------------------------------------- what cannot be recorded


def test_waits_that_python_does_not_see(folder: Path) -> None:
    """Torch brings numbers to the card within itself: the rehearsal hears of it, and nothing is recorded."""
    from fusestream.gpu.capture_check import NotRecordable, Rehearsal

    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(3, device=device)
    for work in (lambda: x + torch.tensor([1.0, 2.0, 3.0], device=device), lambda: x * float(x.sum())):
        with pytest.raises(NotRecordable), torch.inference_mode(), Rehearsal(device).watched():
            work()
    assert torch.cuda.get_sync_debug_mode() == 0
    rehearsal = Rehearsal(device)
    with torch.inference_mode(), rehearsal.watched():
        x + torch.arange(3.0).to(device)
    assert rehearsal.nbytes == 12


def test_random_numbers_and_graphs(folder: Path) -> None:
    """Captures and replays in between change nothing of what the default generator gives."""
    path = checkpoints.write("wan_t2v", folder)
    model, _ = warmed(path)

    def drawn(model: Any) -> list[torch.Tensor]:
        torch.cuda.manual_seed(5)
        found = []
        for i in range(3):
            found += [torch.randn(3, device="cuda") for _ in range(2)]
            model.stream.residency.graphs.release()
            for _ in range(i + 1):
                sample(model)  # stock sets the generators as it draws its noise
        return found

    found, plain = drawn(model), whole(path)
    plain.stream.residency.graphs._recorder = Nothing()
    assert all(torch.equal(one, other) for one, other in zip(found, drawn(plain), strict=True))


def test_kernels_that_are_being_chosen_are_not_captured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With nothing remembered: what is replayed is what is chosen, and the tuner hears of no replay."""
    from fusestream.kernels_cuda.tune import autotune
    from fusestream.kernels_cuda.tune.autotune import Tuner
    from fusestream.kernels_cuda.tune.winners import WinnersFile

    fresh = Tuner(WinnersFile(tmp_path / "winners.json"))
    monkeypatch.setattr(autotune, "_tuner", fresh)
    for op in OPS.values():
        op.forget()
    model = pays(whole(checkpoints.write("wan_t2v", folder)))
    graphs = model.stream.residency.graphs
    for _ in range(300):
        sample(model)
        if graphs.replayed > 4:
            break
    assert graphs.replayed > 4
    undecided, balance, want = fresh.undecided, fresh.purse.balance, sample(model)
    for _ in range(3):
        assert torch.equal(sample(model), want)
    assert (fresh.undecided, fresh.purse.balance) == (undecided, balance)
    monkeypatch.undo()
    for op in OPS.values():
        op.forget()


# Stays for as long as the process, as the pack's own recorder does: what a recording that was given up held cannot be freed under
# cudaMallocAsync, and torch ends the process if it is tried. Its addresses stay taken too, so nothing is captured behind this test.
KEPT: list[object] = []


def test_a_recording_that_is_given_up_leaves_torch_whole(folder: Path) -> None:
    """Memory goes back as ever, random numbers follow as ever, and graphs that were there are replayed."""
    from fusestream.gpu.graphs import CudaRecorder, NotRecorded

    model, want = warmed(checkpoints.write("wan_t2v", folder))
    device = torch.device("cuda", torch.cuda.current_device())
    recorder = CudaRecorder()
    KEPT.append(recorder)
    torch.cuda.manual_seed(3)
    numbers = [torch.randn(5, device=device) for _ in range(2)]
    torch.cuda.manual_seed(3)
    assert torch.equal(torch.randn(5, device=device), numbers[0])
    before = used()

    def waits() -> None:
        torch.empty(64 * MIB, dtype=torch.uint8, device=device).fill_(1)
        room = torch.empty(64 * MIB, dtype=torch.uint8, device=device).fill_(1)
        torch.cuda.current_stream().synchronize()
        room.fill_(2)

    with pytest.raises(NotRecorded):
        recorder.record(device, waits)
    assert recorder.obstacle(device) is not None
    assert torch.equal(torch.randn(5, device=device), numbers[1]), "the generator is in no recording"
    torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    assert used() <= before + 8, "it is given back"
    replayed = model.stream.residency.graphs.replayed
    assert torch.equal(sample(model), want) and model.stream.residency.graphs.replayed > replayed
    model.stream.residency.graphs.release()
    for _ in range(3):
        assert torch.equal(sample(model), want)
    assert torch.empty(16, pin_memory=True).is_pinned()


# ------------------------------------------------------------------------------------------------------ the allocators


def test_under_the_allocator_that_comfyui_takes() -> None:
    under_comfyuis_allocator(__file__)
