"""Live video on tiny true models: frame by frame what stock's nodes make, blended and skipped as asked, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import comfy
import comfy.model_management
import comfy.sample
import comfy.samplers
import comfy.sd
import comfy.utils
import family_scenes
import pytest
import torch
from comfy_extras import nodes_custom_sampler

import nodes
from fusestream import checkpoints
from fusestream.checkpoints import narrow
from fusestream.fusion.live import engine
from fusestream.fusion.live.settings import SAMPLERS, SD_TURBO, Settings

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")
SIDE = 64
SEED = 11


class Stage(NamedTuple):
    model: Any
    vae: Any
    positive: Any
    negative: Any


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Stock's own model and VAE."""
    folder = tmp_path_factory.mktemp("live")
    with torch.inference_mode(), narrow.opened(comfy):
        model = comfy.sd.load_diffusion_model(str(checkpoints.write("sd15", folder)))
        vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(checkpoints.write("sd_vae", folder))))
        scene = family_scenes.inputs("sd15")
        yield Stage(model, vae, scene.positive, scene.negative)


def clip(count: int, height: int = SIDE, width: int = SIDE) -> torch.Tensor:
    """Frames in which a part moves and all else stays."""
    frames = torch.rand(height, width, 3, generator=torch.Generator().manual_seed(1)).repeat(count, 1, 1, 1)
    for i in range(count):
        frames[i, : height // 4, : width // 4] = i / count
    return frames


def live(stage: Stage, frames: Any, **settings: Any) -> tuple[torch.Tensor, engine.Tally]:
    made: list[torch.Tensor] = []
    told = Settings(seed=SEED, **settings)
    tally = engine.run(stage.model, stage.vae, stage.positive, stage.negative, frames, told, made.append)
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
    {"steps": 1, "strength": 0.5},
    {"steps": 2, "strength": 1.0, "cfg": 4.0, "scheduler": "sgm_uniform"},
    {"steps": 3, "strength": 0.6, "sampler": "lcm"},
    {"steps": 2, "strength": 0.7, "sampler": "lcm", "cfg": 2.0, "scheduler": SD_TURBO},
    {"steps": 1, "strength": 0.5, "scheduler": SD_TURBO},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(map(str, way.values())))
@pytest.mark.parametrize("batch", [1, 2])
def test_each_frame_is_what_stocks_nodes_make(stage: Stage, way: dict[str, Any], batch: int) -> None:
    frames = clip(3, 64, 72)
    got, tally = live(stage, frames, batch=batch, **way)
    want = stocks(stage, frames, Settings(**way))
    assert got.shape == want.shape == (3, 64, 72, 3) and want.std() > 0.01
    torch.testing.assert_close(got, want, atol=2e-4, rtol=0)
    assert (tally.frames, tally.skipped, tally.groups) == (3, 0, 3 if batch == 1 else 2)
    assert not torch.equal(want[0], want[2])


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
    other = torch.rand(2, SIDE, SIDE, 3, generator=torch.Generator().manual_seed(5)).round()
    new, _ = live(stage, other, blend=0.8, tolerance=0.001)
    torch.testing.assert_close(new, live(stage, other)[0], atol=2e-4, rtol=0)


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
