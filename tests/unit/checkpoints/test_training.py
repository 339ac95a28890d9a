"""The stages of training, at sizes for a CPU: they learn, go on from a state, and leave what stock
takes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file

from fusestream.checkpoints import spellings, toys, trained, vaes, wan
from fusestream.checkpoints.text import Umt5Size, umt5
from fusestream.checkpoints.toys import words
from fusestream.checkpoints.train import __main__ as stages
from fusestream.checkpoints.train import model_stage, text, vae, vae_stage
from fusestream.checkpoints.train.optimise import Training
from fusestream.checkpoints.train.tensors import Tensors

SMALL = model_stage.ModelSize(
    wan.WanSize(dim=128, ffn=64, layers=1, text=16),
    Umt5Size(width=16, heads=2, head_width=8, ffn=16, layers=1, vocabulary=words.size()),
    (model_stage.Pool(toys.Frame(32, 32, 5), films=6, batch=3, share=1.0),),
)


def lines(_: str) -> None:
    pass


class Line:
    """A task of its own: a point through which a line shall go."""

    def draw(self) -> None:
        self.x = torch.randn(8, 3)

    def loss(self, weights: Tensors) -> torch.Tensor:
        off = self.x @ weights["matrix"] - self.x.sum(1, keepdim=True)
        return torch.stack([off.square().mean(), off.abs().mean()])


def training(seconds: float = 3.0) -> Training:
    torch.manual_seed(0)
    return Training({"matrix": torch.zeros(3, 1)}, seconds, peak=0.05, memory=0.9)


def test_a_training_learns_and_leaves_its_curve() -> None:
    one, task = training(), Line()
    for i in range(300):
        one.step(task, i / 300)
    assert (one.weights["matrix"] - 1).abs().max() < 0.05 and (one.average["matrix"] - 1).abs().max() < 0.05
    values = one._mean()
    assert len(values) == 3 and values[0] > 0, "the losses and the gradients' norm"


def test_a_training_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Through its state, step for step as if it had not stopped; moments are kept in bf16."""
    whole, task = training(), Line()
    for i in range(20):
        whole.step(task, i / 100)
    whole.used = 7.5
    whole.save(tmp_path)
    other = training()
    other.resume(tmp_path)
    assert (other.steps, other.used, other.curve) == (20, 7.5, whole.curve)
    torch.testing.assert_close(other.weights, whole.weights, rtol=0, atol=0)
    for one in (whole, other):
        torch.manual_seed(3)
        for i in range(20):
            one.step(task, 0.2 + i / 100)
    torch.testing.assert_close(other.weights, whole.weights, rtol=0.02, atol=1e-3)


def test_windows_lie_in_the_frame_and_on_toys() -> None:
    rng = Random(1)
    shots = [toys.stage(toys.draw_scene(rng), rng) for _ in range(24)]
    view = vae_stage.windows(shots, vae_stage.WINDOW, rng, "cpu")
    for axis in (view.xs, view.ys):
        assert axis.shape == (24, 64) and axis.min() > -0.5 and axis.max() < 0.5
    assert view.ts.min() >= 0 and view.ts.max() <= 1
    films = toys.film(shots, view)
    coloured = ((films.amax(-1) - films.amin(-1)) > 0.3).float().mean((1, 2, 3, 4)[:3])
    assert (coloured > 0.02).float().mean() > 0.7


def test_the_vaes_loss_sees_colour() -> None:
    """Of two films that are equally far off, the one that lost its colours is worse."""
    films = vae_stage.Films(Copy, 2, None, Random(2), "cpu")
    films.draw()
    grey = films.x.mean(-1, keepdim=True).expand_as(films.x)
    off = float((grey - films.x).abs().mean())
    tinted = films.loss({"y": grey})
    dimmed = films.loss({"y": films.x + off})
    torch.testing.assert_close(tinted[1], dimmed[1], rtol=1e-3, atol=1e-4)
    assert tinted[0] > 2 * dimmed[0]


class Copy(vae.Vae):
    """Gives back what it was told."""

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = torch.zeros(len(x), 5, 16, 16, 16)
        return z, z

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.weights["y"]


def test_latents_get_the_spread_that_stock_takes_away() -> None:
    weights = vae.new(4, 3, "cpu")
    rng = Random(4)
    means, spreads = vae_stage.statistics(weights, 4, rng, "cpu")
    changed = vae_stage.as_stock_expects(weights, means, spreads)
    film = toys.film([toys.stage(toys.draw_scene(rng), rng)], toys.Frame(64, 64, 9))
    with torch.no_grad():
        z, _ = vae.Vae(weights).encode(film)
        z_changed, _ = vae.Vae(changed).encode(film)
        expected = (z - means) / spreads * torch.tensor(vaes.LATENT_SPREADS) + torch.tensor(vaes.LATENT_MEANS)
        torch.testing.assert_close(z_changed, expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(vae.Vae(changed).decode(z_changed), vae.Vae(weights).decode(z), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(model_stage.as_decoded(model_stage.as_seen(z)), z, rtol=1e-4, atol=1e-4)


def test_the_models_loss_falls() -> None:
    """On a pool of six films; captions, dropped prompts and noise as in earnest."""
    size = SMALL
    one, choose = model_stage.train(size, vae.Vae(vae.new(4, 5, "cpu")), 100.0, 6, "cpu", lines)
    for _ in range(20):
        one.step(choose(0.0), 0.0)
    first = one._mean()
    for _ in range(40):
        one.step(choose(0.0), 0.0)
    assert one._mean()[0] < first[0]


def test_some_prompts_say_nothing_and_some_words_mean_nothing() -> None:
    rng = Random(7)
    scenes = [toys.draw_scene(rng) for _ in range(200)]
    said = [model_stage.sayings(scene, rng) for scene in scenes]
    assert {len(ids) for ways in said for ids in ways} == {words.LONGEST}
    known = {*(toys.tokens(" ".join(words.WORDS) + ",")), words.PAD}
    babbling = sum(not set(ways[-1]) <= known for ways in said)
    assert 15 < babbling < 80 and all(set(ids) <= known for ways in said for ids in ways[:-1])
    latents = model_stage.Latents(
        model_stage.Pool(toys.Frame(32, 32, 5), 4, 400, 1.0), torch.randn(4, 2, 4, 4, 16).half(),
        torch.tensor(said[:4], dtype=torch.int16), None, 8,
    )  # fmt: skip
    latents.draw()
    dropped = sum(tuple(ids) not in {tuple(ids) for ways in said[:4] for ids in ways} for ids in latents.ids.tolist())
    assert 15 < dropped < 75
    assert text.alive(latents.ids).sum(1).min() >= 1 and not text.alive(latents.ids)[:, -1].any()
    assert latents.time.min() > 0 and latents.time.max() < 1 and latents.time.median() > 0.7, (
        "much noise, most of the time"
    )


@pytest.mark.deep
def test_the_commands_leave_what_stock_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stages from the command line, stopped and gone on with; the files have stock's names,
    the log what was seen.
    """
    monkeypatch.setattr(model_stage, "SIZES", {"small": SMALL})
    for name, size in {"WHOLE_SIZE": 64, "WINDOW": 32, "FRAMES": 5}.items():
        monkeypatch.setattr(vae_stage, name, size)
    for arguments in (
        ["vae", "--width", "4", "--seconds", "1000", "--stop", "0.01"],
        ["vae", "--width", "4", "--seconds", "0.01", "--resume", str(tmp_path / "vae-state")],
        ["model", "--seconds", "0.01"],
    ):
        tried = ["--batch", "1", "--films", "4", "--examined", "2", "--device", "cpu", "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["train", *arguments, *tried])
        stages.main()
        assert (tmp_path / trained.VAE).exists() == ("--stop" not in arguments)
    log = json.loads((tmp_path / trained.LOG).read_text(encoding="utf-8"))
    assert all(len(point) == len(one["columns"]) for one in log.values() for point in one["curve"])
    assert log["vae"]["curve"] and log["model"]["curve"] and "psnr" in log["vae"]["seen"]
    assert log["model"]["seen"]["held back"].keys() >= {"colour and direction", "shape"}
    model, reader = load_file(tmp_path / trained.MODEL), load_file(tmp_path / trained.TEXT)
    assert model.keys() == wan.table(SMALL.transformer).keys()
    assert reader.keys() == umt5(SMALL.encoder).keys() | spellings.umt5_mark().keys() | {"spiece_model"}
    assert bytes(reader["spiece_model"].numpy()) == toys.tokenizer()
    assert all(tensor.dtype in (torch.float16, torch.uint8) for tensor in (model | reader).values())
