"""The estimate: sums against what was measured, whether it fits against what the loaders do, and its words and picture."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.sample
import numpy as np
import pytest
import torch

from fusestream import checkpoints, fusion
from fusestream.bench import prediction
from fusestream.bench.end_to_end import bounds, rows
from fusestream.bench.end_to_end.row_types import Row
from fusestream.fusion.base import card_rates
from fusestream.fusion.base.card_rates import (
    Card,
    Passes,
    Rates,
    Source,
    rates_of,
)
from fusestream.fusion.base.cost import Cost
from fusestream.fusion.base.format import took
from fusestream.fusion.estimate import plan, words
from fusestream.fusion.estimate.fit import Fit, Verdict, fit_of
from fusestream.fusion.estimate.picture import draw
from fusestream.fusion.estimate.plan import Change, Estimate, Work, estimate
from fusestream.fusion.estimate.sums import Blocks, step_seconds
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.fusion.report.canvas import THEMES, WIDTH
from fusestream.fusion.sampling import measured, step_timer
from fusestream.fusion.sampling.step_timer import Reading, Sampled
from fusestream.fusion.sparse.model import sparse
from fusestream.fusion.sparse.settings import Settings as Sparse
from fusestream.fusion.step_cache.model import step_cached
from fusestream.fusion.step_cache.settings import Settings as StepCache

GIB = 2**30
TURING = Card("NVIDIA GeForce RTX 2060 SUPER", (7, 5), 34, 1.65e9, 448e9)
BLOCKS = {"wan13": 30, "wan14": 40, "klein4": 25, "z_image": 34}
# What the sums miss by more than AIM: a step of a tenth of a second, in which host and passes between the blocks weigh, and one
# of 14B, nobody knows why.
AIM = 0.15
MISSED = {"1.3B 480x480x17": -0.23, "14B 480x832x33": -0.16}


@pytest.fixture(autouse=True)
def nothing_kept() -> Any:
    before = step_timer.kept()
    step_timer._kept.clear()
    yield
    step_timer._kept.clear()
    step_timer._kept.extend(before)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoints.write("wan_t2v", tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def streamed(path: str) -> Any:
    """Two of its four blocks fit beside each other."""
    return load_streamed_diffusion_model(path, 0.008)


LATENT = (1, 16, 3, 16, 16)


def sample(model: Any, steps: int, cfg: float = 1.0) -> None:
    width = model.model.diffusion_model.text_embedding[0].in_features
    prompt = [[torch.randn(1, 8, width), {}]]
    latent = torch.zeros(LATENT)
    noise = comfy.sample.prepare_noise(latent, 1)
    comfy.sample.sample(model, noise, steps, cfg, "euler", "simple", prompt, prompt, latent, disable_pbar=True, seed=1)


# ---------------------------------------------------------------------------------------------- against what was measured


def plain(row: Row) -> bool:
    """A step as a user computes it, by us, in FP16: not held to something, nor with something switched off."""
    ours = row.ours
    return (
        row.work == "sample" and row.model in BLOCKS and row.storage == "fp16" and not row.lora and not row.cold
        and ours is not None and not (ours.ops or ours.isa or ours.attention or ours.ram_budget or ours.windows)
        and ours.backend == "auto" and ours.precision in ("auto", "precise")
    )  # fmt: skip


def errors() -> dict[str, float]:
    """Of the estimate for each row that was measured."""
    results = prediction.load()
    found = {row["name"]: row for row in results["models"]["rows"]}
    card = Card(results["models"]["rows"][0]["environment"]["card"], (9, 0))
    off = {}
    for row in filter(plain, rows.all_rows()):
        told = found.get(row.name, {}).get("ours", {})
        if "s" not in told:
            continue
        cost = bounds.cost_of(row)
        assert row.ours is not None
        known = rates_of(card, card_rates.STOCK if row.ours.kernels == "off" else "precise", cost.width)
        assert known is not None and known[2] is Source.CARD
        held = told.get("pager", {}).get("peak GiB", {}).get("VRAM", 1000)
        blocks = Blocks([int(cost.weights / BLOCKS[row.model])] * BLOCKS[row.model], 1.0, int(held * GIB))
        forwards = min(row.prompts, round(told["forwards a step"]))
        seconds = step_seconds(cost, known[0], known[1], blocks, row.prompts, forwards)
        off[row.name] = seconds / told["s"] - 1
    return off


def test_it_is_as_near_to_what_was_measured_as_is_said() -> None:
    found = errors()
    assert len(found) > 20
    assert {name for name, error in found.items() if abs(error) > AIM} == MISSED.keys(), found
    for name, error in MISSED.items():
        assert found[name] == pytest.approx(error, abs=0.01)


def test_a_run_at_one_size_tells_of_another() -> None:
    """Scaled by the sums, whose error is much the same at all sizes."""
    found = errors()
    small, large = (1 + found[f"14B {size}"] for size in ("480x832x17", "720x1280x81"))
    assert large / small == pytest.approx(1, abs=0.05)


# --------------------------------------------------------------------------------------------------------------- rates


def test_a_geforce_card_is_predicted_by_what_its_driver_tells() -> None:
    seconds = {}
    for who in (card_rates.STOCK, *plan.TIERS):
        found = rates_of(TURING, who, 5120)
        assert found is not None and found[2] is Source.PREDICTED
        seconds[who] = found[0]
    assert seconds["precise"].gemm == pytest.approx(28.6e12 * 0.9862, rel=0.01)
    assert (
        seconds["stock"].attention
        < seconds["precise"].attention
        < seconds["fast"].attention
        < seconds["turbo"].attention
    )
    assert seconds["precise"].gemm < seconds["fast"].gemm < seconds["turbo"].gemm


@pytest.mark.parametrize("capability", [(7, 5), (8, 6), (8, 9)])
def test_a_file_of_bytes_is_multiplied_as_the_quickest_tier_does_and_attended_to_as_the_exact_one(
    capability: tuple[int, int],
) -> None:
    found = {
        who: rates_of(replace(TURING, capability=capability), who, 5120)
        for who in ("precise", card_rates.STORED, "turbo")
    }
    (precise, plain, _), (stored, rounding, source), (turbo, most, _) = (known for known in found.values() if known)
    assert source is Source.PREDICTED
    assert (stored.gemm, stored.attention) == (turbo.gemm, precise.attention)
    assert plain.width < rounding.width < most.width, "what products read is rounded, heads are not"
    assert plain.hidden < rounding.hidden == most.hidden


def test_a_measured_card_is_told_as_it_was_measured_whatever_the_file() -> None:
    measured = replace(TURING, name="NVIDIA H200")
    assert rates_of(measured, card_rates.STORED, 5120) == rates_of(measured, "precise", 5120)


@pytest.mark.parametrize(
    "card",
    [
        replace(TURING, name="NVIDIA GeForce GTX 1660", has_tensor_cores=False),
        replace(TURING, name="Tesla T4"),  # whose FP32 sums run at full rate
        replace(TURING, capability=(12, 0), name="NVIDIA GeForce RTX 5090"),
        replace(TURING, clock=0.0),
        Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.4e9, 2e12),
    ],
    ids=lambda card: card.name,
)
def test_of_other_cards_nobody_knows(card: Card) -> None:
    assert rates_of(card, "precise", 5120) is None


def test_what_waits_for_the_bus_takes_as_long_as_the_bus() -> None:
    cost, passes = Cost(gemm=1e12, attention=1e9, own=1e9), Passes(0.0, 0.0)
    fast = Rates(1e18, 1e18, 1e18, bus=1e9)
    sizes = [100_000_000] * 10
    assert step_seconds(cost, fast, passes, Blocks(sizes, 1.0, 2**31), 1, 1) < 0.01, "all of it stays"
    streamed = step_seconds(cost, fast, passes, Blocks(sizes, 1.0, 300_100_000), 2, 1)
    assert streamed == pytest.approx(0.9, rel=0.01), "one stays, nine cross the bus"
    assert step_seconds(cost, fast, passes, Blocks(sizes, 1.0, 300_100_000), 2, 2) == pytest.approx(2 * streamed)
    assert step_seconds(cost, fast, passes, Blocks(sizes, 0.5, 300_100_000), 1, 1) == pytest.approx(streamed / 2)


@pytest.mark.parametrize("kind", ["wan_t2v", "flux2", "z_image"])
def test_what_streams_is_what_is_counted(kind: str, tmp_path: Path, small_ones_too: None) -> None:
    model = load_streamed_diffusion_model(str(checkpoints.write(kind, tmp_path)), None, fusion.KernelPolicy.of("off"))
    net = model.model.diffusion_model
    shape = (1, 16, 3, 16, 16) if kind == "wan_t2v" else (1, model.model.latent_format.latent_channels, 32, 32)
    counted = next(f for f in plan.FAMILIES if f.name == model.stream.arrivals.family).cost(net, shape)  # type: ignore[misc]
    assert counted is not None and counted.gemm > 0 and counted.attention >= counted.own > 0
    blocks = sum(layer.nbytes for layer in model.stream.layers)
    held = 4 if model.model.get_dtype() == torch.float32 else 2
    assert counted.weights * held / 2 == pytest.approx(blocks, rel=0.2)


# ----------------------------------------------------------------------------------------------------------------- fits


def test_what_it_says_stays_is_what_stays(streamed: Any) -> None:
    found = fit_of(streamed, LATENT, 1)
    sample(streamed, 2)
    assert found.verdict is Verdict.STREAMS and found.stays + found.passes == len(streamed.stream.layers)
    assert found.parts is streamed.stream.residency.is_in_parts is True, "more of it stays so"
    held = streamed.stream.residency.pager.plan
    assert (len(held.resident), held.footprint, held.window_bytes) == (found.stays, found.held, found.window)
    after = fit_of(streamed, LATENT, 1)
    assert (after.held, after.stays) == (found.held, found.stays), "what it holds by now is free for it"
    assert fit_of(streamed, LATENT, 1, is_automatic=True).passes == 0


def test_it_asks_and_changes_nothing(streamed: Any) -> None:
    reckoning, held = streamed.model.fusestream_reckoning, streamed.stream.residency.held
    before = reckoning.is_alone, reckoning.ratio, streamed.stream.residency.ceiling
    fit_of(streamed, LATENT, 2)
    assert (
        reckoning.is_alone,
        reckoning.ratio,
        streamed.stream.residency.ceiling,
    ) == before and streamed.stream.residency.held == held


def test_too_little_is_too_little(streamed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    free = streamed.stream.residency.narrow + 2**20
    monkeypatch.setattr(type(streamed), "get_free_memory", lambda _self, _device: free - streamed.loaded_size())
    monkeypatch.setattr("fusestream.fusion.estimate.fit._others", lambda *_: 0)
    found = fit_of(streamed, (1, 16, 21, 90, 160), 2)
    assert found.verdict is Verdict.NOT and found.lacks > 0 and found.forwards == 2
    told = estimate(streamed, (1, 16, 21, 90, 160), 20, 2)
    assert "does not fit" in words.as_text(told) and "missing" in words.as_text(told)


# ------------------------------------------------------------------------------------------------------------ one model


def test_of_a_cpu_nobody_knows_until_it_has_sampled(streamed: Any) -> None:
    found = estimate(streamed, LATENT, 20, 1)
    assert found.gaps == () and found.seconds is None and found.source is None
    assert found.pixels == (9, 128, 128) and found.work.prompts == 1
    text = words.as_text(found)
    assert "is not known" in text and "Sample two steps or more" in text
    sample(streamed, 4)
    found = estimate(streamed, LATENT, 20, 1)
    assert found.source is Source.MEASURED and found.seconds == streamed.model.fusestream_pace.last.seconds
    assert found.total == pytest.approx(20 * found.seconds)
    larger = estimate(streamed, (1, 16, 5, 32, 32), 20, 2)
    assert larger.source is Source.SCALED and larger.seconds > 8 * found.seconds
    assert "at another size (latent of 3x16x16" in words.as_text(larger)
    assert [change.what for change in larger.changes] == ["few steps", "frames"]
    fewer = next(change for change in larger.changes if change.what == "frames")
    assert fewer.seconds < 0.7 * larger.seconds and words.change_name(fewer) == "9 frames"


def test_another_policy_is_another_time(streamed: Any) -> None:
    sample(streamed, 3)
    from fusestream.fusion.load import other_policy

    under = other_policy.model_under(streamed, fusion.KernelPolicy.of("auto", precision="turbo"))
    assert estimate(under, LATENT, 20, 1).seconds is None
    assert "turbo" in estimate(under, LATENT, 20, 1).kernels


def test_on_a_card_that_is_predicted(streamed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bus is a card's, however fast other tests saw this machine copy."""
    monkeypatch.setattr(plan, "card_of", lambda _device: TURING)
    monkeypatch.setattr(type(streamed.stream.residency.ledger), "rate", lambda _self: 12e9)
    found = estimate(streamed, (1, 16, 21, 60, 104), 20, 2)
    assert found.source is Source.PREDICTED and found.by is None and found.seconds is not None
    assert "predicted" in words.time(found) and "not measured" in words.time(found)
    by_what = {(change.what, change.values): change for change in found.changes}
    assert by_what["quality", ("turbo",)].seconds < found.seconds
    few = by_what["few steps", (4,)]
    assert few.work.prompts == 1 and few.total < found.total / 8


def test_weights_pass_once_for_a_batch(streamed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its latents are computed in one forward: where the bus is waited for, four take as long as one."""
    monkeypatch.setattr(plan, "card_of", lambda _device: TURING)
    monkeypatch.setattr(type(streamed.stream.residency.ledger), "rate", lambda _self: 1e6)
    one, four = (estimate(streamed, (batch, *LATENT[1:]), 20, 1) for batch in (1, 4))
    assert one.source is four.source is Source.PREDICTED
    assert four.fit is not None and four.fit.forwards == 1 and four.fit.passes > 0
    assert four.seconds == pytest.approx(one.seconds, rel=0.05)


def test_of_work_that_is_left_out_as_it_runs_the_most_is_told(streamed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft, and either of its nodes behind the loader: with all of the work it takes as long as Fastest."""
    monkeypatch.setattr(plan, "card_of", lambda _device: TURING)
    video = (1, 16, 21, 60, 104)
    whole = estimate(streamed, video, 20, 2)
    draft = estimate(fusion.at_quality(streamed, "Draft"), video, 20, 2)
    assert draft.seconds == whole.seconds and draft.is_most and not whole.is_most
    assert "A step takes at most" in words.time(draft) and "left out" in words.time(draft)
    assert draw(draft).width == WIDTH
    assert estimate(step_cached(streamed, StepCache()), video, 20, 2).is_most
    assert not estimate(step_cached(streamed, StepCache()), video, 4, 1).is_most, "the first steps are computed"
    assert not estimate(sparse(streamed, Sparse()), LATENT, 20, 2).is_most, "so few tokens stay dense"


def test_a_latent_of_a_picture_is_made_to_fit(streamed: Any) -> None:
    assert estimate(streamed, (2, 4, 16, 16), 4, 1).work.shape == (2, 16, 1, 16, 16)


def test_of_a_model_that_does_not_stream(path: str) -> None:
    model = fusion.load_diffusion_model(path, vram_budget=0.0)
    found = estimate(model, LATENT, 20, 2)
    assert found.fit is None and found.gaps == () and "vram_budget" in words.as_text(found)
    assert draw(found).width == WIDTH


# ------------------------------------------------------------------------------------------------------------------ pace


def test_each_step_is_told_and_the_first_counts_only_alone() -> None:
    now = iter((0.0, 10.0, 12.0, 15.0, 17.0))
    heard: list[Reading] = []
    steps = step_timer._Steps(step_timer.Pace(listener=heard.append), 4, lambda: next(now))
    for done in (1, 2, 2, 3, 4):  # one is told of twice
        steps.step(done)
    steps.end("card", "file", "policy", (1, 16, 3, 16, 16), 2, 7)
    assert [reading.step for reading in heard] == [0, 1, 2, 3, 4, 4]
    assert [reading.seconds for reading in heard] == [None, 10.0, 2.0, 2.5, 2.0, 2.0]
    assert [words.running(reading) for reading in heard] == [
        "step 1 of 4",
        "step 2 of 4, 10 s a step, 30 s left",
        "step 3 of 4, 2 s a step, 4 s left",
        "step 4 of 4, 2.5 s a step, 2.5 s left",
        "step 4 of 4, 2 s a step, 0 s left",
        "4 steps, 2 s a step, 17 s of sampling",
    ]


def test_a_sampling_that_is_interrupted_is_kept_as_far_as_it_came(streamed: Any) -> None:
    import comfy.model_management as mm

    heard: list[Reading] = []

    def stop(reading: Reading) -> None:
        heard.append(reading)
        if reading.step == 3 and not reading.is_over:
            mm.interrupt_current_processing()

    streamed.model.fusestream_pace.listener = stop
    try:
        with pytest.raises(mm.InterruptProcessingException):
            sample(streamed, 6)
    finally:
        streamed.model.fusestream_pace.listener = None
    assert heard[-1].is_over and heard[-1].step == 3 and step_timer.kept()[-1].steps == 3


SAMPLED = Sampled("CPU", "a.safetensors", "kernels auto", (1, 16, 3, 16, 16), 2, 20, 1.5, 4.0, 33.0, 5)


def test_times_outlive_a_start(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "times.json"
    measured.read(file)  # there is none yet
    step_timer.keep(SAMPLED)
    measured.write(file)
    step_timer._kept.clear()
    measured.read(file)
    assert step_timer.kept() == [SAMPLED]
    same = measured.find("CPU", "a.safetensors", "kernels auto", (1, 16, 3, 16, 16), 2)
    assert same == SAMPLED and measured.find("CPU", "a.safetensors", "kernels auto", (1, 16, 9, 9, 9), 1) == SAMPLED
    assert measured.find("GPU", "a.safetensors", "kernels auto", (1, 16, 3, 16, 16), 2) is None
    before = file.stat().st_mtime_ns
    measured.write(file)
    assert file.stat().st_mtime_ns == before, "nothing new, nothing written"


def test_times_that_cannot_be_kept_leave_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "times.json").mkdir()
    step_timer.keep(SAMPLED)
    measured._warn_once.cache_clear()
    for _ in range(2):  # of each prompt
        measured.write(tmp_path / "times.json")
    assert caplog.text.count("times of steps are not kept") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["times.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff\xfe no UTF-8",
        b"[" * 100_000,
        b'{"format": ' + b"1" * 100_000 + b"}",
        b" " * (measured.MOST_BYTES + 1),
        b'{"format": 1, "samplings": [{"shape": 3}]}',
        b'{"format": 1, "samplings": 7}',
        *(
            json.dumps({"format": 1, "samplings": [{**SAMPLED.__dict__, **wrong}]}).encode()
            for wrong in ({"seconds": -1.0}, {"card": 7}, {"held": float("nan")}, {"steps": "2"}, {"more": 1})
        ),
    ],
)
def test_a_file_of_times_that_is_none_is_said_and_replaced(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "times.json"
    file.write_bytes(content)
    measured.read(file)
    assert step_timer.kept() == []
    (said,) = caplog.messages
    assert said.startswith("times.json cannot be read (") and said.endswith("measured again")
    step_timer.keep(SAMPLED)
    measured.write(file)
    step_timer._kept.clear()
    measured.read(file)
    assert step_timer.kept() == [SAMPLED]


def test_times_of_another_version_are_none(tmp_path: Path) -> None:
    (tmp_path / "times.json").write_text(json.dumps({"format": 2, "samplings": [SAMPLED.__dict__]}))
    measured.read(tmp_path / "times.json")
    assert step_timer.kept() == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes that have a path")
def test_a_pipe_in_the_place_of_the_times_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "times.json")
    measured.read(tmp_path / "times.json")
    measured.write(tmp_path / "times.json")
    assert (tmp_path / "times.json").is_file()


# ------------------------------------------------------------------------------------------------------- words, pictures


def made_up() -> Estimate:
    """As of 14B on an 8 GB card."""
    fit = Fit(
        Verdict.STREAMS, free=7 * GIB, others=0, rest=GIB // 4, sizes=(690 << 20,) * 40, stored=1.0, parts=False, held=4 * GIB,
        window=GIB, stays=5, passes=35, activations=3 * GIB // 2, least=GIB, forwards=2, reserve=GIB,
    )  # fmt: skip
    work = Work((1, 16, 21, 60, 104), 20, 2)
    few = Change("few steps", (4,), replace(work, steps=4, prompts=1), fit, 49.0)
    fast = Change("quality", ("turbo",), work, fit, 44.0)
    return Estimate(
        "wan2.1_t2v_14B_fp16.safetensors (WAN21)", TURING.name, "kernels auto, precise", work, (81, 480, 832), fit,
        98.0, Source.PREDICTED, None, True, (fast, few),
    )  # fmt: skip


def test_the_text_answers_the_three_questions() -> None:
    text = words.as_text(made_up())
    assert "832x480, 81 frames, 20 steps, two prompts a step" in text
    assert "It fits: 5 blocks stay, 35 pass through." in text
    assert [line.split(" ")[0] for line in text.splitlines()[2:4]] == ["It", "A"], "first of all"
    assert words.as_text(replace(made_up(), assumed="Assumed: a lot.")).splitlines()[2] == "Assumed: a lot."
    assert "A step takes 98 s, 20 steps 33 min: predicted" in text and "PCIe 3" in text
    assert "quality Fastest: 44 s a step, 15 min in all" in text
    assert "a LoRA for 4 steps, with guidance 1: 49 s a step, 3 min in all" in text


def test_sound_and_what_is_made_smaller_in_two_ways_have_words() -> None:
    found = made_up()
    sound = replace(found, pixels=(0, 0, 0), work=Work((1, 64, 300), 8, 3))
    assert words.asked(sound) == "sound, a latent 300 long, 8 steps, three prompts a step"
    both = Change("frames and size", (41, 320, 560), found.work, found.fit, None)
    assert words.change_name(both) == "41 frames of 560x320"
    draft = Change("quality", ("Draft",), found.work, found.fit, 44.0, is_most=True)
    assert words.change_words(draft, found) == "quality Draft: at most 44 s a step, at most 15 min in all"


@pytest.mark.parametrize("theme", THEMES)
def test_the_picture_shows_them(theme: Any) -> None:
    pixels = np.asarray(draw(made_up(), theme))
    assert pixels.shape[1] == WIDTH and 300 < pixels.shape[0] < 1200
    colours = {
        tuple(int(THEMES[theme].__dict__[name][i : i + 2], 16) for i in (1, 3, 5)) for name in ("resident", "use")
    }
    assert colours <= set(map(tuple, pixels.reshape(-1, 3)))


def test_time_is_told_as_people_do() -> None:
    told = [took(seconds) for seconds in (0.448, 9.96, 38.4, 119, 500, 3600, 7500)]
    assert told == ["0.45 s", "10 s", "38 s", "119 s", "8 min", "1 h", "2 h 5 min"]
