"""Text whose tokens are taped and replayed: the tokens that are written without, whatever happens between two of them, and nothing
is left of it behind the last."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.text_encoders.qwen3vl
import pytest
import torch
from comfy.weight_adapter.lora import LoRAAdapter
from packed_files import packed_file
from safetensors.torch import load_file
from taped import TapingRecorder

from fusestream import checkpoints
from fusestream.fusion.graphs import calls
from fusestream.fusion.load import text
from fusestream.fusion.load.text import load_streamed_text_encoder
from fusestream.fusion.report.gathering import state_of
from fusestream.fusion.stream.residency import GRAPHS
from fusestream.fusion.text import cache, stack, writing
from fusestream.fusion.text.vision import towers
from fusestream.gpu.replay import NO_ROOM
from fusestream.kernels_cuda import LEDGER, KernelPolicy

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")

GREEDY = {"do_sample": False, "max_length": 16}
DRAWN = {"do_sample": True, "max_length": 16, "seed": 7, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02}
# Of ops as a card has them: the reference asks the host where the last key is.
AS_ON_A_CARD = {"decode_attention": "off"}
FIRST = (
    writing.EARLY + 3
)  # tokens of a model's first text before one is replayed: run, timed and captured, behind the early ones


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(checkpoints.write("qwen3_vl", tmp_path_factory.mktemp("graphed")))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> TapingRecorder:
    found = TapingRecorder()
    monkeypatch.setattr(text, "Graphs", partial(calls.Graphs, recorder=found))
    for module in (stack, towers):
        monkeypatch.setattr(module, "fuse", partial(module.fuse, on_cpu=True))
    LEDGER.clear()
    return found


def load(path: Path | str) -> Any:
    """With what it needs for words in its place: the vision tower was not used."""
    clip = load_streamed_text_encoder(str(path), [], policy=KernelPolicy.of(**AS_ON_A_CARD))
    write(clip, max_length=1)
    return clip


def write(clip: Any, *words: Any, **options: Any) -> list[int]:
    prompt = {"qwen3vl_8b": [[(word, 1.0) for word in words or (5, 7, 9, 200, 7)]]}
    tokens: list[int] = clip.generate(prompt, **{**GREEDY, **options})
    return tokens


def wanted(path: Path | str, recorder: TapingRecorder, **options: Any) -> list[int]:
    """Without graphs."""
    recorder.nothing = "not yet"
    tokens = write(load(path), **options)
    recorder.nothing = None
    return tokens


def graphs_of(clip: Any) -> Any:
    return clip.patcher.stream.residency.graphs


def reasons() -> set[str]:
    return {refusal.reason for refusal in LEDGER.refusals if refusal.op == "model call"}


def nothing_is_left(clip: Any, recorder: TapingRecorder) -> bool:
    stream, graphs = clip.patcher.stream, graphs_of(clip)
    texts = [call for call in graphs._calls.values() if call.memory is not None]
    return (
        not recorder.tapes
        and not texts
        and stream.residency.beside == graphs.nbytes == 0 == stream.residency.ledger.held(GRAPHS)
    )


def before_each(monkeypatch: pytest.MonkeyPatch, does: Callable[[int], None]) -> None:
    """Before each token, with how many were written."""
    following = writing.Text.next

    def next_(self: writing.Text, sampler: Any) -> int:
        does(self._written)
        return following(self, sampler)

    monkeypatch.setattr(writing.Text, "next", next_)


# ---------------------------------------------------------------------------------------------------------- the tokens


@pytest.mark.every_other
@pytest.mark.parametrize("how", [GREEDY, DRAWN, {**DRAWN, "repetition_penalty": 1.3}], ids=["greedy", "drawn", "minds"])
def test_the_tokens_are_the_same(path: Path, recorder: TapingRecorder, how: dict[str, Any]) -> None:
    tokens, clip = wanted(path, recorder, **how), load(path)
    assert write(clip, **how) == tokens and len(tokens) == 16
    graphs = graphs_of(clip)
    assert (graphs.captured, graphs.replayed, graphs.tokens) == (1, 16 - FIRST, 16 - FIRST)
    assert nothing_is_left(clip, recorder) and not reasons()


@pytest.mark.deep
def test_the_next_text_knows_that_it_pays(path: Path, recorder: TapingRecorder) -> None:
    """It is captured behind the early tokens, and so is one of another length."""
    tokens, longer, clip = wanted(path, recorder), wanted(path, recorder, max_length=24), load(path)
    graphs = graphs_of(clip)
    write(clip)
    for most, found in ((16, tokens), (24, longer), (16, tokens)):
        before = graphs.replayed
        assert write(clip, max_length=most) == found
        assert graphs.replayed == before + most - writing.EARLY - 1 and nothing_is_left(clip, recorder)
    assert graphs.captured == 4 and len(graphs._calls) == 1, "of all texts"


def test_another_prompt(path: Path, recorder: TapingRecorder) -> None:
    drawn = torch.rand(1, 64, 96, 3, generator=torch.Generator().manual_seed(0))
    words = (5, {"type": "image", "data": drawn, "original_type": "image"}, 9, 11)
    recorder.nothing = "not yet"
    tokens = write(load(path), *words)
    recorder.nothing = None
    clip = load(path)
    for _ in range(2):
        write(clip)
        assert write(clip, *words) == tokens
    assert graphs_of(clip).tokens > 20 and nothing_is_left(clip, recorder)


@pytest.mark.deep
def test_while_room_for_keys_grows(path: Path, recorder: TapingRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph has addresses of the room there was."""
    for name, value in (("AT_FIRST", 1), ("STEP", 8)):
        monkeypatch.setattr(cache, name, value)
    left: list[int] = []
    grow = cache.Cache.grow
    monkeypatch.setattr(cache.Cache, "grow", lambda self: left.append(len(recorder.tapes)) or grow(self))
    tokens, clip = wanted(path, recorder, max_length=60), load(path)
    for _ in range(2):
        left.clear()
        assert write(clip, max_length=60) == tokens
        assert 2 <= len(left) < 8 and not any(left), "given back before"
    assert graphs_of(clip).captured >= 4 and graphs_of(clip).replayed > 60 and nothing_is_left(clip, recorder)


def test_short_texts_run_as_ever(path: Path, recorder: TapingRecorder) -> None:
    clip = load(path)
    write(clip)
    for _ in range(3):
        write(clip, max_length=writing.EARLY)
    assert graphs_of(clip).attempts == recorder.recorded == 1


@pytest.mark.deep
def test_texts_that_end_as_they_are_captured(path: Path, recorder: TapingRecorder) -> None:
    """Are captured less often."""
    clip = load(path)
    write(clip)
    for _ in range(20):
        write(clip, max_length=writing.EARLY + 1)
    assert recorder.recorded == 3 and nothing_is_left(clip, recorder)
    before = graphs_of(clip).replayed
    assert write(clip) == wanted(path, recorder) and graphs_of(clip).replayed > before, "in a longer one it pays again"


@pytest.mark.deep
def test_many_texts(path: Path, recorder: TapingRecorder) -> None:
    clip = load(path)
    budget = clip.patcher.stream.residency._pool.budget
    write(clip)
    left = budget.left
    for _ in range(40):
        write(clip, max_length=writing.EARLY + 3)
    assert recorder.recorded == 41 and nothing_is_left(clip, recorder) and budget.left == left
    assert len(graphs_of(clip)._calls) == 1


@pytest.mark.deep
@pytest.mark.parametrize("storage", ["Q4_K", "bf16", "fp8_e4m3fn"])
def test_other_storages(path: Path, tmp_path: Path, recorder: TapingRecorder, storage: str) -> None:
    file = (
        packed_file(tmp_path / "x.gguf", load_file(path), storage)
        if storage == "Q4_K"
        else checkpoints.write("qwen3_vl", tmp_path, storage)
    )
    tokens, clip = wanted(file, recorder), load(file)
    assert write(clip) == write(clip) == tokens and graphs_of(clip).replayed and nothing_is_left(clip, recorder)


# ------------------------------------------------------------------------------------------------- where there are none


def test_what_waits_for_the_card(path: Path, recorder: TapingRecorder) -> None:
    recorder.bound = "card"
    tokens, clip = wanted(path, recorder), load(path)
    assert write(clip) == write(clip) == tokens and not recorder.recorded and nothing_is_left(clip, recorder)


def test_a_model_that_streams(path: Path, recorder: TapingRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words come once for a token."""
    tokens, clip = wanted(path, recorder), load(path)
    stream = clip.patcher.stream
    stream.residency.ceiling = stream.residency.least
    held = [0]
    words_held = writing.words_held
    monkeypatch.setattr(writing, "words_held", lambda net: (held.append(1), words_held(net))[1])
    assert write(clip) == tokens and not recorder.recorded
    assert sum(held) == len(tokens)


@pytest.mark.parametrize("words", ["in place", "not in place"])
def test_words_are_in_the_graph_where_they_stay(
    path: Path, recorder: TapingRecorder, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    tokens, clip = wanted(path, recorder), load(path)
    if words == "not in place":
        monkeypatch.setattr(writing, "read_in_place", lambda *_: False)
    within = []
    logits = writing.Text._logits
    monkeypatch.setattr(writing.Text, "_logits", lambda self, x: within.append(1) or logits(self, x))
    assert write(clip) == tokens and graphs_of(clip).replayed == 16 - FIRST
    taped = FIRST + 1  # watched, and recorded
    assert len(within) == (taped if words == "in place" else 16)


def test_what_a_token_may_not_do(path: Path, recorder: TapingRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen as it is captured: it passes once more, to the same place."""
    attend = writing.Text._through

    def waits(self: writing.Text, x: torch.Tensor, *, with_words: bool) -> torch.Tensor:
        found = attend(self, x, with_words=with_words)
        assert found.sum().item() == found.sum().item()
        return found

    tokens, clip = wanted(path, recorder), load(path)
    monkeypatch.setattr(writing.Text, "_through", waits)
    assert write(clip) == write(clip) == tokens and not recorder.recorded and len(reasons()) == 1


# ------------------------------------------------------------------------------------------------- between two tokens


@pytest.mark.every_other
@pytest.mark.parametrize("at", [2, FIRST - 1, FIRST, 12])
def test_an_interrupt(path: Path, recorder: TapingRecorder, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    tokens, clip = wanted(path, recorder), load(path)
    with monkeypatch.context() as patch:
        before_each(
            patch, lambda written: comfy.model_management.interrupt_current_processing() if written == at else None
        )
        with pytest.raises(comfy.model_management.InterruptProcessingException):
            write(clip)
    assert nothing_is_left(clip, recorder)
    for _ in range(2):
        assert write(clip) == tokens and nothing_is_left(clip, recorder)


@pytest.mark.deep
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("none left. GPU 0"), RuntimeError("lost")])
def test_a_replay_that_fails(
    path: Path, recorder: TapingRecorder, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Without memory it runs as ever; of anything else the text ends."""
    tokens, clip = wanted(path, recorder), load(path)

    def fail(written: int) -> None:
        if written == FIRST + 2:
            recorder.tapes[0].fails = error

    with monkeypatch.context() as patch:
        before_each(patch, fail)
        if isinstance(error, torch.OutOfMemoryError):
            assert write(clip) == tokens and reasons() == {NO_ROOM}
        else:
            with pytest.raises(RuntimeError, match="lost"):
                write(clip)
    assert nothing_is_left(clip, recorder)
    before = graphs_of(clip).replayed
    assert write(clip) == tokens and graphs_of(clip).replayed > before and nothing_is_left(clip, recorder)


def test_a_capture_that_is_interrupted(path: Path, recorder: TapingRecorder) -> None:
    tokens, clip = wanted(path, recorder), load(path)
    recorder.fails = comfy.model_management.InterruptProcessingException()
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        write(clip)
    assert nothing_is_left(clip, recorder)
    assert write(clip) == tokens and graphs_of(clip).replayed and nothing_is_left(clip, recorder)


@pytest.mark.deep("weights", "graphs")
@pytest.mark.parametrize("how", ["graphs", "weights", "all"])
def test_memory_is_wanted(path: Path, recorder: TapingRecorder, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """By a step that ran out of it, by another model, by one that needs all."""
    tokens, clip = wanted(path, recorder), load(path)
    # Before a token whose pass is over already: the one that follows is begun ahead.
    stream, wanted_at = clip.patcher.stream, (FIRST - 2, FIRST - 1, FIRST + 2)

    def want(written: int) -> None:
        if written not in wanted_at:
            return
        if how == "graphs":
            assert stream.residency.release_graphs() or written == FIRST - 2
        elif how == "weights":
            stream.residency.shrink(stream.residency.beside + stream.residency.held // 2)
        else:
            stream.residency.unload()
        assert not recorder.tapes

    with monkeypatch.context() as patch:
        before_each(patch, want)
        for _ in range(2):
            assert write(clip) == tokens and nothing_is_left(clip, recorder)
    assert write(clip) == tokens


def test_a_lora_in_the_middle(path: Path, recorder: TapingRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two branches share the weights: each token is written with those of its moment."""
    generator = torch.Generator().manual_seed(3)
    keys = {key: w for key, w in load(path).patcher.model_state_dict().items() if key.endswith("mlp.down_proj.weight")}
    found = {}
    for key, value in keys.items():
        up = torch.randn(value.shape[0], 2, generator=generator) * 0.3
        down = torch.randn(2, value.shape[1], generator=generator) * value.shape[1] ** -0.5
        found[key] = LoRAAdapter(set(), (up, down, 2.0, None, None, None))

    def swapping(clip: Any) -> list[int]:
        patched = clip.clone()
        patched.add_patches(found, 0.9)
        stream = clip.patcher.stream

        def swap(written: int) -> None:
            if written in (FIRST, FIRST + 3):
                stream.set_patches(patched.patcher.patches if written == FIRST else {})

        with monkeypatch.context() as patch:
            before_each(patch, swap)
            return write(clip, max_length=24)

    recorder.nothing = "not yet"
    tokens, plain = swapping(load(path)), write(load(path), max_length=24)
    recorder.nothing = None
    clip = load(path)
    assert swapping(clip) == tokens != plain and nothing_is_left(clip, recorder)
    assert graphs_of(clip).captured >= 2 and swapping(clip) == tokens
    assert write(clip, max_length=24) == plain and nothing_is_left(clip, recorder)


# --------------------------------------------------------------------------------------------------- a token that is ahead


def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What happens from now on, and of which token: a pass through the layers, its number read."""
    found: list[tuple[str, int]] = []
    passed, read = writing.Text._pass, writing.Number.read
    monkeypatch.setattr(writing.Text, "_pass", lambda self: (found.append(("passes", self._written)), passed(self))[1])
    monkeypatch.setattr(
        writing.Number,
        "read",
        lambda self: (found.append(("read", sum(what == "read" for what, _ in found))), read(self))[1],
    )
    return found


def test_the_next_token_begins_before_the_number_of_this_one_is_read(
    path: Path, recorder: TapingRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first one behind the early ones on; behind the last none is begun, and each passes once."""
    tokens, clip = wanted(path, recorder), load(path)
    found = passes(monkeypatch)
    assert write(clip) == tokens
    place = {event: at for at, event in enumerate(found)}
    assert len(place) == len(found) == 16 + 15
    for token in range(1, 16):
        assert (place["passes", token] < place["read", token - 1]) == (token > writing.EARLY)


def test_what_follows_the_end_of_a_text_is_nobodys(path: Path, recorder: TapingRecorder) -> None:
    """A token was begun that nobody asks for, and the next text is as ever."""
    clip, wild = load(path), {**DRAWN, "temperature": 9.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    tokens = write(clip, **wild)
    config = clip.cond_stage_model.qwen3vl_8b.transformer.model.config
    stop = next(token for token in tokens[FIRST + 1 :] if token not in tokens[: FIRST + 1])
    before, config.stop_tokens = config.stop_tokens, [stop]
    passed = graphs_of(clip).replayed
    try:
        found = write(clip, **wild)
    finally:
        config.stop_tokens = before
    assert found == tokens[: tokens.index(stop) + 1] and nothing_is_left(clip, recorder)
    assert graphs_of(clip).replayed - passed == len(found) - writing.EARLY - 1 + 1
    assert write(clip, **wild) == tokens


def test_nothing_is_begun_ahead_where_its_row_or_its_room_is_not_there(
    path: Path, recorder: TapingRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, clip = wanted(path, recorder), load(path)
    found = passes(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(writing.Text, "_row", lambda *_: None)
        assert write(clip) == tokens
    events = [event for pair in ((("passes", i), ("read", i)) for i in range(16)) for event in pair][1:]
    assert found == events
    found.clear()
    for name, value in (("AT_FIRST", 1), ("STEP", 8)):
        monkeypatch.setattr(cache, name, value)
    left: list[bool] = []
    grow = cache.Cache.grow
    monkeypatch.setattr(cache.Cache, "grow", lambda self: left.append(found[-1][0] == "read") or grow(self))
    assert write(clip) == tokens and left and all(left)


# ----------------------------------------------------------------------------------------------------- what users notice


def test_the_report_says_so(path: Path, recorder: TapingRecorder) -> None:
    clip = load(path)
    write(clip)
    said = state_of(clip.patcher.stream)
    assert f"{16 - FIRST} calls were replayed ({16 - FIRST} tokens of text), 1 captured; 0 graphs in 0.00 GiB" in said
