"""Models whose calls are taped and replayed make what they make without, bit for bit, whatever happens between two steps."""

from __future__ import annotations

import gc
import threading
import unittest.mock
import uuid
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import comfy.hooks
import comfy.model_management
import comfy.patcher_extension
import comfy.sd
import comfy.utils
import family_scenes
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfy_api.torch_helpers import torch_compile
from family_scenes import inputs, parts
from gpu.models import sample as sample_wan
from gpu.models import with_loras
from scenes import sample
from taped import TapingRecorder

from bed.depth import is_thorough
from fusestream import checkpoints
from fusestream.fusion import sparse
from fusestream.fusion.graphs import calls, diffusion
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.fusion.load.text import load_streamed_text_encoder
from fusestream.fusion.report.gathering import gather
from fusestream.fusion.stream.residency import GRAPHS
from fusestream.fusion.stream.stability import Objects
from fusestream.fusion.text import stack
from fusestream.gpu.replay import NO_ROOM
from fusestream.kernels_cuda import LEDGER, KernelPolicy
from fusestream.memory import Pager

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread", "small_ones_too")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> TapingRecorder:
    found = TapingRecorder()
    monkeypatch.setattr(diffusion, "Graphs", partial(calls.Graphs, recorder=found))
    LEDGER.clear()
    return found


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(checkpoints.write("wan_t2v", tmp_path_factory.mktemp("wan"), "fp16"))


def load(path: Path | str, **options: Any) -> Any:
    return load_streamed_diffusion_model(str(path), **options)


def reasons() -> set[str]:
    return {refusal.reason for refusal in LEDGER.refusals if refusal.op == "model call"}


def warmed(path: Path, recorder: TapingRecorder) -> tuple[Any, torch.Tensor]:
    """A model that is replayed, and what it makes."""
    recorder.nothing = "not yet"
    want = sample_wan(load(path))
    recorder.nothing = None
    model = load(path)
    for _ in range(4):
        assert torch.equal(sample_wan(model), want)
    assert model.stream.residency.graphs.replayed >= 2
    return model, want


# What stock hands to them is no value that a call could be keyed by; or the network notes something for its log.
HANDED_BACK = {
    **{kind: {"it is given a PackedLayout"} for kind in checkpoints.video.MINIMAX},
    "anima": {"it keeps something between two calls (affline_scale_log_info)"},
}


# They take the CPU seconds each.
LONG = () if is_thorough() else ("flux2", "ltx2", "ltx23", "wan_animate")


@pytest.mark.deep(
    "wan_flf2v",
    "wan_humo",
    "wan_fun_control",
    "wan22_5b",
    "wan_i2v",
    "wan22_fun_control",
    "wan_s2v",
    "sdxl",
    "sd15_wide",
    "wan_vace",
    "hunyuan_video_15",
    "wan22_i2v",
    "qwen_image",
    "chroma",
)
@pytest.mark.every_other
@pytest.mark.parametrize("kind", [kind for kind in (*checkpoints.wan.SIZES, *family_scenes.KINDS) if kind not in LONG])
def test_the_latents_are_the_same(families_folder: Path, kind: str, recorder: TapingRecorder, studio: Any) -> None:
    path = checkpoints.write(kind, families_folder, "fp16")
    scene = studio.scene(kind) if kind in checkpoints.wan.SIZES else inputs(kind)
    recorder.nothing = "not yet"
    want = parts(sample(load(path), scene))
    recorder.nothing = None
    model = load(path)
    for _ in range(4):
        for got, wanted in zip(parts(sample(model, scene)), want, strict=True):
            assert torch.equal(got, wanted)
    assert reasons() == HANDED_BACK.get(kind, set())
    assert (model.stream.residency.graphs.replayed >= 2) == (kind not in HANDED_BACK)


def test_the_report_says_so(wan: Path, recorder: TapingRecorder) -> None:
    model, _ = warmed(wan, recorder)
    stream, report = model.stream, gather(model)
    assert "Short calls run as CUDA graphs: " in report.state and stream.residency.beside > 0
    row = next(row for row in report.memories if row.name == "VRAM for graphs")
    assert row.used == stream.residency.beside == stream.residency.ledger.held(GRAPHS)
    assert dict(report.notes)["CUDA graphs"].startswith("1, ")
    assert report.passes == 3 and not report.gaps, "of the eight that ran block after block"
    assert model.loaded_size() == model._rest_size() + stream.residency.held + stream.residency.beside


# --------------------------------------------------------------------------------------------------- between two steps


def test_a_lora_and_its_strength(wan: Path, tmp_path: Path, recorder: TapingRecorder) -> None:
    """Loaded, weighed anew, and taken away: captured anew each time, and never with the weights of before."""
    model, plain = warmed(wan, recorder)
    for loras in ((("lora_ab", 0.8),), (("lora_ab", 0.3),), (("lora_ab", 0.3), ("lora_kohya", -0.5)), ()):
        recorder.nothing = "not now"
        want = sample_wan(with_loras(load(wan), tmp_path, *loras))
        recorder.nothing = None
        before, patched = model.stream.residency.graphs.replayed, with_loras(model, tmp_path, *loras)
        for _ in range(3):
            assert torch.equal(sample_wan(patched), want)
        assert model.stream.residency.graphs.replayed > before and torch.equal(want, plain) == (not loras)
    assert len(recorder.tapes) == 1


def test_a_lora_swapped_in_the_middle_of_a_run(wan: Path, tmp_path: Path, recorder: TapingRecorder) -> None:
    """Two branches of a graph, sampled in turns: each finds its own weights."""
    model, plain = warmed(wan, recorder)
    patched = with_loras(model, tmp_path, ("lora_ab", 0.8))
    recorder.nothing = "not now"
    want = sample_wan(with_loras(load(wan), tmp_path, ("lora_ab", 0.8)))
    recorder.nothing = None
    for _ in range(3):
        assert torch.equal(sample_wan(patched), want) and torch.equal(sample_wan(model), plain)


def test_hooks_between_two_steps(wan: Path, tmp_path: Path, recorder: TapingRecorder) -> None:
    """Stock changes weights for one of two prompts, those that do not stream in place."""
    import comfy.hooks

    file = comfy.utils.load_torch_file(str(checkpoints.write("lora_ab", tmp_path)))

    def hooked(model: Any) -> list[torch.Tensor]:
        found = []
        for strength in (1.0, 0.0, 1.0, 0.5):
            with_hooks, _, hooks = comfy.hooks.load_hook_lora_for_models(model, None, file, strength, 0.0)
            words = torch.randn(1, 20, checkpoints.T5_WIDTH, generator=torch.Generator().manual_seed(0))
            sides = [[words, {"hooks": hooks}]], [[words, {}]]
            latent = torch.zeros(1, 16, 2, 8, 8)
            noise = comfy.sample.prepare_noise(latent, 1)
            run = ("euler", "simple", *sides, latent)
            found.append(comfy.sample.sample(with_hooks, noise, 2, 3.0, *run, disable_pbar=True, seed=1))
        return found

    recorder.nothing = "not yet"
    want = hooked(load(wan))
    recorder.nothing = None
    model = load(wan)
    for _ in range(2):
        for got, wanted in zip(hooked(model), want, strict=True):
            assert torch.equal(got, wanted)


def test_another_model_takes_the_memory(wan: Path, recorder: TapingRecorder) -> None:
    """What was captured is the first that is given back."""
    model, want = warmed(wan, recorder)
    stream, held = model.stream, model.stream.residency.held
    beside = stream.residency.beside
    assert model.partially_unload(torch.device("cpu"), 1) == beside and not recorder.tapes
    assert stream.residency.held == held and stream.residency.beside == 0
    assert torch.equal(sample_wan(model), want) and stream.residency.beside == beside
    assert model.partially_unload(torch.device("cpu"), beside + held // 2) > beside and stream.residency.held < held
    assert torch.equal(sample_wan(model), want), "as much as is free is taken back, or it streams"
    model.detach()
    assert not recorder.tapes and stream.residency.beside == 0 == stream.residency.ledger.held(GRAPHS)
    assert torch.equal(sample_wan(model), want)


def test_a_replay_that_runs_out_of_vram_runs_as_ever(wan: Path, recorder: TapingRecorder) -> None:
    model, want = warmed(wan, recorder)
    recorder.tapes[0].fails = torch.OutOfMemoryError("none left. GPU 0")
    replayed = model.stream.residency.graphs.replayed
    assert torch.equal(sample_wan(model), want) and not recorder.tapes
    assert (
        model.stream.residency.graphs.replayed == replayed
        and reasons() == {NO_ROOM}
        and model.stream.residency.beside == 0
    )


def test_a_step_that_runs_out_of_vram_gives_graphs_back(
    wan: Path, recorder: TapingRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model's, too."""
    model, want = warmed(wan, recorder)
    other, left = load(wan), [1]
    forward = type(other.model.diffusion_model.blocks[0]).forward

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        if left:
            left.pop()
            assert recorder.tapes
            raise torch.OutOfMemoryError("none left. GPU 0")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(other.model.diffusion_model.blocks[0]), "forward", fails)
    assert torch.equal(sample_wan(other), want) and not left and not model.stream.residency.beside
    recorded = recorder.recorded
    assert torch.equal(sample_wan(model), want) and recorder.recorded == recorded + 1, "captured anew at once"


def test_weights_are_not_overwritten_before_a_replay_has_read_them(
    wan: Path, recorder: TapingRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies wait for the last use that the pager knows of, and a replay acquires nothing."""
    model, _ = warmed(wan, recorder)
    pager, copies, marks = model.stream.residency.pager, list[Any](), list[Any]()
    submit, mark = pager._backend.submit, pager._backend.mark
    monkeypatch.setattr(pager._backend, "mark", lambda: marks.append(mark()) or marks[-1])
    monkeypatch.setattr(pager._backend, "submit", lambda copy: (copies.append(copy), submit(copy)))
    replayed = model.stream.residency.graphs.replayed
    sample_wan(model)
    assert len(marks) == model.stream.residency.graphs.replayed - replayed > 0, "nothing was acquired"
    last = marks[-1]
    pager.renew(range(len(pager.layers)))
    sample_wan(model)
    weights = [copy for copy in copies if copy.layer is not None]
    assert len(weights) == len(pager.layers) and all(last in copy.after for copy in weights)


def test_nothing_moves_while_another_thread_replays(wan: Path, recorder: TapingRecorder) -> None:
    model, want = warmed(wan, recorder)
    stream, begun, go_on = model.stream, threading.Event(), threading.Event()
    held, beside, replay = stream.residency.held, stream.residency.beside, recorder.tapes[0].replay

    def slowly() -> None:
        begun.set()
        assert go_on.wait(10)
        replay()

    recorder.tapes[0].replay = slowly  # type: ignore[method-assign]
    found: list[torch.Tensor] = []

    def run() -> None:
        with torch.inference_mode():  # which is a thread's own
            found.append(sample_wan(model))

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(10)
    assert stream.residency.shrink(beside + held // 2) == 0 and (stream.residency.held, stream.residency.beside) == (
        held,
        beside,
    )
    go_on.set()
    thread.join()
    assert torch.equal(found[0], want)
    assert stream.residency.shrink(beside + held // 2) > beside


def test_an_interrupt_leaves_a_model_that_works(
    wan: Path, recorder: TapingRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a replay, and in the middle of what is recorded."""
    model, want = warmed(wan, recorder)
    interrupted = comfy.model_management.InterruptProcessingException

    def press(*_: Any) -> Any:
        comfy.model_management.interrupt_current_processing()
        return Pager.standing(model.stream.residency.pager)

    monkeypatch.setattr(model.stream.residency.pager, "standing", press, raising=False)
    with pytest.raises(interrupted):
        sample_wan(model)
    monkeypatch.undo()
    comfy.model_management.interrupt_current_processing(False)
    assert torch.equal(sample_wan(model), want)
    model.stream.residency.graphs.release()
    recorder.fails = interrupted()
    with pytest.raises(interrupted):
        sample_wan(model)
    block = model.model.diffusion_model.blocks[0]
    assert block.ffn[0].weight.is_meta, "it holds nothing between two calls"
    for _ in range(3):
        assert torch.equal(sample_wan(model), want)
    assert recorder.tapes


# ----------------------------------------------------------------------------------------------------------- handed back


def patches(model: Any) -> None:
    model.set_model_attn1_output_patch(lambda out, _: out)


def replaces(model: Any) -> None:
    model.set_model_patch_replace(lambda args, extra: extra["original_block"](args), "dit", "double_block", 0)


def wraps(model: Any) -> None:
    model.add_wrapper_with_key(
        WrappersMP.DIFFUSION_MODEL, "other", lambda executor, *args, **kwargs: executor(*args, **kwargs)
    )


def attends(model: Any) -> None:
    options = model.model_options["transformer_options"]
    options["optimized_attention_override"] = lambda stock, *args, **kwargs: stock(*args, **kwargs)


def reads(model: Any) -> None:
    model.model_options["transformer_options"]["others"] = object()


def is_off(model: Any) -> None:
    from fusestream.fusion.fused import attention

    attention.install(model, KernelPolicy.of("off"))


def compiles(model: Any) -> None:
    model.add_wrapper_with_key(
        WrappersMP.APPLY_MODEL, torch_compile.COMPILE_KEY, lambda executor, *args, **kwargs: executor(*args, **kwargs)
    )


def attends_sparsely(model: Any) -> None:
    options = model.model_options["transformer_options"]
    held = options["optimized_attention_override"]
    options["optimized_attention_override"] = sparse.attention.SparseAttention(sparse.settings.Settings(), held)


def wraps_weights(model: Any) -> None:
    model.add_weight_wrapper("diffusion_model.blocks.0.ffn.0.weight", lambda weight: weight)
    model.patches_uuid = uuid.uuid4()


def injects(model: Any) -> None:
    model.set_injections("other", [comfy.patcher_extension.PatcherInjection(lambda _: None, lambda _: None)])


@pytest.mark.every_other
@pytest.mark.parametrize(
    ("does", "reason"),
    [
        (patches, "another node patches its blocks"),
        (replaces, "another node patches its blocks"),
        (wraps, "another node stands around it"),
        (attends, "its attention is another node's"),
        (attends_sparsely, "its attention is another node's"),
        (reads, "it is given a object"),
        (is_off, "the kernels are off"),
        (compiles, "torch.compile compiles it"),
    ],
)
def test_what_other_nodes_do_at_each_call_is_done(wan: Path, recorder: TapingRecorder, does: Any, reason: str) -> None:
    model, _ = warmed(wan, recorder)
    graphs, other = model.stream.residency.graphs, model.clone()
    does(other)
    replayed = graphs.replayed
    for _ in range(3):
        sample_wan(other)
    assert graphs.replayed == replayed and any(found.startswith(reason) for found in reasons()), reasons()
    sample_wan(model)
    assert graphs.replayed > replayed, "and the clone that has none of it is replayed"


@pytest.mark.every_other
@pytest.mark.parametrize(
    ("does", "reason"),
    [(wraps_weights, "another node changes its weights"), (injects, "another node has changed the model")],
)
def test_what_other_nodes_do_to_a_loaded_model(wan: Path, recorder: TapingRecorder, does: Any, reason: str) -> None:
    """Their code runs at each call, or has changed what nobody looks at."""
    model, want = warmed(wan, recorder)
    graphs, other = model.stream.residency.graphs, model.clone()
    does(other)
    replayed = graphs.replayed
    for _ in range(3):
        assert torch.equal(sample_wan(other), want)
    assert graphs.replayed == replayed and dict(gather(other).notes)["CUDA graphs"].startswith(f"none: {reason}")
    comfy.model_management.unload_all_models()
    for _ in range(3):
        assert torch.equal(sample_wan(model), want)
    assert graphs.replayed > replayed


@pytest.mark.every_other
@pytest.mark.parametrize("place", ["unpatchify", "head.get_parameter", "blocks.1.self_attn.forward"])
def test_a_method_that_was_replaced(wan: Path, recorder: TapingRecorder, place: str) -> None:
    """As nodes do that keep a step's result for the next one: for the time of a call, and not always `forward`."""
    model, want = warmed(wan, recorder)
    graphs = model.stream.residency.graphs
    name, _, method = place.rpartition(".")
    module = model.model.diffusion_model.get_submodule(name)
    original, replayed = getattr(module, method), graphs.replayed
    with unittest.mock.patch.multiple(module, **{method: original}):
        for _ in range(3):
            assert torch.equal(sample_wan(model), want)
    assert graphs.replayed == replayed and reasons() == {f"another node has replaced {place} of the network"}
    assert torch.equal(sample_wan(model), want) and graphs.replayed > replayed


def test_a_hook_deep_within(wan: Path, recorder: TapingRecorder) -> None:
    """It has its part in the very first call, whose replay was launched already."""
    model, want = warmed(wan, recorder)
    graphs = model.stream.residency.graphs
    replayed, seen = graphs.replayed, list[int]()

    def doubles(_module: Any, _given: Any, out: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return 2 * out

    hook = model.model.diffusion_model.time_embedding[0].register_forward_hook(doubles)
    changed = sample_wan(model)
    calls = len(seen)
    assert calls and torch.equal(sample_wan(model), changed) and not torch.equal(changed, want)
    assert len(seen) == 2 * calls and graphs.replayed == replayed
    hook.remove()
    assert torch.equal(sample_wan(model), want) and graphs.replayed == replayed + calls and len(recorder.tapes) == 1


@pytest.mark.every_other
@pytest.mark.parametrize(("name", "value"), [("head.norm.eps", 1.0), ("rope_embedder.theta", 7)])
def test_an_attribute_that_was_replaced(wan: Path, recorder: TapingRecorder, name: str, value: Any) -> None:
    """By an object patch, deep within the network."""
    model, want = warmed(wan, recorder)
    recorder.nothing = "not now"
    fresh = load(wan)
    fresh.add_object_patch(f"diffusion_model.{name}", value)
    changed = sample_wan(fresh)
    recorder.nothing = None
    assert not torch.equal(changed, want)
    other = model.clone()
    other.add_object_patch(f"diffusion_model.{name}", value)
    for _ in range(3):
        assert torch.equal(sample_wan(other), changed) and torch.equal(sample_wan(model), want)


def test_the_same_object_patches_move_nothing() -> None:
    """They are applied anew at each load."""

    class Scaled:
        def scale(self) -> int:
            return 2

    objects, one, other = Objects(), Scaled(), Scaled()
    assert not objects.become({})
    assert objects.become({"a": one, "b": one.scale, "c": 3}) and not objects.become({"a": one, "b": one.scale, "c": 3})
    for changed in (
        {"a": one, "b": one.scale},
        {"a": other, "b": one.scale, "c": 3},
        {"a": one, "b": other.scale, "c": 3},
    ):
        assert objects.become(changed) and not objects.become(dict(changed))
    gone = weakref.ref(other)
    objects.become({"a": other})
    del other, changed
    assert gone() is None and objects.become({"a": Scaled()})


def test_a_part_that_was_replaced(wan: Path, recorder: TapingRecorder) -> None:
    model, want = warmed(wan, recorder)
    net = model.model.diffusion_model
    other, replayed = model.clone(), model.stream.residency.graphs.replayed
    other.add_object_patch("diffusion_model.head", Doubled(net.head))
    assert not torch.equal(sample_wan(other), want) and model.stream.residency.graphs.replayed == replayed
    assert any(found.startswith("another node has replaced head") for found in reasons())
    assert torch.equal(sample_wan(model), want) and model.stream.residency.graphs.replayed > replayed


class Doubled(torch.nn.Module):
    def __init__(self, head: Any) -> None:
        super().__init__()
        self.inner = [head]

    def forward(self, *args: Any) -> torch.Tensor:
        return 2 * self.inner[0](*args)


def test_a_model_that_streams_is_not_captured(wan: Path, recorder: TapingRecorder) -> None:
    model = load(wan)
    model.stream.residency.ceiling = model.stream.residency.least
    for _ in range(3):
        sample_wan(model)
    assert not recorder.recorded and not reasons()
    assert dict(gather(model).notes)["CUDA graphs"] == "none: part of it streams"


def test_models_that_were_replayed_go(wan: Path, recorder: TapingRecorder) -> None:
    model, _ = warmed(wan, recorder)
    net = weakref.ref(model.model.diffusion_model)
    comfy.model_management.unload_all_models()
    del model
    gc.collect()
    assert net() is None and not recorder.tapes


# ------------------------------------------------------------------------------------------------------- text encoders


def test_prompts_of_one_length_are_replayed(
    families_folder: Path, monkeypatch: pytest.MonkeyPatch, recorder: TapingRecorder
) -> None:
    from fusestream.fusion.load import text

    monkeypatch.setattr(stack, "fuse", partial(stack.fuse, on_cpu=True))
    monkeypatch.setattr(text, "Graphs", partial(calls.Graphs, recorder=recorder))
    path = checkpoints.write("qwen3", families_folder, "fp16")

    def encode(clip: Any, first: int) -> torch.Tensor:
        rows = [[(first + i, 1.0) for i in range(length)] + [(200, 1.0)] * (9 - length) for length in (7, 5)]
        out: torch.Tensor = clip.encode_from_tokens({"qwen3_4b": rows})
        return out

    def load_one() -> Any:
        return load_streamed_text_encoder(str(path), [], kind="lumina2", options=checkpoints.model_options(path))

    recorder.nothing = "not yet"
    want = [encode(load_one(), first) for first in range(3, 9)]
    recorder.nothing = None
    clip = load_one()
    for first, wanted in zip(range(3, 9), want, strict=True):
        assert torch.equal(encode(clip, first), wanted)
    assert clip.patcher.stream.residency.graphs.replayed == 3 and not reasons()
