"""Qwen2.5 and Qwen3 out of llama.cpp's GGUF files: they encode what the file of their dequantised weights encodes."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import comfy.sd
import comfy.text_encoders.flux
import gguf
import gguf_files
import pytest
import torch
from packed_files import packed_file, unpacked
from safetensors.torch import save_file

from fusestream import checkpoints, fusion
from fusestream.checkpoints.text import QWEN3, LlamaSize
from fusestream.checkpoints.weights import Table
from fusestream.fusion.base.errors import WrongFile
from fusestream.fusion.base.family import Role
from fusestream.fusion.files import llama_cpp
from fusestream.fusion.load.text import load_streamed_text_encoder
from fusestream.kernels_cuda import LEDGER
from fusestream.memory import read_header

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")

T = comfy.sd.CLIPType
OFF = fusion.KernelPolicy.of("off")
IDS = (5, 7, 9, 200, 7)


@dataclass(frozen=True)
class Model:
    """
    architecture  llama.cpp's name
    name          stock's name, by which its options and prompts go
    kind          a type that it serves
    """

    architecture: str
    name: str
    kind: str
    size: LlamaSize

    def table(self) -> Table:
        """Every tensor, by stock's names."""
        return checkpoints.text.llama(self.size)

    def options(self) -> dict[str, Any]:
        size, more = self.size, {}
        if self.kind == "flux2":  # which takes layers that these small ones do not have
            more["qwen3_8b_class"] = partial(comfy.text_encoders.flux.Qwen3_8BModel, layer=[1, 2, 3])
        return {
            **more,
            f"{self.name}_model_config": {
                "vocab_size": size.vocabulary, "hidden_size": size.width, "intermediate_size": size.ffn,
                "num_hidden_layers": size.layers, "num_attention_heads": size.heads, "num_key_value_heads": size.key_heads,
            }
        }  # fmt: skip


QWEN25_3B = LlamaSize(256, 64, 4, 2, 128, 4, 256, qk_norm=False, biased=True)
QWEN25_7B = replace(QWEN25_3B, key_heads=4, own_words=True)
# Stock tells Qwen3 by the width, and Qwen2.5 by the number of its keys.
MODELS = {
    "Qwen3 0.6B": Model("qwen3", "qwen3_06b", "stable_diffusion", replace(QWEN3, width=1024)),
    "Qwen3 1.7B": Model("qwen3", "qwen3_2b", "ovis", replace(QWEN3, width=2048)),
    "Qwen3 4B": Model("qwen3", "qwen3_4b", "lumina2", QWEN3),
    "Qwen3 8B": Model("qwen3", "qwen3_8b", "flux2", replace(QWEN3, width=4096, own_words=True)),
    "Qwen2.5-VL 3B": Model("qwen2vl", "qwen25_3b", "omnigen2", QWEN25_3B),
    "Qwen2.5-VL 7B": Model("qwen2vl", "qwen25_7b", "qwen_image", QWEN25_7B),
    "Qwen2.5 7B": Model("qwen2", "qwen25_7b", "longcat_image", QWEN25_7B),
}


def tensors(model: Model) -> dict[str, torch.Tensor]:
    return {
        name: torch.randn(spec.shape, generator=torch.Generator().manual_seed(i)) * spec.std + spec.mean
        for i, (name, spec) in enumerate(model.table().items())
    }


def llama_cpps(model: Model) -> dict[str, str]:
    """The names that the converter gives, by stock's, which are transformers'."""
    architecture = {name: one for one, name in gguf.MODEL_ARCH_NAMES.items()}[model.architecture]
    known = gguf.get_tensor_name_map(architecture, model.size.layers)
    found = {name: known.get_name(name, try_suffixes=(".weight", ".bias")) for name in model.table()}
    assert all(found.values()), found
    return {name: str(theirs) for name, theirs in found.items()}


def encode(clip: Any, model: Model) -> torch.Tensor:
    tokens = [[(token, 1.0) for token in IDS]]
    encoding: torch.Tensor = clip.encode_from_tokens(
        {model.name: tokens, "t5xxl": tokens}
    )  # Anima has ids of T5's as well
    return encoding


@pytest.mark.parametrize("name", MODELS)
def test_names_are_stocks(tmp_path: Path, name: str) -> None:
    """Every tensor, there and back."""
    names = llama_cpps(MODELS[name])
    found = [gguf_files.Tensor(theirs, "F16", (4,)) for theirs in names.values()]
    values = {llama_cpp.ARCHITECTURE: MODELS[name].architecture}
    rename = llama_cpp.renaming(read_header(gguf_files.file_of(tmp_path / "x.gguf", values, found)))
    assert rename is not None and [rename(theirs) for theirs in names.values()] == list(names)
    assert rename("blk.0.other.weight") == "blk.0.other.weight" and rename("x") == "x"


@pytest.mark.every_other
@pytest.mark.deep("Qwen3 1.7B*", "Qwen3 8B*", "Qwen2.5 7B*", "Qwen2.5-VL 3B*")
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "Q8_0") for name in MODELS), ("Qwen3 4B", "Q4_K"), ("Qwen2.5-VL 7B", "Q4_0")]
)
def test_it_encodes_as_its_dequantised_file(tmp_path: Path, name: str, kind: str) -> None:
    """Stock's class, found by stock's detection; and the same numbers under stock's names are the same model."""
    model = MODELS[name]
    names, plain = llama_cpps(model), tensors(model)
    path = packed_file(tmp_path / "x.gguf", plain, kind, names, architecture=model.architecture)
    back = {theirs: ours for ours, theirs in names.items()}
    save_file(
        {back[theirs]: tensor for theirs, tensor in unpacked(path).items()}, twin := tmp_path / "twin.safetensors"
    )
    ours = load_streamed_text_encoder(str(path), [], policy=OFF, kind=model.kind, options=model.options())
    clip_type = getattr(T, model.kind.upper())
    wanted = comfy.sd.load_clip([str(twin)], clip_type=clip_type, model_options=model.options())
    assert type(ours.cond_stage_model) is type(wanted.cond_stage_model) or (
        type(ours.cond_stage_model).__name__ == type(wanted.cond_stage_model).__name__
    )
    got = encode(ours, model)
    assert torch.equal(got, encode(wanted, model)) and got.std() > 0
    assert kind in {weight.extent.dtype for layer in ours.patcher.stream.layers for weight in layer.weights}


# ------------------------------------------------------------------------------------------------------------ refusals


def header(path: Path, architecture: str | None, names: list[str]) -> str:
    """A GGUF file of these tensors."""
    values = {} if architecture is None else {llama_cpp.ARCHITECTURE: architecture}
    return str(gguf_files.file_of(path, {**values, "x": "y"}, [gguf_files.Tensor(name, "F16", (4,)) for name in names]))


@pytest.mark.parametrize(
    ("architecture", "told"),
    [
        ("llama", "is a model of the architecture 'llama' from llama.cpp"),
        ("gemma3", "is a model of the architecture 'gemma3' from llama.cpp"),
        ("qwen3vl", "is a model of the architecture 'qwen3vl' from llama.cpp"),
        (None, "is a language model from llama.cpp"),
    ],
)
def test_models_of_other_numbers_are_refused(tmp_path: Path, architecture: str | None, told: str) -> None:
    path = header(
        tmp_path / "x.gguf", architecture, ["blk.0.attn_norm.weight", "blk.0.attn_q.weight", "token_embd.weight"]
    )
    for role in (Role.TEXT, Role.DIFFUSION):
        with pytest.raises(WrongFile, match=rf"{told}.*reads Qwen2\.5, Qwen3, T5.*as a \.safetensors file"):
            fusion.inspect_file(path, role)


@pytest.mark.parametrize(("architecture", "name"), [("clip", "mm.2.weight"), (None, "v.blk.0.attn_q.weight")])
def test_a_vision_part_is_refused(tmp_path: Path, architecture: str | None, name: str) -> None:
    path = header(tmp_path / "mmproj.gguf", architecture, ["mm.0.weight", name])
    with pytest.raises(WrongFile, match=r"mmproj\.gguf is the vision part of a language model \(an mmproj file\)"):
        fusion.inspect_file(path, Role.TEXT)


def test_it_is_told_from_other_models(tmp_path: Path) -> None:
    model = MODELS["Qwen3 4B"]
    path = str(packed_file(tmp_path / "x.gguf", tensors(model), "Q8_0", llama_cpps(model), architecture="qwen3"))
    fusion.inspect_file(path, Role.TEXT)
    with pytest.raises(WrongFile, match="is a Qwen3 text encoder: choose it in the FuseStream Text Encoder Loader"):
        fusion.inspect_file(path, Role.DIFFUSION)
    with pytest.raises(WrongFile, match=r"serves several models.*choose a type \(lumina2 for Z-Image, flux2 for"):
        fusion.load_text_encoder(path, [], OFF, -1.0)


def test_a_missing_block_is_told_by_stocks_name(tmp_path: Path) -> None:
    model = MODELS["Qwen3 4B"]
    found = {name: one for name, one in tensors(model).items() if ".layers.1." not in name}
    path = packed_file(tmp_path / "x.gguf", found, "Q8_0", llama_cpps(model), architecture="qwen3")
    with pytest.raises(WrongFile, match=r"lacks model\.layers\.1: its numbers go on to model\.layers\.3"):
        fusion.inspect_file(str(path), Role.TEXT)


@pytest.mark.parametrize(
    ("architecture", "names", "lacks"),
    [
        ("qwen2vl", ["blk.0.attn_norm.weight"], True),
        ("qwen2vl", ["blk.0.attn_norm.weight", "visual.merger.ln_q.weight"], False),  # whoever put it there
        ("wan", ["blocks.0.norm3.weight"], False),
    ],
)
def test_which_files_have_no_vision_part(tmp_path: Path, architecture: str, names: list[str], lacks: bool) -> None:
    assert llama_cpp.has_no_vision(read_header(header(tmp_path / "x.gguf", architecture, names))) is lacks


def test_a_picture_needs_the_vision_part(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = MODELS["Qwen2.5-VL 7B"]
    path = packed_file(tmp_path / "x.gguf", tensors(model), "Q8_0", llama_cpps(model), architecture="qwen2vl")
    clip = load_streamed_text_encoder(str(path), [], policy=OFF, kind=model.kind, options=model.options())
    assert "clip missing" not in caplog.text and any("no vision part" in line for line in LEDGER.messages)
    logging.warning("clip missing")
    assert "clip missing" in caplog.text, "everybody else is heard"
    picture = {"type": "image", "data": torch.zeros(1, 56, 56, 3), "original_type": "image"}
    with pytest.raises(WrongFile, match=r"x\.gguf has no vision part.*leave the picture out"):
        clip.encode_from_tokens({model.name: [[(5, 1.0), (picture, 1.0), (7, 1.0)]]})
    assert encode(clip, model).std() > 0
