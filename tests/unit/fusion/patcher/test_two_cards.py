"""Stock's *MultiGPU CFG Split* with a streamed model: each card has a stream and a thread of its own, and hears of the other's end.

Two devices that torch tells apart stand for the cards: the CPU, and the CPU with its number.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import comfy.model_management
import comfy.sd
import comfy.utils
import pytest
import torch
from comfy_extras.nodes_multigpu import MultiGPUCFGSplitNode
from scenes import Scene, Studio, sample

from fusestream import checkpoints
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.fusion.patcher.streaming_patcher import StreamingModelPatcher
from fusestream.fusion.patcher.vram_estimate import Reckoning
from fusestream.fusion.stream import progress, vram_pool
from fusestream.fusion.stream import residency as residencies
from fusestream.fusion.stream.block_stream import BlockStream

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "whole_blocks")

CARDS = torch.device("cpu"), torch.device("cpu", 0)
LONG = 60.0  # seconds that nobody has to wait
BLOCKS = checkpoints.wan.SIZES["wan_t2v"].layers


@pytest.fixture(autouse=True)
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices(exclude_current: bool = False) -> list[torch.device]:
        return list(CARDS[exclude_current:])

    monkeypatch.setattr(comfy.model_management, "get_all_torch_devices", devices)


@pytest.fixture(scope="module")
def path(studio: Studio) -> str:
    return str(checkpoints.write("wan_t2v", studio.folder, "fp32"))


def split(model: Any) -> Any:
    gc.collect()
    comfy.model_management.cleanup_models()  # as before each prompt: the node trips over models that are gone
    return MultiGPUCFGSplitNode.execute(model, 2).result[0]


def streamed(path: str) -> Any:
    """Through the smallest window that there is, on both cards."""
    model = load_streamed_diffusion_model(path)
    return split(load_streamed_diffusion_model(path, model.stream.residency.least / vram_pool.GIB))


def cards_of(model: Any) -> tuple[StreamingModelPatcher, StreamingModelPatcher]:
    (other,) = model.get_additional_models_with_key("multigpu")
    return model, other


@pytest.fixture
def scene(scenes: dict[str, Scene]) -> Scene:
    return scenes["wan_t2v"]


def test_two_cards_make_what_stocks_two_make(path: str, scene: Scene, studio: Studio) -> None:
    """A prompt each, in two threads, through two streams; with a LoRA too, which both get."""
    ours, stock = streamed(path), split(comfy.sd.load_diffusion_model(path))
    one, other = cards_of(ours)
    assert isinstance(other, StreamingModelPatcher) and other.stream is not one.stream
    ran: dict[torch.device, set[str]] = {}
    for patcher in (one, other):
        stream = patcher.stream
        stream.watcher = lambda _, s=stream: ran.setdefault(s.device, set()).add(threading.current_thread().name)
    wanted = sample(stock, scene)
    assert torch.equal(sample(ours, scene), wanted)
    assert set(ran) == set(CARDS) and not set.intersection(*ran.values())
    for patcher in (one, other):
        assert patcher.stream.residency.ledger.peak("VRAM") <= patcher.stream.residency.least
        assert len(patcher.stream.residency.pager.plan.streamed) > patcher.stream.residency.pager.plan.slots
    file = comfy.utils.load_torch_file(str(checkpoints.write("lora_ab", studio.folder)))
    got, stocks = (sample(comfy.sd.load_lora_for_models(m, None, file, 0.8, 0.0)[0], scene) for m in (ours, stock))
    assert torch.equal(got, stocks) and not torch.equal(got, wanted)
    assert torch.equal(sample(ours, scene), wanted)


def test_the_second_card_is_reckoned_with_as_the_first(
    path: str, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock asks the first card's model alone what a sampling needs. With a card for each prompt nobody has to hold a batch."""
    asked: list[tuple[Reckoning, list[int], bool, bool]] = []
    room = Reckoning.room

    def noted(self: Reckoning, *given: Any) -> float:
        asked.append((self, list(self.asked), self.is_ours, self.is_alone))
        return room(self, *given)

    monkeypatch.setattr(Reckoning, "room", noted)
    model = streamed(path)
    sample(model, scene)
    (first, needed, is_ours, alone), (second, *others) = sorted(
        asked, key=lambda one: one[0] is not model.model.fusestream_reckoning
    )
    assert first is not second and min(needed) > 0 and alone
    assert others == [needed, is_ours, alone]
    asked.clear()
    comfy.model_management.unload_all_models()
    sample(load_streamed_diffusion_model(path), scene)
    assert [alone for *_, alone in asked] == [False]
    asked.clear()
    model.remove_additional_models("multigpu")
    sample(model, scene)
    assert [alone for *_, alone in asked] == [False], "the same model without the second card"


def test_the_bar_counts_each_cards_first_pass_once(path: str, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[int] = []
    made = progress.Bar.__init__

    def noted(self: Any, total: int) -> None:
        bars.append(total)
        made(self, total)

    monkeypatch.setattr(progress.Bar, "__init__", noted)
    model = streamed(path)
    bars.clear()
    sample(model, scene)
    sample(model, scene)
    assert bars == [2 * BLOCKS] * 2, "of two steps; the other passes find the weights on their way"


@contextlib.contextmanager
def failing(model: Any, card: int, fail: Callable[[], None]) -> Iterator[list[int]]:
    """In its second block one card fails; the other one is in its first until then. Yields the blocks that the latter entered."""
    begun, failed, entered = threading.Event(), threading.Event(), list[int]()
    ones, others = (cards_of(model)[place].stream for place in (card, 1 - card))
    enter = BlockStream.enter

    def entering(self: BlockStream, i: int) -> Any:
        if self is ones and i == 1:
            assert begun.wait(LONG)
            try:
                fail()
            finally:
                failed.set()
        held = enter(self, i)
        if self is others:
            entered.append(i)
            begun.set()
            assert failed.wait(LONG)
            while self.together.error is None:  # the error is on its way out of the other card's call
                threading.Event().wait(0.001)
        return held

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockStream, "enter", entering)
        yield entered


@pytest.mark.parametrize("card", [0, 1])
def test_an_interrupt_that_one_card_hears_ends_both(path: str, scene: Scene, card: int) -> None:
    def interrupted() -> None:
        raise comfy.model_management.InterruptProcessingException

    model = streamed(path)
    wanted = sample(model, scene)
    with (
        failing(model, card, interrupted) as entered,
        pytest.raises(comfy.model_management.InterruptProcessingException),
    ):
        sample(model, scene)
    assert entered == [0], "its next block was not begun"
    for patcher in cards_of(model):
        assert not patcher.stream.residency.in_use and patcher.stream.together is None
    assert torch.equal(sample(model, scene), wanted)


@pytest.mark.parametrize("card", [0, 1])
def test_an_error_of_one_card_is_what_the_user_sees(path: str, scene: Scene, card: int) -> None:
    """And the other one does not take it for a lack of memory of its own: its weights stay."""

    def runs_out() -> None:
        raise vram_pool.OutOfVram("this card's")

    model = streamed(path)
    wanted = sample(model, scene)
    with failing(model, card, runs_out) as entered, pytest.raises(vram_pool.OutOfVram, match="VRAM is too little"):
        sample(model, scene)
    assert entered == [0]
    assert cards_of(model)[1 - card].stream.residency.held > 0
    assert torch.equal(sample(model, scene), wanted)


def test_a_sampling_is_over_when_no_card_computes_any_more(path: str, scene: Scene) -> None:
    """Stock waits for a thread for five seconds only."""
    model = streamed(path)
    _, other = cards_of(model)
    over, ended = threading.Event(), list[str]()

    def call() -> None:
        with other.stream.calling:
            over.set()
            threading.Event().wait(0.2)
            ended.append("the call")

    late = threading.Thread(target=call)
    late.start()
    assert over.wait(LONG)
    other.cleanup()
    assert ended == ["the call"]
    late.join()


def test_a_second_cards_memory_is_asked_for_with_that_card_current(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who loads it has the first one, and has it again after."""
    second, entered, seen = torch.device("cuda", 1), list[torch.device](), list[torch.device]()

    @contextlib.contextmanager
    def current(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.pop()

    class NoPager:
        held_bytes = 0

        def close(self) -> None:
            seen.append(entered[-1])

    def opened(*_: Any, **__: Any) -> Any:
        seen.append(entered[-1])
        return NoPager()

    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(residencies, "open_pager", opened)
    monkeypatch.setattr(residencies, "open_parcels", lambda *_: None)
    model = load_streamed_diffusion_model(path, 1.0)
    model.stream.residency.load(second, 2**30)
    model.stream.residency.unload()
    assert seen == [second, second] and not entered
