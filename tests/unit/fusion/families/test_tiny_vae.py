"""What TAESD has of its own: how many bands there are, and its files."""

from __future__ import annotations

import asyncio

import folder_paths
import pytest
import torch
from safetensors.torch import save_file
from vae_scenes import KINDS as ALL
from vae_scenes import Files

import nodes
from fusestream import fusion
from fusestream.fusion.base.family import Role
from fusestream.fusion.families import family_of
from fusestream.fusion.families.image_vae import TINY_VAE, tiny
from fusestream.memory import Checkpoint
from fusestream.nodes import files
from fusestream.nodes.loaders import VAELoader

KINDS = {name: ALL[name].channels for name in ("taesd", "taef1", "taef2")}

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")


@pytest.fixture(scope="module")
def nets(tmp_path_factory):
    """Stock's module of each kind in fp32."""
    files = Files(tmp_path_factory.mktemp("nets"))
    return {kind: files.net(kind) for kind in KINDS}


def close(got, want):
    torch.testing.assert_close(got, want, atol=1e-4 * float(want.abs().max()), rtol=1e-4)


def test_less_room_makes_more_bands(nets):
    counts = [tiny.count_for(nets["taesd"], True, 256, 256, 2, room << 20) for room in (4096, 1024, 512, 256, 1)]
    assert counts == sorted(counts)
    assert counts[0] == 1 < counts[1] < counts[2] < counts[3]
    assert counts[4] == 256
    assert tiny.most(nets["taesd"], True, 256, 256, 2, counts[2]) <= 512 << 20


# ---------------------------------------------------------------------------------------------------- as ComfyUI's VAE


@pytest.fixture(scope="module")
def path(nets, tmp_path_factory):
    path = tmp_path_factory.mktemp("vae") / "taesd.safetensors"
    save_file({name: t.contiguous() for name, t in nets["taesd"].state_dict().items()}, path)
    return str(path)


def test_files_are_known_and_may_lack_the_scale(nets, path, tmp_path):
    with Checkpoint.open(path) as source:
        assert family_of(source.files[0]) is TINY_VAE
    bare = {name: t.contiguous() for name, t in nets["taef1"].state_dict().items() if "vae_" not in name}
    save_file(bare, tmp_path / "bare.safetensors")
    fusion.load_vae(str(tmp_path / "bare.safetensors"))
    del bare["taesd_decoder.3.conv.2.weight"]
    save_file(bare, tmp_path / "cut.safetensors")
    with pytest.raises(fusion.WrongFile, match=r"taesd_decoder\.3\.conv\.2\.weight"):
        fusion.load_vae(str(tmp_path / "cut.safetensors"))


@pytest.fixture
def in_parts(nets, tmp_path, monkeypatch):
    """The folder where stock has them, with both halves of two and one of a third."""
    for kind in ("taesd", "taef2"):
        for half in files.HALVES:
            weights = getattr(nets[kind], f"taesd_{half}").state_dict()
            save_file({name: t.contiguous() for name, t in weights.items()}, tmp_path / f"{kind}_{half}.safetensors")
    (tmp_path / "taef1_decoder.safetensors").touch()
    known = {files.HALVES_FOLDER: ([str(tmp_path)], folder_paths.supported_pt_extensions)}
    monkeypatch.setattr(folder_paths, "folder_names_and_paths", {**folder_paths.folder_names_and_paths, **known})
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})
    return tmp_path


@pytest.mark.parametrize("kind", ["taesd", "taef2"])
def test_the_loader_takes_them_by_stocks_names(in_parts, kind):
    assert [name for name in files.listed(Role.VAE) if name in KINDS] == ["taesd", "taef2"]
    assert asyncio.run(VAELoader.validate_inputs(vae_name=kind)) is True
    mine, stock = VAELoader.execute(kind).result[0], nodes.VAELoader().load_vae(kind)[0]
    assert isinstance(mine.first_stage_model, tiny.FusedTiny)
    z = torch.randn(1, KINDS[kind], 4, 6)
    want = stock.first_stage_model.decode(z.to(stock.vae_dtype))
    close(mine.first_stage_model.decode(z.to(mine.vae_dtype)), want)


def test_another_half_is_another_fingerprint(in_parts):
    before = VAELoader.fingerprint_inputs(vae_name="taesd")
    assert before and before != VAELoader.fingerprint_inputs(vae_name="taef2")
    (in_parts / "taesd_decoder.safetensors").touch()
    assert VAELoader.fingerprint_inputs(vae_name="taesd") != before
    (in_parts / "taesd_encoder.safetensors").unlink()
    folder_paths.filename_list_cache.clear()
    assert VAELoader.fingerprint_inputs(vae_name="taesd") == ""
    assert "not in models/vae" in asyncio.run(VAELoader.validate_inputs(vae_name="taesd"))
