"""The style nodes: which files they offer, when they load again, and the example that comes with the pack."""

from __future__ import annotations

import os

import folder_paths
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fusestream.checkpoints import style as made
from fusestream.checkpoints import trained
from fusestream.checkpoints.train import style as training
from fusestream.nodes.pictures import EXAMPLE, ApplyStyle, LoadStyleModel, listed

pytestmark = pytest.mark.usefixtures("one_thread")
FILE = trained.FOLDER / trained.STYLE


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setitem(
        folder_paths.folder_names_and_paths, "style_models", ([str(tmp_path)], {".safetensors", ".pth", ".bin"})
    )
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})
    save_file(made.decoder(), tmp_path / "decoder.safetensors")
    torch.save(made.vgg(), tmp_path / "vgg.pth")
    (tmp_path / "flux_redux.bin").write_bytes(b"")
    return tmp_path


def test_files_of_our_kinds_are_offered_and_the_example(folder):
    assert listed() == ["decoder.safetensors", "vgg.pth"]
    inputs = {item.id: item for item in LoadStyleModel.define_schema().inputs}
    assert inputs["style_name"].options == [EXAMPLE, "decoder.safetensors", "vgg.pth"]
    assert inputs["encoder_name"].options == ["none", "decoder.safetensors", "vgg.pth"]


def test_it_loads_again_when_a_file_was_replaced(folder):
    given = {"style_name": "decoder.safetensors", "encoder_name": "vgg.pth"}
    first = LoadStyleModel.fingerprint_inputs(**given)
    assert first == LoadStyleModel.fingerprint_inputs(**given, kernels="on")
    os.utime(folder / "vgg.pth", ns=(1, 1))
    assert LoadStyleModel.fingerprint_inputs(**given) != first
    assert LoadStyleModel.fingerprint_inputs(EXAMPLE) == ""


def test_a_look_from_a_picture(folder):
    [style] = LoadStyleModel.execute("decoder.safetensors", "vgg.pth").args
    image = torch.rand(2, 24, 32, 3)
    [got] = ApplyStyle.execute(style, image, 0.5, style_image=torch.rand(1, 20, 20, 3)).args
    assert got.shape == image.shape and not torch.equal(got, image)
    with pytest.raises(ValueError, match="connect one to style_image"):
        ApplyStyle.execute(style, image)


def test_the_example_draws_in_ink():
    """Nearer to the formula that it was trained to than the picture is; as the script's own words for a net compute it."""
    assert FILE.stat().st_size < 200_000
    with safe_open(FILE, "pt") as file:
        assert file.metadata()["made by"] == "FuseStream's checkpoints/train/style.py"
    torch.manual_seed(1)
    x = training.pictures(training.Random(1))
    [style] = LoadStyleModel.execute(EXAMPLE).args
    [got] = ApplyStyle.execute(style, x.movedim(1, -1)).args
    weights = {name: t.float() for name, t in load_file(FILE).items()}
    want = (made.transformed(x * 255, weights) / 255).clamp(0, 1)
    torch.testing.assert_close(got, want.movedim(1, -1), atol=2e-3, rtol=1e-3)
    wanted = training.ink(x)
    assert (want - wanted).abs().mean() < 0.6 * (x - wanted).abs().mean()


@pytest.mark.deep
def test_the_training_learns_and_leaves_a_file(tmp_path):
    torch.manual_seed(2)
    x = training.pictures(training.Random(2))
    before, after = (training.error(x, training.train(steps, 3, say=False)) for steps in (0, 12))
    assert after < 0.9 * before
    path = training.save(made.transformer(training.WIDTHS, training.BLOCKS), tmp_path)
    assert {name: t.shape for name, t in load_file(path).items()} == {
        name: t.shape for name, t in load_file(FILE).items()
    }
