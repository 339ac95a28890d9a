"""The loaders against stock: the same objects from sound files, an error that helps from every other."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comfy.ldm.wan.vae2_2
import comfy.sd
import comfy.utils
import pytest
import torch
from files_in_use import kept_from_others
from safetensors.torch import load_file, save_file

from fusestream import checkpoints, fusion
from fusestream.fusion.base.errors import WrongFile
from fusestream.fusion.families import family_of
from fusestream.fusion.families.t5 import umt5
from fusestream.fusion.families.wan import WAN as WAN_FAMILY
from fusestream.fusion.identify.checkpoint_info import elsewhere, header_of
from fusestream.memory import BadFile, Extent, WeightFile, read_header

CASES = [(kind, storage) for kind, entry in checkpoints.KINDS.items() for storage in entry.storages]
WAN = [case for case in CASES if checkpoints.KINDS[case[0]].family == "wan"]
VAE = [case for case in CASES if checkpoints.KINDS[case[0]].folder == "vae"]
UMT5 = [case for case in CASES if case[0] == "umt5"]
LOADERS: dict[str, Callable[[str], Any]] = {
    "diffusion_models": fusion.load_diffusion_model,
    "text_encoders": lambda path: fusion.load_text_encoder(path, []),
    "vae": fusion.load_vae,
}
# Of a whole checkpoint each loader takes its part.
BELONGS = {
    "diffusion_models": "FuseStream Diffusion Model Loader",
    "text_encoders": "FuseStream Text Encoder Loader",
    "vae": "FuseStream VAE Loader",
    "loras": "Load LoRA",
    "clip_vision": "Load CLIP Vision",
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@contextlib.contextmanager
def widths_of(path: str) -> Iterator[None]:
    """Stock fixes some widths, of the Wan 2.2 VAE for one; lend it those of a tiny file."""
    with contextlib.ExitStack() as open_:
        if "wan22_vae" in path:
            open_.enter_context(checkpoints.narrow.wan22_widths(comfy.ldm.wan.vae2_2, Path(path)))
        open_.enter_context(checkpoints.narrow.opened(comfy))
        yield


def assert_same_weights(ours: torch.nn.Module, stock: torch.nn.Module) -> None:
    a, b = ours.state_dict(), stock.state_dict()
    assert type(ours).__qualname__ == type(stock).__qualname__ and a.keys() == b.keys()
    for name, value in a.items():
        assert value.dtype == b[name].dtype, name
        assert torch.equal(
            value.view(torch.uint8) if value.ndim else value, b[name].view(torch.uint8) if value.ndim else b[name]
        )


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "storage"), WAN)
def test_diffusion_model_is_what_stock_loads(folder: Path, kind: str, storage: str) -> None:
    path = str(checkpoints.write(kind, folder, storage))
    with widths_of(path):
        ours, stock = fusion.load_diffusion_model(path), comfy.sd.load_diffusion_model(path)
    assert type(ours) is type(stock) and type(ours.model) is type(stock.model)
    assert_same_weights(ours.model.diffusion_model, stock.model.diffusion_model)
    assert ours.cached_patcher_init[1][0] == path


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "storage"), VAE)
def test_vae_is_what_stock_loads(folder: Path, kind: str, storage: str) -> None:
    path = str(checkpoints.write(kind, folder, storage))
    with widths_of(path):
        ours, stock = fusion.load_vae(path), comfy.sd.VAE(sd=comfy.utils.load_torch_file(path))
        clone = ours.patcher.cached_patcher_init[0](*ours.patcher.cached_patcher_init[1])
    assert_same_weights(ours.first_stage_model, stock.first_stage_model)
    assert ours.latent_channels == stock.latent_channels
    assert_same_weights(clone.model, stock.first_stage_model)


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "storage"), UMT5)
def test_text_encoder_is_what_stock_loads(folder: Path, kind: str, storage: str) -> None:
    path = str(checkpoints.write(kind, folder, storage))
    options = {"umt5xxl_model_config": umt5.config(read_header(path))}
    stock = comfy.sd.load_clip([path], clip_type=comfy.sd.CLIPType.WAN, model_options=options)
    ours = fusion.load_text_encoder(path, [])
    assert_same_weights(ours.cond_stage_model, stock.cond_stage_model)
    text = "a fox in the snow"
    assert ours.tokenize(text) == stock.tokenize(text)
    short = {"umt5xxl_min_length": 24}  # where it is filled up to 512
    a, b = (clip.encode_from_tokens(clip.tokenize(text, tokenizer_options=short)) for clip in (ours, stock))
    assert torch.equal(a, b) and a.std() > 0


def test_the_published_umt5_is_configured_as_stock_has_it() -> None:
    published = json.loads((Path(comfy.sd.__file__).parent / "text_encoders" / "umt5_config_xxl.json").read_text())
    block = "encoder.block.{}.layer.{}"
    shapes = {"shared.weight": (256384, 4096), "spiece_model": (4548313,)}
    for i in range(24):
        attention, feed = block.format(i, 0) + ".SelfAttention", block.format(i, 1) + ".DenseReluDense"
        shapes |= {f"{attention}.{name}.weight": (4096, 4096) for name in "qkvo"}
        shapes |= {f"{attention}.relative_attention_bias.weight": (32, 64), f"{feed}.wi_0.weight": (10240, 4096)}
    header = WeightFile(Path("x"), 0, {name: Extent(name, "F16", shape, 0, 0) for name, shape in shapes.items()}, {})
    ours = umt5.config(header)
    assert ours == {key: published[key] for key in ours}
    read_by_stock = {"d_ff", "d_kv", "d_model", "num_heads", "num_layers", "vocab_size"}
    assert read_by_stock <= ours.keys()


@pytest.mark.parametrize("kind", [kind for kind, entry in checkpoints.KINDS.items() if entry.folder in BELONGS])
@pytest.mark.parametrize("loader", LOADERS)
def test_a_file_in_the_wrong_loader_is_told_where_it_belongs(folder: Path, kind: str, loader: str) -> None:
    entry = checkpoints.KINDS[kind]
    if entry.folder == loader:
        pytest.skip("the right loader")
    path = checkpoints.write(kind, folder, next(iter(entry.storages)))
    with pytest.raises(WrongFile) as caught:
        LOADERS[loader](str(path))
    assert str(path) in str(caught.value) and BELONGS[entry.folder] in str(caught.value)


def test_a_text_encoder_without_its_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    weights = load_file(checkpoints.write("umt5", folder))
    del weights["spiece_model"]
    save_file(weights, tmp_path / "bare.safetensors")
    with pytest.raises(WrongFile, match="has no tokenizer inside"):
        fusion.load_text_encoder(str(tmp_path / "bare.safetensors"), [])


@pytest.mark.parametrize("loader", LOADERS)
def test_a_cut_file_is_refused_before_anything_is_loaded(folder: Path, tmp_path: Path, loader: str) -> None:
    kind = next(name for name, entry in checkpoints.KINDS.items() if entry.folder == loader)
    source = checkpoints.write(kind, folder, next(iter(checkpoints.KINDS[kind].storages)))
    path = tmp_path / "cut.safetensors"
    path.write_bytes(source.read_bytes()[:-1])
    with pytest.raises(BadFile, match=r"cut\.safetensors: is cut short"):
        LOADERS[loader](str(path))


def test_an_unknown_model_is_left_to_stock(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"what.weight": torch.ones(2)}, path)
    with pytest.raises(RuntimeError, match="Could not detect model type"):
        fusion.load_diffusion_model(str(path))
    with pytest.raises(WrongFile, match=r"is no text encoder that ComfyUI knows"):
        fusion.load_text_encoder(str(path), [])
    with pytest.raises(RuntimeError, match="VAE is invalid"):
        fusion.load_vae(str(path))


def test_a_pickled_vae_is_left_to_stock(folder: Path, tmp_path: Path) -> None:
    source = checkpoints.write("wan_vae", folder)
    torch.save(load_file(source), tmp_path / "vae.pth")
    vae = fusion.load_vae(str(tmp_path / "vae.pth"))
    assert_same_weights(vae.first_stage_model, fusion.load_vae(str(source)).first_stage_model)


@pytest.mark.parametrize("kind", ["clip_l", "wan_t2v", "lora_ab"])
def test_a_pickled_file_that_is_no_vae_is_told_where_it_belongs(folder: Path, tmp_path: Path, kind: str) -> None:
    """As one with a header; stock says that a checkpoint contains no VAE."""
    path = tmp_path / "other.pth"
    torch.save(load_file(checkpoints.write(kind, folder)), path)
    with pytest.raises(WrongFile, match=rf"other\.pth is a .*{BELONGS[checkpoints.KINDS[kind].folder]}"):
        fusion.load_vae(str(path))


def test_a_whole_checkpoint_gives_its_diffusion_model(folder: Path, tmp_path: Path) -> None:
    source = checkpoints.write("wan_t2v", folder)
    weights = {f"model.diffusion_model.{name}": weight for name, weight in load_file(source).items()}
    path = tmp_path / "whole.safetensors"
    save_file(weights, path, metadata=dict(read_header(source).metadata))
    ours = fusion.load_diffusion_model(str(path))
    assert_same_weights(ours.model.diffusion_model, fusion.load_diffusion_model(str(source)).model.diffusion_model)


def test_names_alone_tell_the_kind() -> None:
    none = torch.empty(0)
    assert family_of(header_of({})) is None and elsewhere([]) is None
    assert family_of(header_of({"head.modulation": none, "blocks.0.self_attn.q.weight": none})) is WAN_FAMILY
    place = elsewhere(["blocks.0.self_attn.q.lora_A.weight", "blocks.0.self_attn.q.lora_B.weight"])
    assert place is not None and "LoRA" in place[0] and place[1] == "loras"


def test_an_unreadable_file_is_named(folder: Path, tmp_path: Path) -> None:
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        pytest.skip("root reads everything")
    path = tmp_path / "locked.safetensors"
    path.write_bytes(checkpoints.write("wan_vae", folder).read_bytes())
    with kept_from_others(path), pytest.raises(BadFile, match="cannot be read"):
        fusion.load_vae(str(path))
