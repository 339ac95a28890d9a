"""UMT5 as Wan's authors publish it, under other names and without the tokenizer: it encodes what ComfyUI's file does."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import comfy.sd
import comfy.text_encoders.wan
import pytest
import torch
from safetensors.torch import load_file, save_file

from fusestream import checkpoints, fusion
from fusestream.checkpoints import spiece
from fusestream.fusion.base.errors import NotStreamable, WrongFile
from fusestream.fusion.base.family import Role
from fusestream.fusion.families.t5 import original
from fusestream.fusion.patcher.streaming_patcher import StreamingModelPatcher
from fusestream.nodes import files

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")

PROMPT = "a red fox (runs:1.3) through the snow"


@pytest.fixture(scope="module")
def comfys(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file as ComfyUI has it, tokenizer included, in a folder of its own."""
    return str(checkpoints.write("umt5", tmp_path_factory.mktemp("comfyui"), "bf16"))


@pytest.fixture(scope="module")
def wanted(comfys: str) -> torch.Tensor:
    return encode(fusion.load_text_encoder(comfys, [], fusion.KernelPolicy.of("off")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, comfys: str) -> Path:
    path = tmp_path_factory.mktemp("original")
    tensors = checkpoints.spellings.umt5_original(load_file(comfys))
    assert len(tensors) == 242 and "blocks.0.ffn.gate.0.weight" in tensors
    save_file(tensors, path / "umt5-xxl-enc-bf16.safetensors")
    torch.save(tensors, path / "models_t5_umt5-xxl-enc-bf16.pth")
    return path


@pytest.fixture
def headed(folder: Path) -> str:
    return str(folder / "umt5-xxl-enc-bf16.safetensors")


@pytest.fixture
def pickled(folder: Path) -> str:
    return str(folder / "models_t5_umt5-xxl-enc-bf16.pth")


def encode(clip: Any) -> torch.Tensor:
    encoding: torch.Tensor = clip.encode_from_tokens(
        clip.tokenize(PROMPT, tokenizer_options={"umt5xxl_min_length": 24})
    )
    return encoding


def load(path: str, gib: float, *others: str, kernels: Any = "off") -> Any:
    return fusion.load_text_encoder(path, [], fusion.KernelPolicy.of(kernels), gib, others=others)


def test_the_names_mean_what_the_authors_compute(tmp_path: Path, comfys: str) -> None:
    """Their encoder in plain torch, on their names: the half of the feed-forward called `gate` goes through GELU."""
    source = checkpoints.write("umt5", Path(comfys).parent, "fp32")
    weights = checkpoints.spellings.umt5_original(load_file(source))
    save_file(weights, path := tmp_path / "umt5.safetensors")
    ids = torch.tensor([[5, 9, 2, 300, 41, 7, 1]])
    net = load(str(path), 0.0, comfys).cond_stage_model.umt5xxl.transformer
    ours, theirs = net(ids, torch.ones_like(ids))[0], as_published(weights, ids[0])
    assert torch.allclose(ours[0], theirs, rtol=1e-3, atol=1e-4) and theirs.std() > 0
    weights["blocks.3.ffn.gate.0.weight"], weights["blocks.3.ffn.fc1.weight"] = (
        weights["blocks.3.ffn.fc1.weight"],
        weights["blocks.3.ffn.gate.0.weight"],
    )
    assert not torch.allclose(ours[0], as_published(weights, ids[0]), rtol=1e-2, atol=1e-2)


def as_published(weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """ids [tokens] -> [tokens, width]"""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weights[name]

    steps = torch.arange(len(ids))
    away = (
        steps[None, :] - steps[:, None]
    )  # from a query to a key: the nearest eight steps in either direction count singly
    buckets = away.abs() + 16 * (away > 0)
    assert int(away.abs().max()) < 8
    x = weights["token_embedding.weight"][ids]
    for i in range(24):
        block = {
            name.removeprefix(f"blocks.{i}."): one for name, one in weights.items() if name.startswith(f"blocks.{i}.")
        }
        h = norm(x, f"blocks.{i}.norm1.weight")
        bias = block["pos_embedding.embedding.weight"][buckets].movedim(-1, 0)
        q, k, v = ((h @ block[f"attn.{part}.weight"].T).unflatten(-1, (len(bias), -1)).movedim(1, 0) for part in "qkv")
        mixed = (q @ k.mT + bias).softmax(-1) @ v
        x = x + mixed.movedim(0, 1).flatten(1) @ block["attn.o.weight"].T
        h = norm(x, f"blocks.{i}.norm2.weight")
        gate = torch.nn.functional.gelu(h @ block["ffn.gate.0.weight"].T, approximate="tanh")
        x = x + (gate * (h @ block["ffn.fc1.weight"].T)) @ block["ffn.fc2.weight"].T
    return norm(x, "norm.weight")


@pytest.mark.parametrize("gib", [0.0, 0.3, -1.0])
def test_it_encodes_what_stocks_file_does(
    headed: str, comfys: str, wanted: torch.Tensor, gib: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fusestream")
    clip = load(headed, gib, headed, comfys)
    assert isinstance(clip.patcher, StreamingModelPatcher) == (gib != 0.0)
    assert isinstance(clip.cond_stage_model, comfy.text_encoders.wan.WanT5Model)
    assert torch.equal(encode(clip), wanted) and wanted.std() > 0
    assert any(f"{headed} has no tokenizer inside: the one of {comfys} serves" in line for line in caplog.messages)
    factory, arguments = clip.patcher.cached_patcher_init
    again = factory(*arguments, disable_dynamic=True)
    assert type(again) is type(clip.patcher) and again.model is not clip.patcher.model


@pytest.mark.parametrize("gib", [0.0, -1.0])
def test_the_pth_is_loaded_by_stock(pickled: str, comfys: str, wanted: torch.Tensor, gib: float) -> None:
    clip = load(pickled, gib, pickled, comfys)
    assert isinstance(clip.cond_stage_model, comfy.text_encoders.wan.WanT5Model)
    assert not isinstance(clip.patcher, StreamingModelPatcher)
    assert torch.equal(encode(clip), wanted)
    factory, arguments = clip.patcher.cached_patcher_init
    assert factory(*arguments, disable_dynamic=True).model is not clip.patcher.model


def test_the_pth_does_not_stream(pickled: str, comfys: str) -> None:
    with pytest.raises(NotStreamable, match=r"only \.safetensors and \.gguf files can be streamed"):
        load(pickled, 0.3, comfys)


def test_it_is_fused_as_any_umt5(headed: str, comfys: str) -> None:
    for path, gib in ((headed, 0.0), (headed, 0.3)):
        encoder = load(path, gib, comfys, kernels="auto").cond_stage_model.umt5xxl.transformer.encoder
        assert encoder.fusestream_policy.default == "auto"


@pytest.mark.every_other
@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "fp8_scaled"])
@pytest.mark.parametrize("gib", [0.0, 0.3])
def test_fp8_files_made_from_it_load(tmp_path: Path, comfys: str, storage: str, gib: float) -> None:
    source = checkpoints.write("umt5", Path(comfys).parent, storage)
    path = str(tmp_path / "umt5-xxl-enc-fp8.safetensors")
    save_file(checkpoints.spellings.umt5_original(load_file(source)), path)
    assert torch.equal(encode(load(path, gib, comfys)), encode(load(str(source), 0.0)))


def test_notes_in_the_metadata_follow_the_names(tmp_path: Path, comfys: str) -> None:
    source = load_file(checkpoints.write("umt5", Path(comfys).parent, "fp8_comfy_quant"))
    layers = {name.removesuffix(".comfy_quant") for name in source if name.endswith(".comfy_quant")}
    theirs = {original.rename(name): name for name in checkpoints.spellings.umt5_original(source)}
    tensors = {theirs[name]: tensor for name, tensor in source.items() if name in theirs}
    notes = {}
    for layer in layers:
        name = theirs[f"{layer}.weight"].removesuffix(".weight")
        tensors[f"{name}.weight_scale"] = source[f"{layer}.weight_scale"]
        notes[name] = {"format": "float8_e4m3fn"}
    path = str(tmp_path / "noted.safetensors")
    save_file(tensors, path, metadata={"_quantization_metadata": json.dumps({"layers": notes})})
    expected = encode(load(str(checkpoints.write("umt5", Path(comfys).parent, "fp8_comfy_quant")), 0.0))
    for gib in (0.0, 0.3):
        assert torch.equal(encode(load(path, gib, comfys)), expected)


def test_without_a_tokenizer_it_says_what_to_get(headed: str, pickled: str) -> None:
    for gib in (0.0, 0.3, -1.0):
        for path in (headed, pickled) if gib <= 0 else (headed,):
            with pytest.raises(
                WrongFile, match=r"no tokenizer inside .*nothing else is missing\. Download spiece\.model"
            ) as it:
                load(path, gib, headed, pickled)
            assert str(it.value).startswith(path)
    with pytest.raises(WrongFile, match="Download spiece"):
        fusion.inspect_file(headed, Role.TEXT, [headed])


def test_the_tokenizer_beside_it_serves(tmp_path: Path, headed: str, wanted: torch.Tensor) -> None:
    path = tmp_path / "encoder.safetensors"
    shutil.copy(headed, path)
    for place in ("spiece.model", "google/umt5-xxl/spiece.model"):
        beside = tmp_path / place
        beside.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(spiece.spiece_model())
        fusion.inspect_file(str(path), Role.TEXT)
        assert torch.equal(encode(load(str(path), 0.0)), wanted)
        beside.unlink()
    (tmp_path / "spiece.model").write_bytes(b"\xff" * 99)
    with pytest.raises(WrongFile, match=r"spiece\.model: the tokenizer in it is damaged"):
        load(str(path), 0.3)


def test_the_node_looks_again_at_what_it_refused(tmp_path: Path, headed: str) -> None:
    """The file itself is what it was: what it lacked lies beside it now."""
    path = tmp_path / "encoder.safetensors"
    shutil.copy(headed, path)
    assert "Download spiece.model" in str(files.refused_by(files._look_at, str(path), "the same", Role.TEXT))
    (tmp_path / "spiece.model").write_bytes(spiece.spiece_model())
    assert files.refused_by(files._look_at, str(path), "the same", Role.TEXT) is None


def test_the_tokenizer_of_another_vocabulary_does_not_serve(tmp_path: Path, headed: str, comfys: str) -> None:
    tensors = load_file(comfys)
    tensors["shared.weight"] = tensors["shared.weight"][:-1].clone()
    save_file(tensors, other := tmp_path / "other.safetensors")
    (broken := tmp_path / "broken.safetensors").write_bytes(b"what")
    with pytest.raises(WrongFile, match=r"Download spiece\.model"):
        load(headed, 0.0, str(broken), str(other))
    assert encode(load(headed, 0.0, str(broken), str(other), comfys)).shape[0] == 1


def test_comfyuis_own_file_without_its_tokenizer_gets_it_too(tmp_path: Path, comfys: str, wanted: torch.Tensor) -> None:
    tensors = load_file(comfys)
    del tensors["spiece_model"]
    save_file(tensors, path := tmp_path / "bare.safetensors")
    for gib in (0.0, 0.3):
        assert torch.equal(encode(load(str(path), gib, comfys)), wanted)


def test_what_lacks_of_it_is_named_by_stocks_names(tmp_path: Path, headed: str, comfys: str) -> None:
    tensors = load_file(headed)
    gone = {name: tensor for name, tensor in tensors.items() if not name.startswith("blocks.5.")}
    save_file(gone, path := tmp_path / "gap.safetensors")
    torch.save(gone, pickled := tmp_path / "gap.pth")
    for one in (path, pickled):
        with pytest.raises(WrongFile, match=r"lacks encoder\.block\.5: its numbers go on to encoder\.block\.23"):
            load(str(one), 0.0, comfys)


def test_in_another_loader_it_is_told_where_it_belongs(headed: str) -> None:
    for refused in (fusion.load_diffusion_model, fusion.load_vae):
        with pytest.raises(WrongFile, match="FuseStream Text Encoder Loader"):
            refused(headed)


def test_another_models_pth_is_told_where_it_belongs(tmp_path: Path) -> None:
    torch.save(load_file(checkpoints.write("wan_vae", tmp_path)), path := tmp_path / "Wan2.1_VAE.pth")
    with pytest.raises(WrongFile, match=r"Wan2\.1_VAE\.pth is a Wan VAE: choose it in the FuseStream VAE Loader"):
        load(str(path), 0.0)
