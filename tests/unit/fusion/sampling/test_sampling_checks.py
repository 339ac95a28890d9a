"""What is looked at when a sampling begins: latents of another model are refused by name, images that go nowhere are warned of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import comfy.ldm.wan.vae2_2
import comfy.samplers
import family_scenes
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfy_extras import nodes_wan
from scenes import FRAMES, SIDE, Scene, Studio
from scenes import sample as sample_whole

from fusestream import checkpoints, fusion
from fusestream.fusion.base import notices
from fusestream.fusion.base.errors import WrongFile
from fusestream.fusion.sampling import checks

STREAMED, STOCK = 0.016, 0.0  # GiB of VRAM for the blocks; 0: stock's own memory management

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    heard: list[str] = []
    monkeypatch.setattr(notices, "warn", heard.append)
    return heard


class AnyVae:
    """Makes latents of pixels, of the right shape; nobody looks at what is in them."""

    def __init__(self, channels: int, side: int) -> None:
        self.latent_channels, self.side = channels, side

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        frames, height, width, _ = pixels.shape
        return torch.rand(1, self.latent_channels, 1 + (frames - 1) // 4, height // self.side, width // self.side)

    def spacial_compression_encode(self) -> int:
        return self.side


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Studio:
    """One whose prompts, VAEs and CLIP vision nobody has trained or loaded: no model looks at them here."""
    made = Studio.__new__(Studio)
    made.folder = tmp_path_factory.mktemp("models")
    made.fox, made.cats, made.bad = ([[torch.rand(1, 4, checkpoints.T5_WIDTH), {}]] for _ in range(3))
    made.vae, made.vae22 = AnyVae(16, 8), AnyVae(48, 16)
    made.first, made.last, made.control = (torch.rand(count, SIDE, SIDE, 3) for count in (1, 1, FRAMES))
    made.seen_first = made.seen_last = SimpleNamespace(penultimate_hidden_states=torch.rand(1, 4, 8))
    return made


@pytest.fixture(scope="module")
def scenes(studio: Studio) -> dict[str, Scene]:
    return {kind: studio.scene(kind) for kind in checkpoints.wan.SIZES}


@pytest.fixture(scope="module")
def loaded(studio: Studio) -> Iterator[Callable[[str, float], Any]]:
    """A tiny model of a kind, loaded once."""
    models: dict[tuple[str, float], Any] = {}

    def load(kind: str, budget: float = STREAMED) -> Any:
        if (kind, budget) not in models:
            path = str(checkpoints.write(kind, studio.folder))
            models[kind, budget] = fusion.load_diffusion_model(path, vram_budget=budget)
        return models[kind, budget]

    yield load
    models.clear()


def sample(model: Any, scene: Scene) -> None:
    """Up to where the model would be loaded."""
    model = model.clone()
    model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "ends here", lambda _executor, noise, *_args, **_kwargs: noise)
    sample_whole(model, scene)


def name(kind: str, studio: Studio) -> str:
    return checkpoints.write(kind, studio.folder).name


@pytest.mark.parametrize("kind", checkpoints.wan.SIZES)
def test_every_model_in_its_own_scene_runs_without_a_word(
    kind: str, scenes: dict[str, Scene], loaded: Callable[..., Any], said: list[str]
) -> None:
    sample(loaded(kind), scenes[kind])
    assert said == []


@pytest.mark.parametrize("budget", [STREAMED, STOCK])
def test_an_image_for_a_model_of_text_is_warned_of(
    studio: Studio, scenes: dict[str, Scene], loaded: Callable[..., Any], said: list[str], budget: float
) -> None:
    sample(loaded("wan_t2v", budget).clone(), scenes["wan22_i2v"])
    (sentence,) = said
    assert sentence.startswith(f"{name('wan_t2v', studio)} does not use the image") and "(I2V" in sentence


def test_what_clip_vision_saw_is_an_image(
    studio: Studio, scenes: dict[str, Scene], loaded: Callable[..., Any], said: list[str]
) -> None:
    common = (studio.fox, studio.bad, studio.vae, SIDE, SIDE, FRAMES, 1)
    seen = Scene(*nodes_wan.WanImageToVideo.execute(*common, clip_vision_output=studio.seen_first).result)
    sample(loaded("wan_t2v"), seen)
    assert len(said) == 1
    sample(loaded("wan_i2v"), seen)
    assert len(said) == 1, "a model that looks at it is content with that"


@pytest.mark.parametrize("budget", [STREAMED, STOCK])
@pytest.mark.parametrize("kind", ["wan_i2v", "wan22_i2v", "wan_flf2v"])
def test_a_model_of_images_without_one_is_warned_of(
    studio: Studio, scenes: dict[str, Scene], loaded: Callable[..., Any], said: list[str], kind: str, budget: float
) -> None:
    sample(loaded(kind, budget), scenes["wan_t2v"])
    (sentence,) = said
    assert sentence.startswith(f"{name(kind, studio)} makes a video of an image and is given none")
    assert "start image" in sentence and "(T2V" in sentence


@pytest.mark.parametrize(("kind", "remedy"), [("wan_vace", "WanVaceToVideo"), ("wan22_5b", "Wan22ImageToVideoLatent")])
def test_a_model_that_takes_images_another_way_is_told_which(
    scenes: dict[str, Scene], loaded: Callable[..., Any], said: list[str], kind: str, remedy: str
) -> None:
    scene = scenes["wan22_i2v"]
    latent = {"samples": torch.zeros(1, 48 if kind == "wan22_5b" else 16, 2, 4, 4)}
    sample(loaded(kind), Scene(scene.positive, scene.negative, latent))
    (sentence,) = said
    assert remedy in sentence


def test_5b_makes_videos_of_text_too(scenes: dict[str, Scene], loaded: Callable[..., Any], said: list[str]) -> None:
    text = scenes["wan_t2v"]
    sample(loaded("wan22_5b"), Scene(text.positive, text.negative, {"samples": torch.zeros(1, 48, 2, 4, 4)}))
    assert said == []


def test_a_lora_may_give_a_model_more_inputs(
    scenes: dict[str, Scene], loaded: Callable[..., Any], said: list[str]
) -> None:
    model = loaded("wan_t2v").clone()
    key = "diffusion_model.patch_embedding.weight"
    assert model.add_patches({key: ("diff", (torch.zeros_like(model.model.state_dict()[key], device="cpu"),))}, 1.0)
    sample(model, scenes["wan22_i2v"])
    assert said == []


@pytest.mark.parametrize("budget", [STREAMED, STOCK])
@pytest.mark.parametrize(
    ("kind", "channels", "right"),
    [("wan_t2v", 48, "wan_2.1_vae.safetensors"), ("wan22_5b", 16, "wan2.2_vae.safetensors")],
)
def test_latents_of_another_vae_are_refused_by_name(
    studio: Studio,
    scenes: dict[str, Scene],
    loaded: Callable[..., Any],
    kind: str,
    channels: int,
    right: str,
    budget: float,
) -> None:
    text = scenes["wan_t2v"]
    encoded = {"samples": torch.randn(1, channels, 2, 4, 4)}
    with pytest.raises(WrongFile) as caught:
        sample(loaded(kind, budget), Scene(text.positive, text.negative, encoded))
    message = str(caught.value)
    assert name(kind, studio) in message and str(channels) in message and right in message


@pytest.mark.usefixtures("small_ones_too")
@pytest.mark.parametrize("budget", [STREAMED, STOCK])
@pytest.mark.parametrize(
    ("kind", "width", "right"),
    [
        ("flux2", checkpoints.text.QWEN3.width, "qwen_3_4b.safetensors, type flux2"),  # encoded for Z-Image
        ("z_image", 3 * checkpoints.text.QWEN3.width, "qwen_3_4b.safetensors, type lumina2"),  # for klein
        ("z_image", 4096, "qwen_3_4b.safetensors, type lumina2"),  # by a T5
        ("wan_t2v", checkpoints.text.QWEN3.width, "umt5_xxl"),
    ],
)
def test_prompts_of_another_text_encoder_are_refused_by_name(
    studio: Studio,
    scenes: dict[str, Scene],
    loaded: Callable[..., Any],
    said: list[str],
    kind: str,
    width: int,
    right: str,
    budget: float,
) -> None:
    scene = scenes[kind] if kind in scenes else family_scenes.inputs(kind)
    sample(loaded(kind, budget), scene)
    with pytest.raises(WrongFile) as caught:
        sample(loaded(kind, budget), Scene(scene.positive, [[torch.rand(1, 4, width), {}]], scene.latent))
    message = str(caught.value)
    assert name(kind, studio) in message and f"are {width} wide" in message and right in message
    assert "Text Encoder Loader" in message and said == []


def test_a_model_that_nobody_knows_is_left_alone() -> None:
    class Patcher:
        def add_wrapper_with_key(self, *_: Any) -> None:
            raise AssertionError

    checks.attach(Patcher(), "x.safetensors", None)


@pytest.mark.parametrize(
    ("kind", "channels", "right"),
    [
        ("wan_vae", 48, "wan2.2_vae.safetensors"),
        ("wan22_vae", 16, "wan_2.1_vae.safetensors"),
        ("wan_vae", 4, "4 channels"),
    ],
)
def test_a_vae_names_the_one_that_would_decode(studio: Studio, kind: str, channels: int, right: str) -> None:
    path = checkpoints.write(kind, studio.folder)
    if kind == "wan_vae":
        vae = fusion.load_vae(str(path))
    else:  # its widths stock has fixed
        with checkpoints.narrow.wan22_widths(comfy.ldm.wan.vae2_2, path):
            vae = fusion.load_vae(str(path))
    with pytest.raises(WrongFile, match=f"have {channels} channels") as caught:
        vae.decode(torch.randn(1, channels, 2, 4, 4))
    assert right in str(caught.value)


# ------------------------------------------------------------------------------------------------------ how many prompts


@pytest.mark.parametrize(
    ("cfg", "options", "conds", "one"),
    [
        (1.0, {}, {"positive": [1], "negative": [1]}, True),
        (1.0, {"disable_cfg1_optimization": True}, {"positive": [1], "negative": [1]}, False),
        (4.0, {}, {"positive": [1], "negative": [1]}, False),
        (4.0, {}, {"positive": [1]}, True),
        (1.0, {}, {"positive": [1, 2], "negative": [1]}, False),
    ],
)
def test_one_prompt_is_told_from_a_batch(
    cfg: float, options: dict[str, Any], conds: dict[str, list[Any]], one: bool
) -> None:
    guider = comfy.samplers.CFGGuider.__new__(comfy.samplers.CFGGuider)
    guider.cfg, guider.conds, guider.model_options = cfg, conds, options
    assert checks.is_one_prompt(guider) == one


def test_a_sampling_notes_it(scenes: dict[str, Scene], loaded: Callable[..., Any]) -> None:
    model = loaded("wan_t2v")
    for cfg, alone in ((1.0, True), (5.0, False)):
        ended = model.clone()
        ended.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "ends here", lambda _executor, noise, *_, **__: noise)
        sample_whole(ended, scenes["wan_t2v"], cfg=cfg)
        assert model.model.fusestream_reckoning.is_alone == alone
