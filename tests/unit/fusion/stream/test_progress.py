"""What takes its time moves a bar and can be interrupted; nothing is half done after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import comfy.model_management as management
import comfy.sample
import comfy.utils
import pytest
import torch
from scenes import FILLED, Scene, Studio, sample

from fusestream import checkpoints
from fusestream.fusion.load import diffusion, text, vae
from fusestream.fusion.stream import progress
from fusestream.kernels_cuda import KernelPolicy
from fusestream.memory import Checkpoint

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "whole_blocks")
STEPS = 3
INTERRUPT = management.InterruptProcessingException


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bars]:
    """What the running node's bar showed; as ComfyUI's own hook, it looks for an interrupt each time."""
    found = Bars()
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", found)
    monkeypatch.setattr(comfy.utils, "PROGRESS_THROTTLE_MIN_INTERVAL", 0.0)
    yield found
    management.interrupt_current_processing(False)


class Bars(list[tuple[int, int]]):
    """(done, of) each time it moved. The user interrupts when `stop_at` of it is reached."""

    stop_at = 2.0

    def __call__(self, value: int, total: int, *_: Any, **__: Any) -> None:
        self.append((value, total))
        if value / total >= self.stop_at:
            management.interrupt_current_processing()
        management.throw_exception_if_processing_interrupted()

    @property
    def shares(self) -> list[float]:
        return [value / total for value, total in self]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every checkpoint that was opened."""
    found: list[Any] = []
    open_ = Checkpoint.open
    monkeypatch.setattr(Checkpoint, "open", lambda path: found.append(open_(path)) or found[-1])
    return found


def is_closed(source: Any) -> bool:
    try:
        source.read_into(next(iter(source.extents.values())), torch.empty(1, dtype=torch.uint8), start=0)
    except Exception:
        return True
    return False


# -------------------------------------------------------------------------------------------------------------- loading


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["wan_t2v", "umt5"])
def test_a_loader_counts_bytes_and_stops(studio: Studio, bars: Bars, opened: list[Any], kind: str) -> None:
    path = str(checkpoints.write(kind, studio.folder))
    more: tuple[Any, ...] = ([],) if kind == "umt5" else ()
    begin = text.load_streamed_text_encoder if kind == "umt5" else diffusion.load_streamed_diffusion_model
    kept = begin(path, *more)
    assert bars.shares == sorted(bars.shares) and bars.shares[-1] == 1 and len(bars) > 3
    patcher = kept.patcher if kind == "umt5" else kept
    read = [
        one.nbytes
        for name, one in patcher.model.named_parameters()
        if not one.is_meta and not name.endswith("logit_scale")
    ]
    assert {total for _, total in bars} == {sum(read)}
    assert not is_closed(opened[0]), "or what follows says nothing"
    del kept, patcher

    bars.clear()
    bars.stop_at = 0.02
    with pytest.raises(INTERRUPT):
        begin(path, *more)
    assert is_closed(opened[-1]) and bars.shares[-1] < 1
    bars.stop_at = 2.0
    begin(path, *more)


def test_a_vae_counts_bytes_and_stops(studio: Studio, bars: Bars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PIECE", 1 << 16)
    path = checkpoints.write("wan_vae", studio.folder)
    vae.load_vae(str(path))
    assert bars.shares == sorted(bars.shares) and bars[-1] == (path.stat().st_size,) * 2 and len(bars) > 3
    bars.clear()
    bars.stop_at = 0.5
    with pytest.raises(INTERRUPT):
        vae.load_vae(str(path))
    assert 0.5 <= bars.shares[-1] < 1


def test_an_interrupt_without_a_server_stops_too(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", None)
    management.interrupt_current_processing()
    with pytest.raises(INTERRUPT):
        vae.load_vae(str(checkpoints.write("wan_vae", studio.folder)))


# ------------------------------------------------------------------------------------------------------- the first pass


def sampled(model: Any, scene: Scene, steps: int = STEPS) -> torch.Tensor:
    """With the sampler node's own bar."""
    latent = scene.latent["samples"]
    bar: Any = comfy.utils.ProgressBar
    own = bar(steps)
    return comfy.sample.sample(
        model, comfy.sample.prepare_noise(latent, 1), steps, 3.0, "euler", "simple", scene.positive, scene.negative, latent,
        callback=lambda step, x0, x, total: own.update_absolute(step + 1, total), disable_pbar=True, seed=1,
    )  # fmt: skip


def test_the_first_pass_moves_the_samplers_bar(studio: Studio, scenes: dict[str, Scene], bars: Bars) -> None:
    model = diffusion.load_streamed_diffusion_model(str(checkpoints.write("wan_t2v", studio.folder)), 0.008)
    watched: list[int] = []
    model.stream.watcher = watcher = watched.append
    blocks = len(model.stream.blocks)
    steps = [(step, STEPS) for step in range(1, STEPS + 1)]
    with_parts = [*((i, STEPS * blocks) for i in range(blocks + 1)), *steps]
    for shown in (with_parts, steps, with_parts):  # for the first time; there already; unloaded
        if shown is with_parts:
            model.detach()
        bars.clear()
        sampled(model, scenes["wan_t2v"])
        assert bars == shown and bars.shares == sorted(bars.shares), "it never goes back"
        assert model.stream.watcher is watcher
    passes = len(watched) // blocks
    assert watched == [*range(blocks)] * passes and passes >= 3 * STEPS, "the meter hears of every block"


def test_a_pass_in_the_middle_goes_on_from_there(studio: Studio, scenes: dict[str, Scene], bars: Bars) -> None:
    """Another model took the memory between two steps."""
    model = diffusion.load_streamed_diffusion_model(str(checkpoints.write("wan_t2v", studio.folder)), 0.008)
    calls: list[int] = []

    def unload_before_the_second_step(executor: Any, x: torch.Tensor, t: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(bars) and bars[-1] == (1, STEPS):
            model.stream.residency.unload()
            model.stream.residency.load(model.load_device, model.stream.residency.least)
        return executor(x, t, *args, **kwargs)

    model.wrappers["apply_model"] = {"test": [unload_before_the_second_step], **model.wrappers["apply_model"]}
    bars.clear()
    sampled(model, scenes["wan_t2v"])
    blocks = len(model.stream.blocks)
    assert bars.shares == sorted(bars.shares)
    assert {(blocks + i, STEPS * blocks) for i in range(blocks + 1)} <= set(bars)


def test_an_interrupt_in_the_first_pass_leaves_the_model_whole(
    studio: Studio, scenes: dict[str, Scene], bars: Bars
) -> None:
    path = str(checkpoints.write("wan_t2v", studio.folder))
    model = diffusion.load_streamed_diffusion_model(path, 0.008)
    bars.clear()
    bars.stop_at = 2 / (STEPS * len(model.stream.blocks))
    with pytest.raises(INTERRUPT):
        sampled(model, scenes["wan_t2v"])
    assert bars.shares[-1] < 1 / STEPS and model.stream.watcher is None
    bars.stop_at = 2.0
    assert torch.equal(
        sample(model, scenes["wan_t2v"]), sample(diffusion.load_diffusion_model(path), scenes["wan_t2v"])
    )


@pytest.mark.parametrize("options", [{}, {"sample_sigmas": torch.ones(3)}, {"sigmas": torch.ones(1)}])
def test_who_is_in_no_step_has_no_bar(options: dict[str, Any]) -> None:
    assert progress._step(options) is None


def test_the_step_is_told_by_its_sigma() -> None:
    sigmas = torch.tensor([1.0, 0.75, 0.5, 0.0])
    assert [progress._step({"sample_sigmas": sigmas, "sigmas": s.expand(2)}) for s in sigmas[:-1]] == [
        (0, 3),
        (1, 3),
        (2, 3),
    ]
    assert progress._step({"sample_sigmas": sigmas, "sigmas": torch.tensor([0.6])}) is None, "between two steps"


# ----------------------------------------------------------------------------------------------------------------- text


def test_a_streamed_encoders_blocks_are_counted_whoever_computes(studio: Studio, bars: Bars) -> None:
    clip = text.load_streamed_text_encoder(
        str(checkpoints.write("umt5", studio.folder)), [], policy=KernelPolicy.of("off")
    )
    bars.clear()
    fox, foxes = (clip.tokenize(text, tokenizer_options=FILLED) for text in ("a fox", "two foxes"))
    clip.encode_from_tokens(fox)
    blocks = len(clip.patcher.stream.blocks)
    assert bars == [(i, blocks) for i in range(1, blocks + 1)]
    bars.clear()
    bars.stop_at = 1 / blocks
    with pytest.raises(INTERRUPT):
        clip.encode_from_tokens(foxes)
    bars.stop_at = 2.0
    assert bars.shares[-1] < 1
    clip.encode_from_tokens(foxes)
