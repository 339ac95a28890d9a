"""What a step needs of VRAM: reckoned, corrected by what was measured, and made room for when it was too little."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.cli_args
import comfy.model_base
import comfy.model_management
import comfy.patcher_extension
import comfy.sample
import family_scenes
import pytest
import scenes
import torch

from fusestream import checkpoints
from fusestream.fusion.base.hooks import IN_PIECES, RUNNING, STEP
from fusestream.fusion.families.wan.need import need
from fusestream.fusion.fused import feed_forward
from fusestream.fusion.fused.feed_forward import InPieces
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.fusion.patcher import vram_estimate as reckonings
from fusestream.fusion.patcher import vram_retry
from fusestream.fusion.patcher.vram_estimate import Reckoning
from fusestream.fusion.stream import vram_pool
from fusestream.kernels_cuda.ops.matmul.mlp import CHUNK_BYTES
from fusestream.kernels_cuda.tune.autotune import tuner
from fusestream.memory.backends.managed import pages
from fusestream.memory.plan import least_budget

GIB = 2**30
LATENT = (1, 16, 21, 60, 104)  # 832x480x81: 32,760 tokens
LEFT = (reckonings.RESERVE + reckonings.TRYING) / GIB


pytestmark = pytest.mark.usefixtures("as_comfyui_runs")


WINDOWS_RESERVE = 600 / 1024  # GiB that ComfyUI leaves alone there


@pytest.fixture(autouse=True)
def reserve_that_yields(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Linux, where the driver says that VRAM is out. What Windows does is asked for by name."""
    monkeypatch.setattr(comfy.model_management, "WINDOWS", False)
    monkeypatch.setattr(comfy.model_management, "EXTRA_RESERVED_VRAM", 400 << 20)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoints.write("wan_t2v", tmp_path_factory.mktemp("wan"), "fp32"))


@pytest.fixture
def model(path: str) -> Any:
    return load_streamed_diffusion_model(path)


def sample(model: Any, steps: int = 2) -> torch.Tensor:
    source = torch.Generator().manual_seed(0)
    words = [[torch.randn(1, 20, checkpoints.T5_WIDTH, generator=source), {}]]
    latent = torch.zeros(1, 16, 2, 8, 8)
    noise = comfy.sample.prepare_noise(latent, 1)
    run = ("euler", "simple", words, words, latent)
    out: torch.Tensor = comfy.sample.sample(model, noise, steps, 3.0, *run, disable_pbar=True, seed=1)
    return out


class Net:
    """As much of a WanModel as is asked."""

    dim, patch_size = 5120, (1, 2, 2)


def test_six_tensors_of_the_size_of_x_and_a_chunk_of_the_ffn() -> None:
    x = 32760 * 5120 * 2
    assert need(Net(), LATENT, torch.float16) == pytest.approx(1.05 * (6 * x + 2**28))
    assert need(Net(), (2, *LATENT[1:]), torch.float16) == pytest.approx(1.05 * (12 * x + 2**28))
    assert need(Net(), (1, 16, 1, 7, 9), torch.float16) == pytest.approx(1.05 * (6 * 20 * 5120 * 2 + 2**28)), "padded"
    side: Any = type("Vace", (Net,), {"vace_blocks": ()})()
    assert need(side, LATENT, torch.float16) == pytest.approx(1.05 * (9 * x + 2**28))


def test_halves_that_are_made_of_a_files_weights_count() -> None:
    """Of a feed-forward both at once; those of an fp16 file lie there anyway."""
    x, weights = 32760 * 5120 * 2, 2 * 5120 * 13824

    def of(kind: torch.dtype) -> Any:
        first, second = (
            torch.nn.Linear(*sides, bias=False, device="meta", dtype=kind) for sides in ((5120, 13824), (13824, 5120))
        )
        ffn = torch.nn.Sequential(first, torch.nn.GELU(), second)
        return type("OfBlocks", (Net,), {"blocks": [SimpleNamespace(ffn=ffn, self_attn=SimpleNamespace())]})()

    assert need(of(torch.float16), LATENT, torch.float16) == pytest.approx(1.05 * (6 * x + 2**28))
    for kind in (torch.float8_e4m3fn, torch.bfloat16):
        assert need(of(kind), LATENT, torch.float16) == pytest.approx(1.05 * (6 * x + 2**28 + 2 * weights))


def test_small_pieces_save_what_the_family_says() -> None:
    """Where they are not what a step holds the most of, nothing."""
    model = SimpleNamespace(diffusion_model=None, get_dtype_inference=lambda: torch.float16)
    for at_other_times, saves in (
        (0, CHUNK_BYTES - reckonings.SMALL_PIECES),
        (CHUNK_BYTES - 5, 5),
        (2 * CHUNK_BYTES, 0),
    ):
        some = Reckoning(lambda _net, _shape, _dtype, pieces, most=at_other_times: max(pieces, most), in_pieces=True)
        assert some.own_need(model, LATENT) == max(CHUNK_BYTES, at_other_times) and some.saves == saves


def test_14b_at_720p_leaves_room_for_its_window_in_7_gib() -> None:
    window, rest = 1.31 * GIB, 0.44 * GIB  # measured of the fp16 file
    assert need(Net(), (1, 16, 21, 90, 160), torch.float16) + window + rest < 7 * GIB


def test_a_model_that_does_not_compute_in_fp16_is_reckoned_with_as_stock_does(model: Any) -> None:
    stock = comfy.model_base.WAN21.memory_required(model.model, list(LATENT))
    assert model.model.memory_required(list(LATENT)) == stock
    assert model.model.fusestream_reckoning.asked[-1] == int(stock)


def test_what_is_joined_to_the_latent_counts(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.model, "get_dtype_inference", lambda: torch.float16)
    model.model.memory_usage_factor_conds = ("reference_latent",)
    alone = model.model.memory_required(list(LATENT))
    assert alone == need(model.model.diffusion_model, LATENT, torch.float16)
    joined = model.model.memory_required(list(LATENT), cond_shapes={"reference_latent": [list(LATENT)]})
    assert joined == pytest.approx(2 * alone)


def test_the_reckoning_learns_from_what_was_measured(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.model, "get_dtype_inference", lambda: torch.float16)
    first = model.model.memory_required(list(LATENT))
    reckoning: Reckoning = model.model.fusestream_reckoning
    reckoning.measured(int(1.5 * first), first)
    assert model.model.memory_required(list(LATENT)) == pytest.approx(1.5 * first, rel=1e-6)
    reckoning.measured(int(1.2 * first), first)
    assert reckoning.ratio == pytest.approx(1.5, rel=1e-6), "it only grows"
    assert model.clone().model.fusestream_reckoning is reckoning


# ------------------------------------------------------------------------------------------ room for both prompts at once


@pytest.mark.parametrize(
    ("room", "one", "batch", "free", "wanted"),
    [
        (4.0, 0.6, 1.2, 8.0, 4.0),  # stock leaves more than the step and the reserve take
        (6.0, 0.9, 1.2, 8.0, 8.0 - 1.4 - LEFT),  # with both prompts in a batch, stock's own least would eat the reserve
        (5.0, 2.0, 4.0, 8.0, 8.0 - 4.0 * 1.51),  # stock batches where 1.5 times the need is free
        (5.0, 4.5, 9.0, 8.0, 8.0 - 5.25 - LEFT),  # both never fit: what one leaves is for residents
        (30.0, 1.5, 3.0, 30.0, 30.0 - 3.5 - LEFT),  # the whole model would fit, but not with its step
        (30.0, 1.5, 3.0, 48.0, 30.0),  # the whole model fits
    ],
)
def test_the_weights_leave_room_for_the_step_and_the_reserve(
    model: Any, monkeypatch: pytest.MonkeyPatch, room: float, one: float, batch: float, free: float, wanted: float
) -> None:
    stream = model.stream
    stream.residency.narrow, stream.residency.whole, stream.residency.most = GIB, GIB, 28 * GIB
    model.model.fusestream_reckoning.asked.extend((int(batch * GIB), int(one * GIB)))
    monkeypatch.setattr(model, "_free", lambda _: free * GIB)
    monkeypatch.setattr(model, "loaded_size", lambda: 0)
    monkeypatch.setattr(model, "_rest_size", lambda: 0)
    monkeypatch.setattr(comfy.model_management, "minimum_inference_memory", lambda: 1.2 * GIB)
    assert model._room(room * GIB) == pytest.approx(wanted * GIB, rel=1e-6)


def test_nothing_is_left_for_a_batch_where_there_is_one_prompt(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reckoning: Reckoning = model.model.fusestream_reckoning
    reckoning.asked.extend((int(1.2 * GIB), int(0.6 * GIB)))
    monkeypatch.setattr(reckoning, "is_alone", True)
    monkeypatch.setattr(comfy.model_management, "minimum_inference_memory", lambda: 1.2 * GIB)
    assert reckoning.room(7 * GIB, 8 * GIB, GIB, GIB, 28 * GIB) == pytest.approx((8 - 0.7 - LEFT) * GIB, rel=1e-6)


def test_what_was_asked_for_the_last_video_is_forgotten(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.model, "get_dtype_inference", lambda: torch.float16)
    reckoning: Reckoning = model.model.fusestream_reckoning
    for frames in (21, 21, 5, 5):
        model.model.memory_required([2, 16, frames, 60, 104])
    assert max(reckoning.asked) == int(need(model.model.diffusion_model, (2, 16, 5, 60, 104), torch.float16))


# --------------------------------------------------------------------------------------------------- what yields, in order


class Real:
    """A published Wan in fp16, in bytes: its blocks, the parts of one, and what does not stream."""

    patch_size = (1, 2, 2)

    def __init__(self, dim: int, hidden: int, count: int, rest: float) -> None:
        attention, feed_forward = 2 * (4 * (dim * dim + dim) + 2 * dim), 2 * (2 * dim * hidden + hidden + dim)
        parts = [attention, attention + 4 * dim, feed_forward]
        self.dim, self.rest = dim, rest * GIB
        self.whole = least_budget([pages(sum(parts))] * count)
        self.narrow = least_budget([pages(part) for part in parts] * count)
        self.most = count * pages(sum(parts))


WAN_14B, WAN_1_3B = Real(5120, 13824, 40, 0.44), Real(1536, 8960, 30, 0.05)
SHORT, LONG = (1, 16, 5, 60, 60), LATENT  # 480x480x17, 480x832x81
OTHERS = 0.06 * GIB  # what a card has less when a step begins than before: code, workspaces, the prompts


class Divided:
    """What becomes of so many GiB that are free before the model is loaded. others: what the card has less when a step begins.
    settled: whether the step before tried no kernels."""

    def __init__(
        self,
        net: Real,
        shape: tuple[int, ...],
        free: float,
        *,
        alone: bool = False,
        others: float = OTHERS,
        settled: bool = False,
    ) -> None:
        some = Reckoning(need, in_pieces=True)
        some.is_alone, some.is_choosing = alone, not settled
        both, one = (need(net, (prompts, *shape[1:]), torch.float16) or 0.0 for prompts in (2, 1))
        for nbytes in (both, one):
            some.told(nbytes, 0, is_ours=True)
        least = comfy.model_management.minimum_inference_memory()
        stocks = free * GIB - max(least, one + comfy.model_management.extra_reserved_memory()) - net.rest
        beside = free * GIB - net.rest
        room = some.room(stocks, beside, net.narrow, net.whole, net.most)
        self.weights = max(min(room, net.most), net.narrow)
        self.beside = beside - self.weights - others
        yielding = self.weights - net.narrow if self.weights < net.most else 0.0
        with some.batching():
            self.is_batch = not alone and 1.5 * some.told(both, 1, is_ours=True) < self.beside + yielding
        self.need = both if self.is_batch else one
        self.in_small_pieces = some.is_short(self.need, self.beside)
        self.need -= some.saves if self.in_small_pieces else 0
        self.left = some.left_alone(self.need, self.beside)

    @property
    def fits(self) -> bool:
        """Whether a step leaves alone what it shall."""
        return self.need + reckonings.TRYING + self.left <= self.beside


def test_the_window_of_parts_is_less_than_half() -> None:
    for net, whole, narrow in ((WAN_14B, 1.31, 0.53), (WAN_1_3B, 0.176, 0.105)):
        assert net.whole == pytest.approx(whole * GIB, rel=0.02) and net.narrow == pytest.approx(narrow * GIB, rel=0.02)


def test_the_reserve_yields_before_the_batch() -> None:
    """14B 480x480x17 with 3.0 GiB free. The rest takes 0.44, the window 1.31, both prompts 0.80, and kernels that are tried 0.17:
    of 1.19 GiB that a step would leave to others there are 0.2. By stock's margin both would need 1.2, and each prompt would bring
    all weights over the bus."""
    found = Divided(WAN_14B, SHORT, 3.0)
    assert found.weights == WAN_14B.whole
    assert 1.5 * need(WAN_14B, (2, *SHORT[1:]), torch.float16) > found.beside, "stock's margin"  # type: ignore[operator]
    assert found.is_batch and found.fits and not found.in_small_pieces
    assert 0.1 * GIB < found.left < 0.3 * GIB


def test_a_step_that_needs_some_of_the_reserve_takes_it_at_once() -> None:
    """1.3B 480x832x81 with 3.0 GiB free: both prompts take 1.44 GiB. With residents and the whole reserve they would have 1.1, run
    out of it, and be computed again."""
    found = Divided(WAN_1_3B, LONG, 3.0)
    assert found.is_batch and found.fits and not found.in_small_pieces
    assert found.weights == WAN_1_3B.whole, "residents yield first"
    assert 1.0 * GIB < found.left < reckonings.RESERVE


def test_two_gib_are_enough_for_14b() -> None:
    """Blocks in parts, small pieces, and both prompts in one batch."""
    found = Divided(WAN_14B, SHORT, 2.0)
    assert WAN_14B.narrow <= found.weights < WAN_14B.whole
    assert found.is_batch and found.in_small_pieces and found.fits


@pytest.mark.parametrize("free", [2.0, 2.5, 3.0, 4.0, 6.0, 8.0])
@pytest.mark.parametrize(("net", "shape"), [(WAN_14B, SHORT), (WAN_1_3B, LONG), (WAN_1_3B, SHORT)])
@pytest.mark.parametrize("alone", [False, True])
def test_whatever_is_free_a_step_fits_as_one_batch(net: Real, shape: tuple[int, ...], free: float, alone: bool) -> None:
    found = Divided(net, shape, free, alone=alone)
    assert found.fits and found.is_batch is not alone
    if found.weights > net.whole:
        assert found.left >= reckonings.RESERVE - OTHERS, "residents yield before the reserve"


@pytest.mark.parametrize(("free", "others", "settled"), [(3.0, 0.4, False), (2.0, 0.25, True)])
def test_what_libraries_have_loaded_meanwhile_parts_no_prompts(free: float, others: float, settled: bool) -> None:
    """A machine that chooses loads the code of all it tries: after its first step 3.0 GiB did not hold both prompts of 14B beside
    whole blocks any more, and each of them brought the weights. Blocks in parts yield 0.8 GiB; what kernels take that are tried
    is needed no more once none are."""
    assert Divided(WAN_14B, SHORT, free, others=others * GIB, settled=settled).is_batch


def test_windows_needs_what_comfyui_reserves_there_in_addition(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never yields, because the driver would take RAM for VRAM: 14B takes 2.6 GiB instead of 2.0."""
    monkeypatch.setattr(comfy.model_management, "WINDOWS", True)
    monkeypatch.setattr(comfy.model_management, "EXTRA_RESERVED_VRAM", WINDOWS_RESERVE * GIB)
    assert not Divided(WAN_14B, SHORT, 2.0).fits
    found = Divided(WAN_14B, SHORT, 2.0 + WINDOWS_RESERVE)
    assert found.is_batch and found.fits and found.left >= WINDOWS_RESERVE * GIB


def test_what_was_asked_to_be_reserved_never_yields(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--reserve-vram 0.9` the batch of 14B finds its room in the window."""
    monkeypatch.setattr(comfy.cli_args.args, "reserve_vram", 0.9)
    monkeypatch.setattr(comfy.model_management, "EXTRA_RESERVED_VRAM", 0.9 * GIB)
    found = Divided(WAN_14B, SHORT, 3.0)
    assert found.is_batch and found.fits and found.weights < WAN_14B.whole
    assert found.left >= 0.9 * GIB - 1


# ------------------------------------------------------------------------------------------------------- too little VRAM


def failing(model: Any, monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """The head runs out of memory so many times. Returns the calls that failed."""
    head = model.model.diffusion_model.head
    forward, failed = head.forward, []

    def fails(*args: Any, **kwargs: Any) -> Any:
        if len(failed) < times:
            failed.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.16 GiB.\nSee the manual.")
        return forward(*args, **kwargs)

    monkeypatch.setattr(head, "forward", fails)
    return failed


def test_a_step_runs_again_with_what_was_left_to_others(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    want = sample(model)
    held = model.stream.residency.held
    failed = failing(model, monkeypatch, 1)
    assert torch.equal(sample(model), want)
    assert len(failed) == 1 and model.stream.residency.held == held > model.stream.residency.least


def test_a_step_runs_a_last_time_with_the_window_alone(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    want = sample(model)
    assert model.stream.residency.held > model.stream.residency.least
    failed = failing(model, monkeypatch, 2)
    assert torch.equal(sample(model), want)
    assert len(failed) == 2 and model.stream.residency.held == model.stream.residency.least


def test_a_step_runs_once_more_with_blocks_in_parts(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    want, stream = sample(model), model.stream
    failed = failing(model, monkeypatch, 3)
    assert torch.equal(sample(model), want)
    assert len(failed) == 3 and stream.residency.held == stream.residency.narrow < stream.residency.whole


def test_prompts_that_never_fit_together_are_computed_apart(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this sampling. The next one, of whatever size, is asked about anew."""
    want, counts = sample(model), []
    failed = failing(model, monkeypatch, 4)
    executed = model.model._apply_model
    monkeypatch.setattr(model.model, "_apply_model", lambda x, *a, **k: counts.append(len(x)) or executed(x, *a, **k))
    torch.testing.assert_close(sample(model), want, rtol=1e-3, atol=1e-4)
    assert len(failed) == 4 and counts == [2] * 4 + [1] * 4
    counts.clear()
    torch.testing.assert_close(sample(model), want, rtol=1e-3, atol=1e-4)
    assert counts == [2, 2]


@pytest.mark.parametrize("times", [1, 3])
def test_prompts_that_did_not_fit_while_kernels_were_chosen_try_again(
    model: Any, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """The next step computes them together; unless that has come to nothing too often. What the weights have given back once they
    do not have any more: it fails sooner then."""
    want, counts = sample(model, steps=4), list[int]()
    fails = 4 + 2 * (times - 1)
    executed = model.model._apply_model

    def apply(x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        counts.append(len(x))
        monkeypatch.setattr(tuner(), "trials", tuner().trials + 1)
        if len(x) == 2 and counts.count(2) <= fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.16 GiB.")
        out: torch.Tensor = executed(x, *args, **named)
        return out

    monkeypatch.setattr(model.model, "_apply_model", apply)
    torch.testing.assert_close(sample(model, steps=4), want, rtol=1e-3, atol=1e-4)
    assert counts == [2] * 4 + [1, 1] + ([2, 2, 2] if times == 1 else [2, 2, 1, 1] * 2 + [1, 1])


@pytest.mark.parametrize("kernels_are_tried", [False, True])
def test_a_video_that_needs_the_reserve_is_not_computed_twice_at_every_step(
    model: Any, monkeypatch: pytest.MonkeyPatch, kernels_are_tried: bool
) -> None:
    """Out of memory wherever the reserve is kept: once, and then it is not kept any more; unless kernels were tried that may have
    taken the memory, which the next step does not."""
    left: list[int] = []

    @contextlib.contextmanager
    def leaving(nbytes: int, _: torch.device) -> Iterator[None]:
        if nbytes:
            left.append(nbytes)
            monkeypatch.setattr(tuner(), "trials", tuner().trials + kernels_are_tried)
            raise torch.OutOfMemoryError("no")
        yield

    monkeypatch.setattr(vram_retry, "_leaving", leaving)
    sample(model)
    assert left == [reckonings.RESERVE] * (2 if kernels_are_tried else 1), "of two steps"


# --------------------------------------------------------------------------------------- small pieces without an estimate


@pytest.fixture
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of no family: how much a step of it needs only stock estimates."""
    path = checkpoints.write("sd3", tmp_path_factory.mktemp("sd3"), "fp32")
    with checkpoints.narrow.opened(comfy):
        return load_streamed_diffusion_model(str(path))


def running_out(model: Any, monkeypatch: pytest.MonkeyPatch, fits: int | None) -> list[int]:
    """The first feed-forward runs out of memory if hidden values may take more than `fits` bytes; None: whatever they take.
    Returns the bytes that they may take in each call."""
    asked: list[int] = []
    forward, running = InPieces.forward, model.model.diffusion_model.__dict__[RUNNING]
    first = next(one for one in model.model.diffusion_model.modules() if IN_PIECES in one.__dict__)

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is first:
            asked.append(running.pieces)
            if fits is None or running.pieces > fits:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.16 GiB.")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(InPieces, "forward", fails)
    return asked


def sampled(model: Any) -> torch.Tensor:
    found: torch.Tensor = scenes.sample(model, family_scenes.inputs("sd3"))
    return found


def test_a_model_without_an_estimate_takes_small_pieces_before_weights_give_way(
    stranger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first step that runs out of memory on, which alone is computed twice."""
    want, residency = sampled(stranger), stranger.stream.residency
    assert stranger.model.fusestream_reckoning.need is None and residency.held > residency.least
    held = residency.held
    asked = running_out(stranger, monkeypatch, reckonings.SMALL_PIECES)
    torch.testing.assert_close(sampled(stranger), want, rtol=1e-3, atol=1e-4)
    assert asked == [CHUNK_BYTES] + [reckonings.SMALL_PIECES] * 2, "of two steps"
    assert residency.held == held


def test_small_pieces_stay_while_weights_give_way(stranger: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled(stranger)
    asked = running_out(stranger, monkeypatch, None)
    with pytest.raises(vram_pool.OutOfVram, match="too little"):
        sampled(stranger)
    assert len(asked) > 2 and asked[0] == CHUNK_BYTES and set(asked[1:3]) == {reckonings.SMALL_PIECES}
    assert stranger.stream.residency.held == stranger.stream.residency.least


def test_where_no_feed_forward_was_found_there_are_no_small_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_forward, "fuse", lambda net: 0)
    with checkpoints.narrow.opened(comfy):
        model: Any = load_streamed_diffusion_model(str(checkpoints.write("sd3", tmp_path, "fp32")))
    assert model.model.fusestream_reckoning.saves == 0


# --------------------------------------------------------------------------------------------------- too little for good


def test_too_little_for_good_says_what_would_help_and_leaves_a_model_that_works(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = sample(model)
    failing(model, monkeypatch, 99)
    with pytest.raises(
        vram_pool.OutOfVram, match=r"too little.*Tried to allocate 2\.16 GiB\. Make the video smaller"
    ) as error:
        sample(model)
    assert isinstance(error.value, torch.OutOfMemoryError), "ComfyUI unloads everything for this kind"
    assert "manual" not in str(error.value)
    monkeypatch.undo()
    assert torch.equal(sample(model), want)


def test_clones_are_watched_too(model: Any) -> None:
    wrappers = model.clone().wrappers[comfy.patcher_extension.WrappersMP.APPLY_MODEL]
    assert wrappers[STEP] == [vram_retry.step]


def test_another_gpus_model_is_watched_once(model: Any) -> None:
    factory, arguments = model.cached_patcher_init
    again = factory(*arguments, disable_dynamic=True)
    assert again.model.fusestream_reckoning is not model.model.fusestream_reckoning
    assert len(again.wrappers[comfy.patcher_extension.WrappersMP.APPLY_MODEL][STEP]) == 1


# ------------------------------------------------------------------------------------ what is asked of torch, without a GPU


class Card:
    """Torch's account of a card, of which a step takes so many bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int = 600, total: int = 1000) -> None:
        self.free, self.total, self.reserved, self.allocated, self.peak = free, total, 100, 50, 900
        self.fractions: list[float] = []
        self.emptied = 0
        self.device: Any = torch.device("cuda:0")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (self.free, self.total))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=self.total))
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: self.stats())
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.9, raising=False)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, _: self.fractions.append(part))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: setattr(self, "peak", self.allocated))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(self, "emptied", self.emptied + 1))

    def stats(self) -> dict[str, Any]:
        return {
            "reserved_bytes": {"all": {"current": self.reserved, "peak": 10**6}},
            "active_bytes": {"all": {"current": 60, "peak": 10**6}},
            "allocated_bytes": {"all": {"current": self.allocated, "peak": self.peak}},
        }

    def takes(self, nbytes: int) -> str:
        self.peak = max(self.peak, self.allocated + nbytes)
        return "out"


@pytest.mark.parametrize(
    ("leave", "part"),
    [
        (200, 0.5),
        (600, 0.1),
        (900, 0.1),
        (0, 0.7),
        (-5000, 0.9),
    ],  # of 1000: what torch has, 100, and what is free less this
)
def test_a_step_may_take_what_leaves_the_reserve_and_what_torch_has(
    monkeypatch: pytest.MonkeyPatch, leave: int, part: float
) -> None:
    """And no more than was allowed before; afterwards as much as before, whatever happened."""
    card = Card(monkeypatch)
    with pytest.raises(KeyError), vram_retry._leaving(leave, card.device):
        assert card.fractions == [pytest.approx(part)]
        raise KeyError
    assert card.fractions[1:] == [0.9]
    # What cudaMallocAsync says before it is told: it must not be told so itself.
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _device: 1.2e8)
    with vram_retry._leaving(leave, card.device):
        assert card.fractions[-1] <= 1
    assert card.fractions[-1] == 1.0
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")  # before torch 2.8
    with vram_retry._leaving(leave, card.device):
        pass
    assert card.fractions[-1] == 1.0


def test_what_is_free_for_a_step_is_the_cards_and_what_torch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert vram_retry._free(Card(monkeypatch).device) == 600 + (100 - 60)


def test_on_the_cpu_nothing_is_left_to_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    with vram_retry._leaving(200, torch.device("cpu")):
        pass
    assert not card.fractions


def call_of(card: Card, nbytes: int, *, tries: bool = False, captures: bool = False) -> Any:
    """A call on the card that takes so much."""
    graphs = SimpleNamespace(attempts=0)

    def run() -> str:
        tuner().trials += tries
        graphs.attempts += captures
        return card.takes(nbytes)

    model = SimpleNamespace(fusestream_reckoning=Reckoning())
    x = SimpleNamespace(is_cuda=True, device=card.device, shape=LATENT)
    return SimpleNamespace(x=x, model=model, run=run, stream=SimpleNamespace(residency=SimpleNamespace(graphs=graphs)))


def test_what_a_step_took_is_what_came_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what was there before, and not what an earlier step took."""
    card = Card(monkeypatch)
    call = call_of(card, 150)
    assert vram_retry._measured(call, 100.0) == "out" and call.model.fusestream_reckoning.ratio == pytest.approx(1.5)
    assert card.emptied == 0
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: {})
    assert vram_retry._counted("allocated_bytes", "peak", card.device) == 0, (
        "torch counts nothing before its first tensor"
    )


@pytest.mark.parametrize("what", ["tries", "captures"])
def test_a_step_in_which_kernels_were_tried_or_captured_says_nothing(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """What is left of those that took more than the step needs is given back; to give back anything else would only cost."""
    card = Card(monkeypatch)
    call = call_of(card, 150, **{what: True})
    assert vram_retry._measured(call, 100.0) == "out" and call.model.fusestream_reckoning.ratio == 1.0
    assert card.emptied == 1, "the alternatives left pieces in between"
    call = call_of(card, 90, **{what: True})
    assert vram_retry._measured(call, 100.0) == "out" and card.emptied == 1


def test_the_last_word_is_the_last_error_or_the_first() -> None:
    stream: Any = SimpleNamespace(residency=SimpleNamespace(least=GIB))
    assert "held 3.00 GiB, down to the 1.00 they need: no room Make" in str(
        vram_retry._too_little(stream, 3 * GIB, "no room\nat all")
    )
    assert "they need: out of memory Make" in str(vram_retry._too_little(stream, 0, ""))


def test_a_step_takes_note_of_more_than_was_reckoned_and_never_of_less() -> None:
    some = Reckoning()
    for nbytes, reckoned, ratio in (
        (100, 200.0, 1.0),
        (100, 0.0, 1.0),
        (300, 200.0, 1.5),
        (250, 200.0, 1.5),
        (400, 200.0, 2.0),
    ):
        some.measured(nbytes, reckoned)
        assert some.ratio == ratio
