"""Small cards: blocks that are paged in parts, small pieces between two products, and what ComfyUI was started with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import comfy.cli_args
import comfy.model_management as mm
import comfy.sd
import comfy.utils
import pytest
import torch
from in_halves import load
from scenes import Scene, Studio, sample
from wan_in_halves import handed_back

from fusestream import checkpoints
from fusestream.fusion import KernelPolicy, report
from fusestream.fusion.base.hooks import PIECES
from fusestream.fusion.families.wan import block as wan
from fusestream.fusion.patcher import vram_estimate, vram_retry
from fusestream.fusion.stream import vram_pool
from fusestream.fusion.weights import products
from fusestream.kernels_cuda import LEDGER
from fusestream.kernels_cuda.ops.matmul.mlp import CHUNK_BYTES

GIB = 2**30
CPU = torch.device("cpu")
OURS, OFF = KernelPolicy(), KernelPolicy.of("off")

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")


@pytest.fixture(autouse=True)
def a_clean_ledger() -> Iterator[None]:
    LEDGER.clear()
    yield
    mm.unload_all_models()


@pytest.fixture(scope="module")
def path(studio: Studio) -> str:
    return str(checkpoints.write("wan_t2v", studio.folder, "fp16"))


@pytest.fixture
def scene(scenes: dict[str, Scene]) -> Scene:
    return scenes["wan_t2v"]


@pytest.fixture(scope="module")
def expected(path: str, scenes: dict[str, Scene]) -> torch.Tensor:
    return sample(load(path), scenes["wan_t2v"])


def in_parts(model: Any) -> Any:
    """The same model, with room for its blocks' parts alone."""
    model.stream.residency.ceiling = model.stream.residency.narrow
    return model


def allow(model: Any, ceiling: int | None) -> None:
    """Another ceiling for a model that is loaded."""
    model.stream.residency.ceiling = ceiling
    vram_pool.pool_of(CPU)._measure()


def alone(model: Any) -> Any:
    """The same model, on a device with no other: what another test's may hold, this one might too."""
    pool = vram_pool.pool_of(CPU)
    for other in [member for member in pool._members if member is not model.stream]:
        pool.leave(other)
    return model


def with_loras(model: Any, studio: Studio, *kinds: str) -> Any:
    for kind in kinds:
        file = comfy.utils.load_torch_file(str(checkpoints.write(kind, studio.folder)))
        model, _ = comfy.sd.load_lora_for_models(model, None, file, 0.8, 0.0)
    return model


# --------------------------------------------------------------------------------------------------------------- parts


@pytest.mark.every_other
@pytest.mark.parametrize("policy", [OURS, OFF])
@pytest.mark.parametrize("kind", ["wan_t2v", "wan_i2v", "wan_vace"])
def test_parts_are_the_same_to_the_bit(
    studio: Studio, scenes: dict[str, Scene], kind: str, policy: KernelPolicy
) -> None:
    """Whoever computes: our blocks say which part they are at, stock's own forward calls its doors."""
    path = str(checkpoints.write(kind, studio.folder, "fp16"))
    want = sample(load(path, policy), scenes[kind])
    model = in_parts(load(path, policy))
    stream = model.stream
    assert stream.residency.narrow < 0.5 * stream.residency.whole
    assert torch.equal(sample(model, scenes[kind]), want)
    assert handed_back() == set() and stream.residency.is_in_parts
    told = report.gather(model)
    assert "Its blocks stream in parts" in told.state and told.passes == 2 and len(told.layers) == len(stream.layers)
    assert stream.residency.ledger.peak("VRAM") <= stream.residency.narrow


@pytest.mark.every_other
@pytest.mark.parametrize("storage", ["fp16", "fp8_scaled"])
def test_so_are_parts_with_loras(studio: Studio, scene: Scene, storage: str) -> None:
    path = str(checkpoints.write("wan_t2v", studio.folder, storage))
    loras = ("lora_ab", "lora_diff", "lora_lokr")
    plain, want = sample(load(path), scene), sample(with_loras(load(path), studio, *loras), scene)
    model = in_parts(load(path))
    assert torch.equal(sample(with_loras(model, studio, *loras), scene), want) and not torch.equal(want, plain)
    assert torch.equal(sample(model, scene), plain), "and without them again"


def test_a_part_for_each_door(path: str) -> None:
    """A block and its parts have the same weights, each once, and the ones that lie together stay so."""
    model = load(path)
    stream = model.stream
    whole, parts = stream.residency.segmentations[:2]
    names = [part.name.rpartition(".")[2] for part in parts.blocks]
    assert names == ["self_attn", "cross_attn", "ffn"] * len(whole.blocks)
    assert parts.called == len(parts.blocks) == 3 * whole.called
    assert {one.key for part in parts.blocks for one in part.paged} == stream.keys
    assert [weight.name for weight in parts.layers[0].weights[:4]] == [f"self_attn.{name}.weight" for name in "qkvo"]
    assert sum(layer.stored_bytes for layer in parts.layers) == sum(layer.stored_bytes for layer in whole.layers)
    assert "norm3.weight" in {weight.name for weight in parts.layers[1].weights}


def test_it_is_the_budget_that_takes_blocks_apart(path: str, scene: Scene, expected: torch.Tensor) -> None:
    """Where a window of whole blocks does not fit, what it leaves is for residents; while it is loaded it stays so."""
    model = load(path)
    stream = model.stream
    stream.residency.ceiling = stream.residency.whole - 1
    assert torch.equal(sample(model, scene), expected)
    pager = stream.residency.pager
    assert stream.residency.is_in_parts and pager.plan.resident and stream.residency.held <= stream.residency.ceiling
    allow(model, None)
    assert torch.equal(sample(model, scene), expected)
    assert stream.residency.pager is pager and len(pager.plan.resident) == len(stream.layers), "nothing came anew"
    mm.unload_all_models()
    assert torch.equal(sample(model, scene), expected) and not stream.residency.is_in_parts


def test_patches_go_along_when_blocks_are_taken_apart(studio: Studio, path: str, scene: Scene) -> None:
    """As in a step that runs out of VRAM: nobody sets them anew."""
    want = sample(with_loras(load(path), studio, "lora_ab"), scene)
    model = with_loras(load(path), studio, "lora_ab")
    model.stream.residency.ceiling = None

    def take_apart(i: int, *_: Any) -> None:
        assert (
            bool(model.stream.residency.keep_parts()) is (i == 0)
            and model.stream.residency.held == model.stream.residency.narrow
        )

    latent = scene.latent["samples"]
    run = ("euler", "simple", scene.positive, scene.negative, latent)
    noise = comfy.sample.prepare_noise(latent, 1)
    got = comfy.sample.sample(model, noise, 2, 3.0, *run, disable_pbar=True, seed=1, callback=take_apart)
    assert torch.equal(got, want)


@pytest.mark.parametrize("after", [1, 2, 3, 8])
def test_interrupted_in_any_part_and_run_again(path: str, scene: Scene, expected: torch.Tensor, after: int) -> None:
    model = in_parts(load(path))
    stream, seen = model.stream, []

    def interrupt(layer: int) -> None:
        seen.append(layer)
        if len(seen) == after:
            raise mm.InterruptProcessingException

    stream.watcher = interrupt
    with pytest.raises(mm.InterruptProcessingException):
        sample(model, scene)
    stream.watcher = None
    assert not stream.residency.in_use and seen == list(range(after))
    assert all(tensor.is_meta for name, tensor in model.model.named_parameters() if name in stream.keys)
    assert torch.equal(sample(model, scene), expected)


def reaches_in(block: Any, calls: list[int]) -> Any:
    """A forward of another node, which looks for a weight anywhere in the block."""
    forward = type(block).forward

    def replaced(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert not block.ffn[0].weight.is_meta and not block.self_attn.q.weight.is_meta
        calls.append(1)
        out: torch.Tensor = forward(block, x, *args, **kwargs)
        return out

    return replaced


def test_a_block_that_another_node_took_over_is_whole(path: str, scene: Scene, expected: torch.Tensor) -> None:
    """From then on all are. It may have no room for that."""
    model, calls = alone(in_parts(load(path))), []
    stream, block = model.stream, model.model.diffusion_model.blocks[2]
    model.add_object_patch("diffusion_model.blocks.2.forward", reaches_in(block, calls))
    with pytest.raises(vram_pool.OutOfVram, match="raise vram_budget in the FuseStream Diffusion Model Loader"):
        sample(model, scene)
    model = in_parts(load(path))
    stream, block = model.stream, model.model.diffusion_model.blocks[2]
    mm.load_models_gpu([model])
    assert stream.residency.is_in_parts
    allow(model, None)
    model.add_object_patch("diffusion_model.blocks.2.forward", reaches_in(block, calls))
    assert torch.equal(sample(model, scene), expected)
    assert calls and len(stream.residency.segmentations) == 1 and stream.residency.narrow == stream.residency.whole


# ---------------------------------------------------------------------------------------------------------- small pieces


def test_what_lies_between_products_is_small_where_vram_is_short(
    path: str, scene: Scene, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    computed = products.mlp

    def mlp(*args: Any, chunk_bytes: int, **kwargs: Any) -> torch.Tensor:
        taken.append(chunk_bytes)
        return computed(*args, chunk_bytes=chunk_bytes, **kwargs)

    monkeypatch.setattr(products, "mlp", mlp)
    model = load(path)
    assert torch.equal(sample(model, scene), expected) and set(taken) == {CHUNK_BYTES}
    taken.clear()
    monkeypatch.setattr(vram_retry, "_free", lambda _: 0.3 * GIB)
    assert torch.equal(sample(model, scene), expected) and set(taken) == {vram_estimate.SMALL_PIECES}


@pytest.mark.usefixtures("whole_blocks")
def test_pieces_of_a_feed_forward_leave_the_result(path: str) -> None:
    """Of few rows the CPU sums in another order; so these are many."""
    model = load(path)
    block, stream = model.model.diffusion_model.blocks[0], model.stream
    mm.load_models_gpu([model])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3 * 768, block.dim, generator=generator).half()
    parts = torch.randn(3, 1, 1, block.dim, generator=generator).half()
    with stream.bound(0):
        whole, pieces = (
            wan.fed_forward(block, OURS, x.clone(), *parts, {PIECES: nbytes}) for nbytes in (CHUNK_BYTES, 1)
        )
    torch.testing.assert_close(pieces, whole, rtol=2e-3, atol=2e-3)


# --------------------------------------------------------------------------------------------- ComfyUI's command line


def test_novram_leaves_nothing_but_the_narrowest_window(
    path: str, scene: Scene, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock then gives a tenth of a byte."""
    model = load(path)
    model.stream.residency.ceiling = None
    monkeypatch.setattr(mm, "vram_state", mm.VRAMState.NO_VRAM)
    model.partially_load(CPU, 0.1)
    assert model.stream.residency.held == model.stream.residency.narrow < model.stream.residency.whole
    assert mm.text_encoder_device() == CPU
    monkeypatch.undo()
    assert torch.equal(sample(model, scene), expected)


def test_lowvram_changes_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As stock's dynamic VRAM: weights stream anyway."""
    rooms = []
    for state in (mm.VRAMState.NORMAL_VRAM, mm.VRAMState.LOW_VRAM):
        monkeypatch.setattr(mm, "vram_state", state)
        some = load(path).model.fusestream_reckoning
        some.told(GIB, 1, is_ours=True)
        rooms.append(some.room(2 * GIB, 5 * GIB, GIB // 4, GIB, 9 * GIB))
    assert rooms[0] == rooms[1] > GIB


def test_what_is_reserved_is_left_even_by_a_step_that_fails(
    path: str, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    leaving = vram_retry._leaving
    monkeypatch.setattr(vram_retry, "_leaving", lambda nbytes, device: left.append(nbytes) or leaving(nbytes, device))
    monkeypatch.setattr(comfy.cli_args.args, "reserve_vram", 2.0)
    monkeypatch.setattr(mm, "EXTRA_RESERVED_VRAM", 2 * GIB)
    model = load(path)
    head, failed = model.model.diffusion_model.head, []
    forward = head.forward

    def fails(*args: Any, **kwargs: Any) -> Any:
        if len(failed) < 1:
            failed.append(1)
            raise torch.OutOfMemoryError("no")
        return forward(*args, **kwargs)

    monkeypatch.setattr(head, "forward", fails)
    sample(model, scene)
    assert left == [2 * GIB] * 3, "a step that fails, the same once more, and the next one"


@pytest.mark.parametrize(("asked", "windows", "wanted"), [(None, False, 0), (None, True, 0.6), (0.25, False, 0.25)])
def test_only_what_was_asked_for_is_a_reserve_for_good(
    monkeypatch: pytest.MonkeyPatch, asked: float | None, windows: bool, wanted: float
) -> None:
    """Stock's own 0.4 GiB are a wish, except on Windows, where beyond the card begins RAM."""
    monkeypatch.setattr(comfy.cli_args.args, "reserve_vram", asked)
    monkeypatch.setattr(mm, "WINDOWS", windows)
    monkeypatch.setattr(mm, "EXTRA_RESERVED_VRAM", wanted * GIB or 0.4 * GIB)
    assert vram_estimate.own_reserve() == int(wanted * GIB)
