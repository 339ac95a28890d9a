"""The further files of a text encoder loader: what is listed and looked at before anything runs, and what is loaded."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import folder_paths
import pytest
import torch
from comfy_api.latest import io
from gguf_files import Tensor
from gguf_files import file_of as gguf_of

import nodes
from fusestream import checkpoints, fusion
from fusestream.fusion.base.family import Role
from fusestream.nodes import encoder_files
from fusestream.nodes.graph import queued
from fusestream.nodes.loaders import TextEncoderLoader

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "tokenizers")

FIRST, SECOND, THIRD, FOURTH = "text_encoder_name", *encoder_files.PLACES
NAMES = {"clip_l": "clip_l.safetensors", "t5xxl": "t5.safetensors", "wan_vae": "vae.safetensors"}


@pytest.fixture
def models(tmp_path: Path, families_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of models: encoders, a file that is none, and a checkpoint of the name of one of them."""
    known = {
        name: ([str(tmp_path / name)], folder_paths.supported_pt_extensions) for name in (role.folder for role in Role)
    }
    monkeypatch.setattr(folder_paths, "folder_names_and_paths", {**folder_paths.folder_names_and_paths, **known})
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})
    for folder in ("text_encoders", "checkpoints"):
        (tmp_path / folder).mkdir()
    for kind, name in NAMES.items():
        shutil.copy(checkpoints.write(kind, families_folder), tmp_path / "text_encoders" / name)
    for name in ("whole.safetensors", "t5.safetensors"):
        (tmp_path / "checkpoints" / name).write_bytes(bytes(100))
    return tmp_path


def asked(first: str | None = "t5.safetensors", **inputs: Any) -> bool | str:
    """The answer of the loader, node 1, as ComfyUI asks it for a prompt with these inputs."""
    entry = {"class_type": "FuseStreamTextEncoderLoader", "inputs": {FIRST: first, "vram_budget": -1.0, **inputs}}
    queued.note({"prompt": {"1": entry}})
    node: Any = TextEncoderLoader.PREPARE_CLASS_CLONE({"hidden_inputs": {io.Hidden.unique_id: "1"}})
    answer: bool | str = asyncio.run(node.validate_inputs(**{FIRST: first}))
    return answer


def test_the_second_may_be_a_checkpoint_and_the_others_encoders(models: Path) -> None:
    encoders = ["clip_l.safetensors", "t5.safetensors", "vae.safetensors"]
    offered = {
        item.id: item.options for item in TextEncoderLoader.define_schema().inputs if item.id in encoder_files.PLACES
    }
    assert offered == {
        SECOND: ["none", *encoders, "whole.safetensors"],
        THIRD: ["none", *encoders],
        FOURTH: ["none", *encoders],
    }
    assert encoder_files.paths_of(("whole.safetensors", "none", "t5.safetensors")) == [
        str(models / "checkpoints" / "whole.safetensors"),
        str(models / "text_encoders" / "t5.safetensors"),
    ]
    assert encoder_files.where(SECOND, "t5.safetensors") == str(models / "text_encoders" / "t5.safetensors")
    with pytest.raises(FileNotFoundError):
        encoder_files.paths_of(("none", "whole.safetensors", "none"))


def test_the_types_are_stocks_for_one_file_and_for_several() -> None:
    (found,) = (item.options for item in TextEncoderLoader.define_schema().inputs if item.id == "type")
    single, dual = (one.INPUT_TYPES()["required"]["type"][0] for one in (nodes.CLIPLoader, nodes.DualCLIPLoader))
    assert found[: len(single) + 1] == ["auto", *single], "as before there were several"
    assert set(found) == {"auto", *single, *dual} and len(found) == len(set(found))


def test_a_workflow_from_before_has_one_file() -> None:
    assert TextEncoderLoader.names()[-3:] == [SECOND, THIRD, FOURTH]
    older = TextEncoderLoader.Inputs("t5.safetensors", "auto", "precise", -1.0, "wan", "auto")
    assert (older.second_file, older.third_file, older.fourth_file) == ("none", "none", "none")


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ({"type": "flux"}, None),
        ({"type": ["7", 0]}, None),
        ({"type": "flux", THIRD: "clip_l.safetensors", SECOND: "none"}, None),
        ({"type": "auto"}, "choose a type (flux for Flux.1, sd3 for SD 3, hidream for HiDream)"),
        ({"type": "sdxl"}, "type sdxl takes CLIP-L with CLIP-G"),
        ({"type": "flux", SECOND: "t5.safetensors"}, "t5.safetensors is given twice"),
        (
            {"type": "flux", SECOND: "vae.safetensors"},
            "vae.safetensors is a Wan VAE: move it to models/vae, and choose it in",
        ),
        ({"type": "flux", SECOND: "whole.safetensors"}, "whole.safetensors"),
        ({"type": "flux", SECOND: "gone.safetensors"}, "gone.safetensors is not there any more"),
        ({"type": "flux", SECOND: ["7", 0]}, None),
    ],
    ids=str,
)
def test_the_files_are_looked_at_together(models: Path, inputs: dict[str, Any], told: str | None) -> None:
    answer = asked(**{SECOND: "clip_l.safetensors", **inputs})
    assert answer is True if told is None else isinstance(answer, str) and told in answer, answer


def test_a_first_file_that_is_not_listed_is_refused_as_ever(models: Path) -> None:
    answer = asked("x.safetensors", **{SECOND: "clip_l.safetensors", "type": "flux"})
    assert isinstance(answer, str) and answer.startswith("x.safetensors is not in models/text_encoders: ")
    assert asked(None, **{SECOND: "clip_l.safetensors", "type": "flux"}) is True


def test_a_gguf_file_among_them_is_not_queued_for_stock(models: Path) -> None:
    name = gguf_of(models / "text_encoders" / "x.gguf", {}, [Tensor("a", "Q8_0", (2, 32))]).name
    answer = asked(**{SECOND: name, "type": "flux", "vram_budget": 0.0})
    assert isinstance(answer, str) and answer.startswith("x.gguf is a GGUF file, which ComfyUI does not read by itself")


def test_headers_are_read_once_until_a_file_changes(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, inspect = [], fusion.inspect_text_encoders
    monkeypatch.setattr(fusion, "inspect_text_encoders", lambda *given: (read.append(given[0]), inspect(*given)))
    inputs = {SECOND: "clip_l.safetensors", "type": "flux"}
    assert asked(**inputs) is True and asked(**inputs) is True
    assert len(read) == 1
    path = models / "text_encoders" / "clip_l.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    answer = asked(**inputs)
    assert isinstance(answer, str) and "clip_l.safetensors is cut short" in answer


def test_a_fingerprint_is_that_of_all_files(models: Path) -> None:
    def now(**inputs: Any) -> str:
        return TextEncoderLoader.fingerprint_inputs(**{FIRST: "t5.safetensors", **inputs})

    alone = now()
    assert now(**dict.fromkeys(encoder_files.PLACES, "none")) == alone
    both = now(**{SECOND: "clip_l.safetensors"})
    assert both != alone
    os.utime(models / "text_encoders" / "clip_l.safetensors", ns=(0, 10**18))
    assert now() == alone and now(**{SECOND: "clip_l.safetensors"}) not in (alone, both)


@pytest.mark.parametrize("budget", [-1.0, 0.0])
def test_it_loads_what_stocks_loader_for_two_files_does(
    models: Path, monkeypatch: pytest.MonkeyPatch, budget: float
) -> None:
    paths = [models / "text_encoders" / NAMES[kind] for kind in ("t5xxl", "clip_l")]
    options = checkpoints.model_options(*paths)
    load, stocks = fusion.load_text_encoder, nodes.comfy.sd.load_clip
    monkeypatch.setattr(fusion, "load_text_encoder", lambda *given, **more: load(*given, options=options, **more))
    monkeypatch.setattr(nodes.comfy.sd, "load_clip", lambda **how: stocks(**{**how, "model_options": options}))
    names = {FIRST: "t5.safetensors", SECOND: "none", THIRD: "clip_l.safetensors"}
    ours = TextEncoderLoader.execute(**names, kernels="off", vram_budget=budget, type="flux").args[0]
    theirs = nodes.DualCLIPLoader().load_clip("t5.safetensors", "clip_l.safetensors", "flux")[0]
    assert hasattr(ours.patcher, "stream") == (budget != 0)
    tokens = theirs.tokenize("a red fox", tokenizer_options={"t5xxl_min_length": 24})
    for one, other in zip(
        ours.encode_from_tokens(tokens, return_pooled=True),
        theirs.encode_from_tokens(tokens, return_pooled=True),
        strict=True,
    ):
        assert torch.equal(one, other)
