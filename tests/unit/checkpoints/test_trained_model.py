"""The trained small model: stock loads its files as its own, and what it makes of a prompt shows
what the prompt says, on stock's loaders and on ours.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import comfy.latent_formats
import comfy.model_sampling
import comfy.sample
import comfy.sd
import comfy.utils
import pytest
import sentencepiece
import torch

from bed.depth import is_thorough
from fusestream import fusion
from fusestream.checkpoints import model_options, spellings, toys, trained, vaes
from fusestream.checkpoints.toys import words
from fusestream.memory import read_header

pytestmark = pytest.mark.usefixtures("as_comfyui_runs")

MODEL, TEXT, VAE = trained.files()
STEPS, GUIDANCE, SHIFT = 10, 2.5, 5.0
# Held back from training; and two of two toys.
SCENES = [
    *toys.held_back_scenes()[:: 5 if is_thorough() else 60],
    toys.Scene((toys.Toy("red", "ball", "left"), toys.Toy("blue", "box", None)), "striped", toys.Relation.BEHIND),
    toys.Scene((toys.Toy("green", "triangle", "right"), toys.Toy("yellow", "ball", "up")), "white", toys.Relation.AND),
]


def stocks_text_encoder() -> Any:
    options = model_options(TEXT)
    return comfy.sd.load_clip([str(TEXT)], clip_type=comfy.sd.CLIPType.WAN, model_options=options)


def stocks_vae() -> Any:
    return comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(VAE)))


def films(model: Any, clip: Any, vae: Any, scenes: Sequence[toys.Scene], seed: int) -> torch.Tensor:
    """What a workflow makes of the scenes' captions, all in one batch: fp32 [n, 17, 128, 128, 3] in
    [-1, 1].
    """

    class Sampling(comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.CONST):  # type: ignore[misc]
        """What the node ModelSamplingSD3 makes."""

    sampling = Sampling(model.model.model_config)
    sampling.set_parameters(shift=SHIFT, multiplier=1000)
    model = model.clone()
    model.add_object_patch("model_sampling", sampling)
    said = torch.cat([clip.encode_from_tokens(clip.tokenize(toys.caption(scene))) for scene in scenes])
    unsaid = clip.encode_from_tokens(clip.tokenize("")).expand_as(said)
    empty = torch.zeros(len(scenes), 16, 5, 16, 16)
    noise = comfy.sample.prepare_noise(empty, seed)
    given = ([[said, {}]], [[unsaid, {}]], empty)
    z = comfy.sample.sample(model, noise, STEPS, GUIDANCE, "euler", "simple", *given, seed=seed, disable_pbar=True)
    return torch.cat([vae.decode(one[None]).reshape(1, 17, 128, 128, 3) for one in z]) * 2 - 1


def test_the_files_are_small() -> None:
    assert sum(path.stat().st_size for path in trained.files()) <= 14_000_000


def test_stock_finds_all_it_wants_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    net = comfy.sd.load_diffusion_model(str(MODEL)).model.diffusion_model
    vae, clip = stocks_vae(), stocks_text_encoder()
    vae.throw_exception_if_invalid()
    assert (type(net).__name__, net.dim, net.num_heads, net.ffn_dim, len(net.blocks)) == ("WanModel", 256, 2, 512, 5)
    assert clip.cond_stage_model.umt5xxl.transformer.shared.weight.shape == (words.size(), 64)
    wrong = [
        record.message for record in caplog.records if "missing" in record.message or "unexpected" in record.message
    ]
    mark = next(iter(spellings.umt5_mark()))
    assert all(mark in message for message in wrong), wrong


def test_the_text_encoder_carries_the_toy_worlds_words() -> None:
    """Another release of sentencepiece may order the letters otherwise; words, bytes and their
    numbers are the same.
    """
    spiece = bytes(comfy.utils.load_torch_file(str(TEXT))["spiece_model"].numpy())
    inside, ours = (sentencepiece.SentencePieceProcessor(model_proto=one) for one in (spiece, toys.tokenizer()))
    fixed = 3 + len(words.WORDS) + 1 + words.BYTES
    assert [inside.id_to_piece(i) for i in range(fixed)] == [ours.id_to_piece(i) for i in range(fixed)]
    assert inside.get_piece_size() == ours.get_piece_size() and b"/" not in spiece.split(b"folding.tsv")[0][-40:]


@pytest.mark.deep
def test_latents_have_the_spread_that_stock_expects() -> None:
    form = comfy.latent_formats.Wan21()
    torch.testing.assert_close(form.latents_mean.flatten(), torch.tensor(vaes.LATENT_MEANS), rtol=1e-6, atol=0)
    torch.testing.assert_close(form.latents_std.flatten(), torch.tensor(vaes.LATENT_SPREADS), rtol=1e-6, atol=0)
    rng = Random(1)
    film = toys.film([toys.stage(toys.draw_scene(rng), rng) for _ in range(3)], toys.Frame(128, 128, 17))
    vae = stocks_vae()
    z = torch.cat([form.process_in(vae.encode(one / 2 + 0.5)) for one in film])
    assert z.mean().abs() < 0.3 and 0.8 < z.std() < 1.2, "of a few films"


@pytest.mark.deep
@pytest.mark.parametrize("whose", ["stock", "ours"])
def test_the_vae_keeps_colours_shapes_and_ways(whose: str) -> None:
    vae = stocks_vae() if whose == "stock" else fusion.load_vae(str(VAE))
    rng = Random(2)
    for _ in range(2):
        scene = toys.draw_scene(rng, held_back=True)
        film = toys.film([toys.stage(scene, rng)], toys.Frame(128, 128, 17))
        back = vae.decode(vae.encode(film[0] / 2 + 0.5)).reshape(film.shape[1:]) * 2 - 1
        assert toys.judge(back, scene) == toys.Verdict(True, True, True, True), scene
        assert (back - film[0]).square().mean() < 4 * 10**-2.9, "29 dB"


@pytest.mark.skipif(not is_thorough(), reason="twenty seconds of sampling: --thorough; the demo makes one in any run")
def test_a_video_shows_what_its_prompt_says() -> None:
    """On stock's loaders and on ours, ours streaming too; and both show the same."""
    made = {
        "stock": films(comfy.sd.load_diffusion_model(str(MODEL)), stocks_text_encoder(), stocks_vae(), SCENES, seed=1),
        "ours": films(
            fusion.load_diffusion_model(str(MODEL), vram_budget=0.008),
            fusion.load_text_encoder(str(TEXT), [], vram_budget=-1.0),
            fusion.load_vae(str(VAE)),
            SCENES,
            seed=1,
        ),
    }
    right = {
        whose: [toys.judge(film, scene) for film, scene in zip(shown, SCENES, strict=True)]
        for whose, shown in made.items()
    }
    for whose, verdicts in right.items():
        assert sum(verdict.moves_right for verdict in verdicts) >= len(SCENES) - 1, (whose, verdicts)
        assert sum(verdict.shape for verdict in verdicts) >= len(SCENES) - 2, (whose, verdicts)
    assert right["ours"] == right["stock"]
    assert (made["ours"] - made["stock"]).square().mean() < 4 * 10**-3.5, "35 dB"


@pytest.mark.deep
def test_another_prompt_is_another_video() -> None:
    """The check can fail: a video judged by a scene that was not asked for."""
    scene, other = SCENES[0], SCENES[2]
    model, clip, vae = comfy.sd.load_diffusion_model(str(MODEL)), stocks_text_encoder(), stocks_vae()
    (film,) = films(model, clip, vae, [other], seed=2)
    assert toys.judge(film, other).moves_right and not toys.judge(film, scene).moves_right


def test_our_loader_takes_the_small_text_encoder_whole() -> None:
    """Stock's mark of an XXL is no block; but a block of which only some is there is refused as
    ever.
    """
    assert len(fusion.load_text_encoder(str(TEXT), []).patcher.model.umt5xxl.transformer.encoder.block) == 3
    names = read_header(Path(TEXT)).extents
    assert [name for name in names if name.startswith("encoder.block.23.")] == list(spellings.umt5_mark())
