"""Live video on tiny true models: frame by frame what stock's nodes make, blended and skipped as asked, in bounded memory."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import av
import comfy
import comfy.model_management
import comfy.samplers
import comfy.sd
import comfy.utils
import family_scenes
import folder_paths
import numpy
import pytest
import torch
from comfy_api.latest import InputImpl, Types
from comfy_execution.graph_utils import ExecutionBlocker
from comfy_extras import nodes_custom_sampler
from taped import NBYTES, TapingRecorder

import nodes
from fusestream import checkpoints, fusion
from fusestream.bench.end_to_end import weights
from fusestream.checkpoints import narrow
from fusestream.fusion import report
from fusestream.fusion.base.errors import WrongInput
from fusestream.fusion.base.hooks import LAST_LIVE
from fusestream.fusion.live import change, engine, kept, lanes, sources
from fusestream.fusion.live.pictures import Pictures
from fusestream.fusion.live.settings import SD_TURBO, Settings
from fusestream.fusion.live.video import NotWritten, VideoFile
from fusestream.fusion.report.data import Report
from fusestream.fusion.report.live import live_lines, live_of
from fusestream.fusion.vae import resident_patcher
from fusestream.nodes import live as node
from fusestream.nodes.page import front_end

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")
SIDE = 64
SEED = 11


class Stage(NamedTuple):
    model: Any
    positive: Any
    negative: Any
    vae: Any


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Stock's own model and VAE."""
    folder = tmp_path_factory.mktemp("live")
    with torch.inference_mode(), narrow.opened(comfy):
        model = comfy.sd.load_diffusion_model(str(checkpoints.write("sd15", folder)))
        vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(checkpoints.write("sd_vae", folder))))
        scene = family_scenes.inputs("sd15")
        yield Stage(model, scene.positive, scene.negative, vae)


def clip(count: int, height: int = SIDE, width: int = SIDE) -> torch.Tensor:
    """Frames in which a part moves and all else stays."""
    frames = torch.rand(height, width, 3, generator=torch.Generator().manual_seed(1)).repeat(count, 1, 1, 1)
    for i in range(count):
        frames[i, : height // 4, : width // 4] = i / count
    return frames


def live(stage: Stage, frames: Any, **settings: Any) -> tuple[torch.Tensor, engine.Tally]:
    made: list[torch.Tensor] = []
    told = Settings(seed=SEED, **settings)
    tally = engine.run(*stage, frames, told, made.append)
    return torch.stack(made), tally


def stocks(stage: Stage, frames: torch.Tensor, settings: Settings) -> torch.Tensor:
    """By stock's nodes: VAE Encode, KSampler or SamplerCustom, VAE Decode, frame by frame."""
    made = []
    for frame in frames:
        (latent,) = nodes.VAEEncode().encode(stage.vae, frame[None])
        given = stage.model, SEED
        if settings.scheduler == SD_TURBO:
            scheduler = nodes_custom_sampler.SDTurboScheduler
            (sigmas,) = scheduler.execute(stage.model, settings.steps, settings.strength).result
            sampler = comfy.samplers.sampler_object(settings.sampler)
            custom = nodes_custom_sampler.SamplerCustom
            sampled = custom.execute(
                stage.model, True, SEED, settings.cfg, stage.positive, stage.negative, sampler, sigmas, latent
            ).result[0]
        else:
            names = settings.sampler, settings.scheduler
            prompts = stage.positive, stage.negative
            (sampled,) = nodes.KSampler().sample(
                *given, settings.steps, settings.cfg, *names, *prompts, latent, settings.strength
            )
        made.append(nodes.VAEDecode().decode(stage.vae, sampled)[0][0])
    return torch.stack(made)


WAYS = [
    {"batch": 1, "steps": 1, "strength": 0.5},
    {"batch": 2, "steps": 2, "strength": 1.0, "cfg": 4.0, "scheduler": "sgm_uniform"},
    {"batch": 1, "steps": 3, "strength": 0.6, "sampler": "lcm"},
    {"batch": 2, "steps": 2, "strength": 0.7, "sampler": "lcm", "cfg": 2.0, "scheduler": SD_TURBO},
    {"batch": 1, "steps": 1, "strength": 0.5, "scheduler": SD_TURBO},
]


@pytest.mark.every_other
@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(map(str, way.values())))
def test_each_frame_is_what_stocks_nodes_make(stage: Stage, way: dict[str, Any]) -> None:
    frames = clip(3, 64, 72)
    got, tally = live(stage, frames, **way)
    want = stocks(stage, frames, Settings(**way))
    assert got.shape == want.shape == (3, 64, 72, 3) and want.std() > 0.01
    torch.testing.assert_close(got, want, atol=2e-4, rtol=0)
    assert (tally.frames, tally.skipped, tally.groups) == (3, 0, 3 if way["batch"] == 1 else 2)
    assert not torch.equal(want[0], want[2])


def test_models_that_flow_and_vaes_with_time(tmp_path: Path) -> None:
    """A Wan: a frame is a video of one."""
    model = comfy.sd.load_diffusion_model(str(checkpoints.write("wan_t2v", tmp_path)))
    vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(checkpoints.write("wan_vae", tmp_path))))
    words = torch.randn(1, 8, checkpoints.T5_WIDTH, generator=torch.Generator().manual_seed(2))
    wan = Stage(model, [[words, {}]], [[words, {}]], vae)
    frames, way = clip(3, 32, 32), {"steps": 2, "strength": 0.5, "scheduler": "simple"}
    got = live(wan, frames, batch=2, **way)[0]
    torch.testing.assert_close(got, stocks(wan, frames, Settings(**way)), atol=2e-4, rtol=0)
    # The latents have a time, and the mask of a blend has none.
    assert live(wan, frames, blend=0.5, **way)[0].isfinite().all()


def test_a_vae_whose_halves_take_turns_keeps_both(
    tmp_path: Path, recorder: TapingRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph has the addresses of its half's weights, and the other half's stage may be under way. What the card is to
    the file's tensors, fp32 is here to fp64."""
    model = comfy.sd.load_diffusion_model(str(checkpoints.write("wan_t2v", tmp_path)))
    vae = fusion.load_vae(str(checkpoints.write("wan_vae", tmp_path)))
    words = torch.randn(1, 8, checkpoints.T5_WIDTH, generator=torch.Generator().manual_seed(2))
    wan = Stage(model, [[words, {}]], [[words, {}]], vae)
    net, moved = vae.first_stage_model.double(), list[int]()
    begin, let_go = Pictures.begin, resident_patcher.let_go
    monkeypatch.setattr(Pictures, "begin", lambda *given: (begin(*given), moved.clear())[0])
    monkeypatch.setattr(resident_patcher, "let_go", lambda *given: (let_go(*given), moved.append(1))[0])
    _, tally = live(wan, clip(6, 32, 32))
    assert tally.replayed and not moved
    halves = net.encoder.conv1.weight, net.decoder.conv1.weight
    assert {each.dtype for each in halves} == {torch.float32}
    vae.encode(clip(1, 32, 32))
    assert moved and net.decoder.conv1.weight.dtype is torch.float64, "behind the frames one half has the card alone"


@pytest.mark.deep
def test_blending(stage: Stage) -> None:
    """What does not move is blended by weight, what moves is new; all new where the weight is 0 or nothing is alike."""
    frames = clip(3)
    plain, _ = live(stage, frames)
    blended, _ = live(stage, frames, blend=0.8)
    one_by_one, together = blended, live(stage, frames, blend=0.8, batch=3)[0]
    torch.testing.assert_close(together, one_by_one, atol=2e-4, rtol=0)
    torch.testing.assert_close(blended[0], plain[0])
    # Behind a moved corner the VAE sees a little of it elsewhere: far from it the frames are nearer to each other than before.
    quiet = slice(SIDE // 2, None)

    def moves(made: torch.Tensor) -> float:
        return float((made[1:, quiet, quiet] - made[:-1, quiet, quiet]).abs().mean())

    assert moves(blended) < 0.5 * moves(plain)
    corner = slice(0, SIDE // 8)
    torch.testing.assert_close(blended[1:, corner, corner], plain[1:, corner, corner], atol=0.05, rtol=0)
    other = torch.stack((frames[0] * 0.4, 1 - frames[0] * 0.4))
    new, _ = live(stage, other, blend=0.8, tolerance=0.001)
    torch.testing.assert_close(new, live(stage, other)[0], atol=2e-4, rtol=0)


def test_frames_are_compared_by_parts_of_the_latents_size() -> None:
    """Each part by what is in it, whatever size a frame has."""
    parts = torch.rand(6, 4, 3, generator=torch.Generator().manual_seed(4))
    for scale in (1, 3, 8, 20):
        frame = parts.repeat_interleave(scale, 0).repeat_interleave(scale, 1)
        found = change.reduced(frame, 6, 4)
        torch.testing.assert_close(found, parts.movedim(-1, 0))
        in_bytes = change.reduced((frame * 255).round().byte(), 6, 4)
        torch.testing.assert_close(in_bytes, found, atol=0.5 / 255 + 1e-6, rtol=0)
    wide = torch.cat((torch.zeros(48, 16, 3), frame[:48, :32], torch.zeros(48, 16, 3)), 1)
    assert change.reduced(wide, 6, 4).shape == (3, 6, 4) and change.reduced(wide, 6, 4).min() > 0, "the middle alone"
    moved = parts.movedim(-1, 0).clone()
    moved[1, 2, 3] += 0.05
    assert change.difference(moved, parts.movedim(-1, 0)) == pytest.approx(0.05 / 72, rel=1e-3)
    new = change.new_parts(moved, parts.movedim(-1, 0), 0.1)
    assert (
        new.shape == (1, 1, 6, 4) and new[0, 0, 2, 3] == pytest.approx(0.5, rel=1e-3) and new.sum() == new[0, 0, 2, 3]
    )
    assert change.new_parts(moved, parts.movedim(-1, 0), 0.01).max() == 1


@pytest.mark.deep
def test_frames_that_hardly_differ_are_skipped(stage: Stage) -> None:
    first, second = clip(2)
    frames = [first, first, second, second, second, first]
    for batch in (1, 2, 4):
        made, tally = live(stage, frames, skip=0.001, batch=batch)
        assert (tally.frames, tally.skipped) == (6, 3)
        want = live(stage, [first, second, first])[0][[0, 0, 1, 1, 1, 2]]
        torch.testing.assert_close(made, want, atol=2e-4, rtol=0)
    assert live(stage, frames, skip=0.0)[1].skipped == 0
    # Small steps add up: it is the last frame that was made that counts.
    slow = [first + i * 0.001 for i in range(6)]
    assert live(stage, slow, skip=0.0025)[1].skipped == 4


# ------------------------------------------------------------------------------------------------------------ the node


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """What a page is told: bars with their pictures, and texts."""
    told = SimpleNamespace(bars=[], texts=[], client_id="page", send_sync=lambda *_: None)
    told.send_progress_text = lambda text, node, sid: told.texts.append((text, node, sid))
    monkeypatch.setattr(front_end, "running_server", lambda: told)
    monkeypatch.setattr(
        comfy.utils, "PROGRESS_BAR_HOOK", lambda at, of, picture, **_: told.bars.append((at, of, picture))
    )
    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path / "temp"))
    return told


def through_node(stage: Stage, linked: tuple[int, ...] = (0, 1), **given: Any) -> tuple[Any, Any]:
    """As ComfyUI executes it in a graph where these outputs are taken."""
    prompt = {"2": {"inputs": {"a": 1, **{f"in{slot}": ["1", slot] for slot in linked}}}}
    told = {"steps": 1, "cfg": 1.0, "strength": 0.5, "seed": SEED, "sampler": "euler", "scheduler": "simple"}
    sizes = {"width": 0, "height": 0}
    hidden = {"unique_id": "1", "prompt": prompt}
    ready = node.LiveVideo.PREPARE_CLASS_CLONE({"hidden_inputs": {}})
    ready.hidden = SimpleNamespace(**hidden)
    image, video = ready.execute(*stage, **{**told, **sizes, **given}).result
    return image, video


def written(path: Path, frames: torch.Tensor, rate: int = 10) -> Any:
    """As stock's Save Video writes it."""
    parts = Types.VideoComponents(images=frames, frame_rate=Fraction(rate))
    InputImpl.VideoFromComponents(parts).save_to(str(path))
    return InputImpl.VideoFromFile(str(path))


def test_frames_become_an_image_and_a_video(stage: Stage, page: Any) -> None:
    frames = clip(4)
    image, video = through_node(stage, frames=frames, fps=10.0)
    torch.testing.assert_close(image, live(stage, frames)[0], atol=2e-4, rtol=0)
    parts = video.get_components()
    assert parts.frame_rate == 10 and parts.images.shape == image.shape
    # Beside the same frames as stock writes them.
    stocks_file = Path(folder_paths.get_temp_directory()) / "stock.mp4"
    assert torch.equal(parts.images, written(stocks_file, image).get_components().images)
    assert [(at, of) for at, of, _ in page.bars][-1] == (4, 4)
    kind, picture, most = page.bars[0][2]
    assert (kind, picture.size) == ("JPEG", (SIDE, SIDE)) and most > 0
    text, shown_at, sid = page.texts[-1]
    assert text.startswith("4 frames in ") and (shown_at, sid) == ("1", "page")


@pytest.mark.deep
def test_a_video_is_read_frame_by_frame(stage: Stage, page: Any, tmp_path: Path) -> None:
    """To the bit as stock reads all of its frames at once; also where its rows are of odd lengths, or a part was cut out."""
    video, odd = (written(tmp_path / f"{width}.mp4", clip(8, width=width)) for width in (SIDE, 50))
    for given, count in ((video, 8), (odd, 8), (odd.as_trimmed(0.3, 0.4, strict_duration=False), 4)):
        read = torch.stack(list(sources.of_video(given).frames))
        assert torch.equal(read, given.get_components().images) and len(read) == sources.of_video(given).count == count
        if count == 8:
            continue
        image, made = through_node(stage, video=given)
        torch.testing.assert_close(image, live(stage, read)[0], atol=2e-4, rtol=0)
        assert made.get_frame_rate() == 10 and made.get_frame_count() == count
    in_memory = InputImpl.VideoFromComponents(Types.VideoComponents(images=clip(3), frame_rate=Fraction(30)))
    image, made = through_node(stage, video=in_memory)
    torch.testing.assert_close(image, live(stage, clip(3))[0], atol=2e-4, rtol=0)
    assert made.get_frame_rate() == 30


def test_an_image_that_does_not_fit_is_refused_or_left_out(
    stage: Stage, page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = clip(4)
    monkeypatch.setattr(kept, "LIMIT", 3 * frames[0].nbytes)
    with pytest.raises(ValueError, match=r"4 frames of 64x64 would be an IMAGE .* Connect its VIDEO output"):
        through_node(stage, frames=frames)
    assert not page.bars, "before anything is made"
    image, video = through_node(stage, (1,), frames=frames)
    assert isinstance(image, ExecutionBlocker) and "VIDEO output" in image.message
    assert video.get_frame_count() == 4
    image, _ = through_node(stage, frames=frames, width=32, height=32)
    assert image.shape == (4, 32, 32, 3)


def test_no_image_grows_past_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of frames whose number nobody knew."""
    monkeypatch.setattr(kept, "LIMIT", 2 * 8 * 8 * 3 * 4)
    images = kept.Kept()
    for _ in range(2):
        images.add(torch.rand(8, 8, 3))
    assert images.fault is None
    images.add(torch.rand(8, 8, 3))
    assert images.image() is None and "3 frames of 8x8" in str(images.fault)


def test_the_limit_in_the_tooltip() -> None:
    schema = node.LiveVideo.GET_SCHEMA()
    assert (
        f"{kept.LIMIT // kept.GIB} GiB of them: {kept.LIMIT // (512 * 512 * kept.PIXEL)} of 512x512"
        in schema.outputs[0].tooltip
    )


def test_what_cannot_be_a_video(stage: Stage, page: Any, tmp_path: Path) -> None:
    for given, said in (
        ({"frames": clip(1), "video": object()}, "not both"),
        ({"frames": clip(1)[:0]}, "no frame to make anything of"),
        ({"frames": clip(1), "strength": 0.05, "scheduler": SD_TURBO}, "strength 0.05 leaves no step .* at least 0.1"),
    ):
        with pytest.raises(WrongInput, match=said):
            through_node(stage, **given)
    sound = tmp_path / "sound.m4a"
    with av.open(str(sound), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        silence = av.AudioFrame.from_ndarray(numpy.zeros((1, 1024), "float32"), "fltp", "mono")
        silence.sample_rate = 44100
        container.mux([*stream.encode(silence), *stream.encode(None)])
    with pytest.raises(WrongInput, match="no frames, only sound"):
        through_node(stage, video=InputImpl.VideoFromFile(str(sound)))
    assert not list(Path(folder_paths.get_temp_directory()).iterdir()), "nothing was made"
    inpainting = stage.model.clone()
    inpainting.model = SimpleNamespace(concat_keys=("mask",))
    with pytest.raises(ValueError, match="for inpainting or editing"):
        engine.run(inpainting, *stage[1:], clip(1), Settings(), lambda _: None)


def test_a_frame_of_another_size_is_scaled_and_said(stage: Stage, page: Any, caplog: pytest.LogCaptureFixture) -> None:
    frames = [*clip(2), *clip(1, 80, 96), *clip(1)]
    made, _ = live(stage, frames)
    assert made.shape == (4, SIDE, SIDE, 3)
    assert "a frame of 96x80 came among those of 64x64" in caplog.text
    torch.testing.assert_close(made[3], made[0], atol=2e-4, rtol=0)


def test_an_interrupt_at_any_frame_keeps_what_was_made(
    stage: Stage, page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    management, running = comfy.model_management, threading.active_count()

    add = node.Shown.add

    def stop_at_third(shown: Any, frame: Any) -> None:
        add(shown, frame)
        if shown.frames == 3:
            management.interrupt_current_processing()

    monkeypatch.setattr(node.Shown, "add", stop_at_third)
    with pytest.raises(management.InterruptProcessingException):
        through_node(stage, frames=clip(9))
    (file,) = Path(folder_paths.get_temp_directory()).glob("*.mp4")
    assert InputImpl.VideoFromFile(str(file)).get_components().images.shape == (3, SIDE, SIDE, 3)
    assert threading.active_count() <= running
    assert len(live(stage, clip(2))[0]) == 2, "and the next run goes on"


@pytest.fixture(scope="module")
def tiny(stage: Stage) -> Stage:
    """The same with TAESD of ours, whose weights are drawn."""
    drawn = weights.small_vae("taesd", torch.Generator().manual_seed(0), tiny=True)
    with torch.inference_mode():
        return stage._replace(vae=fusion.load_vae_in_parts("taesd", drawn))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> TapingRecorder:
    """What the VAE's stages are recorded with."""
    found = TapingRecorder()
    monkeypatch.setattr(engine, "Pictures", partial(Pictures, recorder=found))
    return found


def test_encoding_and_decoding_are_replayed(
    tiny: Stage, recorder: TapingRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames, told = clip(8), {"blend": 0.5}
    recorder.nothing = "nothing is recorded"
    want, tally = live(tiny, frames, **told)
    assert tally.replayed == 0 and not recorder.recorded
    recorder.nothing = None
    got, tally = live(tiny, frames, **told)
    assert recorder.recorded == 2 and tally.replayed == 2 * (8 - 3) and torch.equal(got, want)
    assert "10 encodings and decodings were replayed as CUDA graphs" in "\n".join(live_lines(live_of(tiny.model)))
    assert not recorder.tapes, "nothing is kept when the frames end"


def test_what_stock_decodes_is_not_replayed(stage: Stage, recorder: TapingRecorder) -> None:
    _, tally = live(stage, clip(5))
    assert tally.replayed == 0 and not recorder.recorded


@pytest.mark.deep
def test_a_vae_that_moves_is_captured_anew(tiny: Stage, recorder: TapingRecorder) -> None:
    """ComfyUI wants the room in the middle: what was captured has the addresses from before."""
    frames = clip(10)
    want, _ = live(tiny, frames)

    def moves() -> Iterator[torch.Tensor]:
        for i, frame in enumerate(frames):
            if i == 6:
                tiny.vae.patcher.detach()
                tiny.vae.patcher.patch_model(tiny.vae.device)
            yield frame

    before = recorder.recorded
    got, _ = live(tiny, moves())
    assert torch.equal(got, want) and recorder.recorded == before + 4 and not recorder.tapes


@pytest.mark.deep
def test_a_bound_of_memory_that_is_too_small_for_graphs(tiny: Stage, recorder: TapingRecorder) -> None:
    pictures = Pictures(tiny.vae, recorder)
    frame, latent = clip(1), None
    pictures.begin(NBYTES // 2)
    for _ in range(5):
        found = pictures.decode(pictures.encode(frame))
        assert latent is None or torch.equal(latent, found)
        latent = found
    assert pictures.end() == 0 and not recorder.tapes
    pictures.begin(100 * NBYTES)
    for _ in range(5):
        assert torch.equal(pictures.decode(pictures.encode(frame)), found)
    assert pictures.end() == 4 and not recorder.tapes


def test_too_little_memory_is_told_with_what_to_do(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the way of a frame; before it, stock's VAE has said what it has to say."""

    def out_of_memory(_pictures: Any, _latents: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(engine.Pictures, "decode", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError, match=r"frames of 64x64, 2 at a time.* 2 GiB.* take TAESD as the VAE"):
        live(stage, clip(2), batch=2)
    assert engine.OutOfVram.__module__ == "fusestream", "what a page shows before the words"


def test_model_and_vae_are_loaded_together_with_room_for_both(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for all frames, each beside the other."""
    asked: list[tuple[set[Any], float]] = []
    load = comfy.model_management.load_models_gpu

    def watched(models: list[Any], memory_required: float = 0, **others: Any) -> None:
        asked.append(({type(one.model).__name__ for one in models}, memory_required))
        load(models, memory_required=memory_required, **others)

    monkeypatch.setattr(comfy.model_management, "load_models_gpu", watched)
    live(stage, clip(5))
    both = {type(stage.model.model).__name__, type(stage.vae.patcher.model).__name__}
    assert len(both) == 2 and len(asked) == 3 and [names for names, _ in asked][1:] == [both, both]
    vae = stage.vae
    alone = vae.memory_used_encode((1, 3, SIDE, SIDE), vae.vae_dtype) + vae.memory_used_decode(
        (1, 4, 8, 8), vae.vae_dtype
    )
    assert asked[-1][1] > alone


def test_frames_leave_as_they_are_made(stage: Stage) -> None:
    """Whoever reads is never more than a batch ahead of what was delivered."""
    for batch in (1, 3):
        made: list[torch.Tensor] = []
        ahead = []

        def frames(most: int, made: Any = made, ahead: Any = ahead) -> Iterator[torch.Tensor]:
            for i, frame in enumerate(clip(most)):
                ahead.append(i - len(made))
                yield frame

        engine.run(*stage, frames(9), Settings(batch=batch), made.append)
        assert len(made) == 9 and max(ahead) <= batch


def test_the_reader_holds_a_few_frames_and_ends_with_its_taker() -> None:
    read = []

    def frames() -> Any:
        try:
            for i in range(100):
                read.append(i)
                yield torch.zeros(1)
        finally:
            read.append("closed")

    taken = sources.ahead(frames(), lambda frame: frame, 4)
    for _ in range(10):
        next(taken)
    taken.close()
    assert read[-1] == "closed" and len(read) <= 16


def test_frames_that_come_with_their_times_keep_them(tmp_path: Path) -> None:
    video = VideoFile(tmp_path / "made.mp4", None)
    for at in (5.0, 5.1, 5.1, 6.0):
        video.add(torch.rand(16, 16, 3), at)
    video.close()
    with av.open(str(video.path)) as container:
        assert [round(float(frame.time), 3) for frame in container.decode(video=0)] == [0.0, 0.1, 0.101, 1.0]
    assert len(InputImpl.VideoFromFile(str(video.path)).get_components().images) == 4


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    video = VideoFile(tmp_path / "no such folder" / "made.mp4", Fraction(24))
    with pytest.raises(NotWritten, match=r"made.mp4 could not be written: .* temp folder"):
        for _ in range(20):
            video.add(torch.rand(16, 16, 3))
        video.close()


# ---------------------------------------------------------------------------------------------------------- the streams


class Cards:
    """As much of torch.cuda as the streams ask for, with a log of who waits for whom. What runs, runs at once."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.current = "main"
        self.time = 0.0
        cards = self

        class Stream:
            def __init__(self, name: str) -> None:
                self.name = name

            def wait_stream(self, other: Any) -> None:
                cards.log.append(("waits for stream", self.name, other.name))

            def wait_event(self, event: Any) -> None:
                cards.log.append(("waits for event", self.name, event.of))

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: Any) -> None:
                cards.time += 1.0
                self.of, self.at = stream.name, cards.time

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at)  # milliseconds

            def synchronize(self) -> None:
                cards.log.append(("host waits", self.of, self.at))

        names = iter(("encode", "decode"))
        self.Event, self.Stream = Event, lambda _device: Stream(next(names))
        self._main = Stream("main")

    def current_stream(self, _device: Any) -> Any:
        return self._main

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Cards:
    made = Cards()
    monkeypatch.setattr(lanes, "torch", SimpleNamespace(cuda=made))
    return made


def test_a_stage_waits_for_what_it_is_given_and_the_main_stream_for_all(cards: Cards) -> None:
    made = lanes.OnStreams(torch.device("cuda"))
    assert cards.log == [("waits for stream", name, "main") for name in ("encode", "main", "decode")]
    cards.log.clear()
    ran_on = []

    def work(*given: torch.Tensor) -> torch.Tensor:
        ran_on.append(cards.current)
        return torch.zeros(1) if not given else given[0] + 1

    for group in range(2):
        encoded = made.run("encode", group, work)
        stepped = made.run("steps", group, work, encoded)
        out = made.run("decode", group, work, stepped)
        assert made.take(out) == 2
    assert ran_on == 2 * ["encode", "main", "decode"]
    waits = [("waits for event", "main", "encode"), ("waits for event", "decode", "main")]
    assert [entry for entry in cards.log if entry[0] == "waits for event"] == 2 * waits
    assert [entry[:2] for entry in cards.log if entry[0] == "host waits"] == 2 * [("host waits", "decode")]
    stages = made.ran(1)
    assert [one.stage for one in stages] == list(lanes.STAGES) and made.ran(1) == []
    assert all(one.end - one.start == pytest.approx(1e-3) for one in (*stages, *made.ran(0)))
    cards.log.clear()
    made.close()
    assert cards.log == [("waits for stream", "main", name) for name in ("encode", "main", "decode")]


def test_groups_that_are_under_way_leave_in_order(stage: Stage, cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two ahead, all the same frames leave, and none too late: a source that has nothing to give is not waited for."""
    frames = clip(5)
    want, _ = live(stage, frames, blend=0.5)
    streams = contextlib.nullcontext(lanes.OnStreams(torch.device("cuda")))
    monkeypatch.setattr(engine, "lanes_for", lambda _device: streams)
    delivered: list[int] = []

    def source() -> Iterator[torch.Tensor | None]:
        for frame in frames[:4]:
            yield frame
            delivered.append(len(made))
        yield None
        delivered.append(len(made))
        yield frames[4]

    made: list[torch.Tensor] = []
    tally = engine.run(*stage, source(), Settings(seed=SEED, blend=0.5), made.append)
    torch.testing.assert_close(torch.stack(made), want, atol=2e-4, rtol=0)
    assert delivered == [0, 0, 1, 2, 4] and [ran.group for ran in tally.ran] == [i for i in range(5) for _ in range(3)]


# ---------------------------------------------------------------------------------------------------------- the report


def test_the_report_tells_stages_what_overlapped_and_what_waited(stage: Stage) -> None:
    live(stage, clip(9), skip=0.0, batch=2)
    found = report.gather(stage.model).live
    assert found is not None and (found.frames, found.skipped, found.batch) == (9, 0, 2) and found.rate > 0
    assert [one.name for one in found.stages] == list(lanes.STAGES) and all(one.seconds > 0 for one in found.stages)
    assert found.overlap == 0, "one after the other"
    text = report.as_text(report.gather(stage.model))
    assert "Live video\n  9 frames; " in text and "each 2 frames: encode " in text
    assert report.gather(None).live is None and report.gather(SimpleNamespace(load_device="cpu")).live is None


def test_stages_that_overlap_are_reckoned_and_drawn() -> None:
    """By hand: an encoding of 1, a network of 3 that begins 1 late, a decoding of 1; every 3 seconds one."""
    tally = engine.Tally(frames=4, skipped=1)
    for group in range(4):
        at = 3.0 * group
        for name, start, end in (("encode", at, at + 1), ("steps", at + 2, at + 5), ("decode", at + 5, at + 6)):
            tally.ran.append(lanes.Ran(name, group, start, end))
    tally.ran.popleft()  # what is kept of the oldest may be a part
    model = SimpleNamespace(model=SimpleNamespace(**{LAST_LIVE: tally}))
    found = live_of(model)
    assert found is not None and found.rate == pytest.approx(3 / 12)
    assert [(one.seconds, one.waited) for one in found.stages] == [(1, 0), (3, 1), (1, 0)]
    # From 2 to 15 a stage runs; beside the network the next encoding, and the decoding before, of a second each: three of both.
    assert found.overlap == pytest.approx(6 / 13)
    lines = list(live_lines(found))
    assert lines[0] == "4 frames, 1 of them skipped; 0.2 a second at last" and "46% of the time" in lines[2]
    assert lines[3] == "steps began 1.00 s behind what it gets"
    shown = Report("a model", "here", live=found)
    picture, without = (report.draw(one) for one in (shown, replace(shown, live=None)))
    assert picture.height > without.height + 100
    assert json.loads(report.as_json(shown))["live"]["overlap"] == found.overlap
