"""What ComfyUI asks a loader about its file before anything runs: can it be right, and is it the one it was."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import folder_paths
import pytest
from comfy_api.latest import io
from gguf_files import Tensor
from gguf_files import file_of as file_of_gguf

from fusestream import checkpoints, fusion
from fusestream.fusion.base.family import Role
from fusestream.nodes import doctor, files
from fusestream.nodes.graph import queued
from fusestream.nodes.loaders import CheckpointLoader, DiffusionModelLoader, TextEncoderLoader, VAELoader

LOADERS = {
    Role.DIFFUSION: (DiffusionModelLoader, "model_name", "wan_t2v"),
    Role.TEXT: (TextEncoderLoader, "text_encoder_name", "umt5"),
    Role.VAE: (VAELoader, "vae_name", "wan_vae"),
    Role.CHECKPOINT: (CheckpointLoader, "ckpt_name", "sd15"),  # stock takes a model by itself there, too
}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of models, with a file for each loader: its name is the role's, and there is nothing in it."""
    known = {
        name: ([str(tmp_path / name)], folder_paths.supported_pt_extensions) for name in (role.folder for role in Role)
    }
    monkeypatch.setattr(folder_paths, "folder_names_and_paths", {**folder_paths.folder_names_and_paths, **known})
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})
    for role in LOADERS:
        path = file_of(role, tmp_path)
        path.parent.mkdir()
        path.write_bytes(bytes(100))
    return tmp_path


@pytest.fixture
def sound(models: Path, families_folder: Path) -> Path:
    """The same with a tiny model in each."""
    for role, (_, _, kind) in LOADERS.items():
        shutil.copy(checkpoints.write(kind, families_folder), file_of(role, models))
    return models


def file_of(role: Role, models: Path) -> Path:
    return models / role.folder / f"{role.name}.safetensors"


def asked(role: Role, name: str | None) -> bool | str:
    """The answer of a loader, node 1, as ComfyUI asks it."""
    loader, widget, _ = LOADERS[role]
    node: Any = loader.PREPARE_CLASS_CLONE({"hidden_inputs": {io.Hidden.unique_id: "1"}})
    answer: bool | str = asyncio.run(node.validate_inputs(**{widget: name}))
    return answer


@pytest.fixture(autouse=True)
def nothing_queued() -> None:
    queued.note({})


@pytest.mark.parametrize("role", Role)
def test_a_sound_file_passes(sound: Path, role: Role) -> None:
    assert asked(role, file_of(role, sound).name) is True


@pytest.mark.parametrize("role", Role)
def test_a_name_by_a_link_passes(role: Role) -> None:
    assert asked(role, None) is True


@pytest.mark.parametrize("role", Role)
def test_a_name_that_is_not_listed_is_told_with_where_the_file_may_be(models: Path, role: Role) -> None:
    folder = f"models/{role.folder}"
    assert asked(role, "x_1234.gguf") == (
        f"x_1234.gguf is not in {folder}: it was renamed or removed, or was never there. Choose another, or put it there and "
        "press R."
    )
    assert f" Names like it are {role.name}.safetensors. " in str(asked(role, f"{role.name}_fp8.safetensors"))
    within = file_of(role, models).parent / "wan" / "x.safetensors"
    within.parent.mkdir()
    shutil.copy(file_of(role, models), within)
    folder_paths.filename_list_cache.clear()
    told = f"x.safetensors is not in {folder} any more: {Path('wan', 'x.safetensors')} has its name. Choose that."
    assert asked(role, "x.safetensors") == told
    other = next(one for one in LOADERS if one is not role)
    name = file_of(other, models).name
    assert asked(role, name) == f"{name} is not in {folder}: it is in models/{other.folder}. Move it, and press R."


def test_a_file_that_went_since_it_was_listed_is_refused(models: Path) -> None:
    """A name that leads nowhere stays in the list."""
    gone = models / "elsewhere.safetensors"
    link = models / "vae" / "linked.safetensors"
    try:
        link.symlink_to(gone)
    except OSError:
        pytest.skip("no links here")
    answer = asked(Role.VAE, link.name)
    assert isinstance(answer, str) and "linked.safetensors is not in models/vae any more" in answer


def test_a_sound_files_header_is_read_once_until_the_file_changes(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    inspect: Callable[..., None] = fusion.inspect_file
    monkeypatch.setattr(fusion, "inspect_file", lambda path, *rest: (read.append(path), inspect(path, *rest)))
    path = file_of(Role.VAE, sound)
    for _ in range(3):
        assert asked(Role.VAE, path.name) is True
    assert read == [str(path)]
    path.write_bytes(path.read_bytes()[:-1])
    for _ in range(3):
        answer = asked(Role.VAE, path.name)
        assert isinstance(answer, str) and "VAE.safetensors is cut short" in answer
    assert len(read) == 4, "one that was refused may pass the next time: what it lacks may be in another file by then"


def changes() -> Iterator[tuple[str, Callable[[Path], Any]]]:
    yield "touched", lambda path: os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 10**9))
    yield "written to", lambda path: path.write_bytes(path.read_bytes()[:-1])
    yield "deleted", lambda path: path.unlink()
    yield "replaced by a copy of the same time", lambda path: shutil.copy2(path, twin(path)).replace(path)


def twin(path: Path) -> Path:
    return path.with_suffix(".twin")


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(("what", "change"), list(changes()), ids=[what for what, _ in changes()])
def test_a_fingerprint_is_the_files(models: Path, role: Role, what: str, change: Callable[[Path], Any]) -> None:
    loader, widget, _ = LOADERS[role]
    path = file_of(role, models)
    first = loader.fingerprint_inputs(**{widget: path.name}, kernels="auto", vram_budget=-1.0)
    assert first and loader.fingerprint_inputs(**{widget: path.name}) == first
    change(path)
    assert loader.fingerprint_inputs(**{widget: path.name}) != first


def test_a_fingerprint_tells_nothing_of_the_disk(models: Path) -> None:
    """It is saved with the prompt in every picture."""
    path = file_of(Role.VAE, models)
    told, status = files.fingerprint(Role.VAE, path.name), path.stat()
    assert len(told) == 16 and not any(str(number) in told for number in (status.st_ino, status.st_mtime_ns))


@pytest.mark.parametrize("name", [None, "absent.safetensors"])
def test_what_has_no_file_has_a_fingerprint_too(models: Path, name: str | None) -> None:
    assert files.fingerprint(Role.VAE, name) == files.fingerprint(Role.VAE, name)


# ------------------------------------------------------------------------------------------------- what is being queued


def prompt() -> dict[str, Any]:
    return {
        "1": {"class_type": "FuseStreamDiffusionModelLoader", "inputs": {"model_name": "a", "vram_budget": -0.5}},
        "2": {"class_type": "VAELoader", "inputs": {"vae_name": "b"}},
        "3": {"class_type": "KSampler", "inputs": {"model": ["1", 0]}},
        "4": {"class_type": "VAEDecode", "inputs": {"samples": ["3", 0], "vae": ["2", 0]}},
        "5": {"class_type": "PreviewImage", "inputs": {"images": ["4", 0]}},
    }


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own loader among ComfyUI's nodes, where a server would put it."""
    import nodes

    mine = {"FuseStreamDiffusionModelLoader": DiffusionModelLoader}
    monkeypatch.setattr(nodes, "NODE_CLASS_MAPPINGS", {**nodes.NODE_CLASS_MAPPINGS, **mine})


def test_the_graph_that_is_queued_is_known_to_its_nodes(ours: None) -> None:
    body = {"prompt": prompt(), "client_id": "x"}
    assert queued.note(body) is body
    graph = queued.graph("1", {"model_name": "a"})
    assert graph is not None and list(graph.vaes("1")) == ["2"]
    assert queued.value("1", "vram_budget") == -0.5 and queued.value("1", "kernels") is None


def test_only_the_nodes_that_were_asked_for_count(ours: None) -> None:
    queued.note({"prompt": prompt(), "partial_execution_targets": ["9"]})
    graph = queued.graph("1", {"model_name": "a"})
    assert graph is not None and list(graph.vaes("1")) == []


@pytest.mark.parametrize("role", [Role.DIFFUSION, Role.TEXT])
@pytest.mark.parametrize("budget", [-0.5, math.nan, ["7", 0], -1.0, 0.0])
def test_a_budget_that_is_none_is_refused_and_a_link_is_not(sound: Path, role: Role, budget: Any) -> None:
    """Beside the file's name, of which alone the node is asked: ComfyUI says a refusal of each input that is named."""
    _, widget, _ = LOADERS[role]
    name = file_of(role, sound).name
    inputs = {widget: name, "vram_budget": budget}
    queued.note({"prompt": {"1": {"class_type": "FuseStreamDiffusionModelLoader", "inputs": inputs}}})
    answer = asked(role, name)
    if budget in (-1.0, 0.0, ["7", 0]):
        assert answer is True
    else:
        assert isinstance(answer, str) and f"vram_budget is {budget}" in answer


BODIES: list[Any] = [
    {},
    {"prompt": None},
    {"prompt": []},
    {"prompt": {"1": 3}},
    {"prompt": {"1": {"inputs": [1]}}},
    {"prompt": {**prompt(), "6": None}},
    {"prompt": {**prompt(), "1": {"class_type": "X", "inputs": {"model_name": "of another prompt"}}}},
]


@pytest.mark.parametrize("body", BODIES, ids=repr)
def test_another_body_or_another_prompt_is_none(ours: None, body: Any) -> None:
    queued.note(body)
    assert queued.graph("1", {"model_name": "a"}) is None


def test_without_a_server_nothing_is_known() -> None:
    queued.note({})
    assert (
        queued.graph("1", {}) is None and queued.value("1", "vram_budget") is None and queued.value(None, "x") is None
    )


# ----------------------------------------------------------------------------------------------------------- GGUF files


def gguf(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return file_of_gguf(path, {}, [Tensor("a", "Q8_0", (2, 32))])


def test_gguf_files_are_listed_beside_stocks(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of stock's folders, of those that other packs have for them, and of a model in several files the first."""
    other = models / "other"
    known = {"unet_gguf": ([str(models / "diffusion_models"), str(other)], {".gguf"})}
    monkeypatch.setattr(folder_paths, "folder_names_and_paths", {**folder_paths.folder_names_and_paths, **known})
    here = [
        gguf(models / "diffusion_models" / name)
        for name in ("a.gguf", "m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    ]
    there = gguf(other / "wan" / "B.GGUF")
    gguf(other / ".git" / "no.gguf")
    text = gguf(models / "text_encoders" / "t5.gguf")
    inner = str(there.relative_to(other))
    assert files.listed(Role.DIFFUSION) == sorted(["DIFFUSION.safetensors", "a.gguf", "m-00001-of-00002.gguf", inner])
    assert files.listed(Role.TEXT) == ["TEXT.safetensors", "t5.gguf"]
    assert files.listed(Role.VAE) == ["VAE.safetensors"]
    assert files.path_of(Role.DIFFUSION, inner) == str(there)
    assert files.path_of(Role.DIFFUSION, "a.gguf") == str(here[0]) and files.path_of(Role.TEXT, "t5.gguf") == str(text)
    options = DiffusionModelLoader.define_schema().inputs[0].options
    assert options == files.listed(Role.DIFFUSION)
    with pytest.raises(FileNotFoundError):
        files.path_of(Role.DIFFUSION, "no.gguf")


def test_a_gguf_file_is_looked_at_before_it_is_queued(models: Path) -> None:
    path = gguf(models / "text_encoders" / "t5.gguf")
    first = files.fingerprint(Role.TEXT, path.name)
    assert asked(Role.TEXT, path.name) is True
    path.write_bytes(path.read_bytes()[:-40])
    answer = asked(Role.TEXT, path.name)
    assert isinstance(answer, str) and "t5.gguf is cut short: it has" in answer
    assert files.fingerprint(Role.TEXT, path.name) != first
    answer = asked(Role.TEXT, "x.gguf")
    assert isinstance(answer, str) and answer.startswith("x.gguf is not in models/text_encoders: ")


@pytest.mark.parametrize("role", [Role.DIFFUSION, Role.TEXT])
def test_a_gguf_file_is_not_queued_for_stock(models: Path, role: Role) -> None:
    name = gguf(models / role.folder / "x.gguf").name
    loader, widget, _ = LOADERS[role]
    for budget, refused in ((0.0, True), (0, True), (-1.0, False), (2.0, False), (["7", 0], False)):
        entry = {"class_type": loader.GET_SCHEMA().node_id, "inputs": {widget: name, "vram_budget": budget}}
        queued.note({"prompt": {"1": entry}})
        answer = asked(role, name)
        told = "x.gguf is a GGUF file, which ComfyUI does not read by itself"
        assert (isinstance(answer, str) and answer.startswith(told)) == refused


def part(path: Path, number: int, count: int) -> Path:
    """One file of a model in several, with a tensor of its own."""
    values = {"split.no": number, "split.count": count, "split.tensors.count": count}
    return file_of_gguf(
        path.with_name(f"m-{number + 1:05}-of-{count:05}.gguf"), values, [Tensor(f"a{number}", "Q8_0", (2, 32))]
    )


def test_a_model_in_several_files_is_another_one_when_a_part_changes(models: Path) -> None:
    first, second, third = (part(models / "diffusion_models" / "x", number, 3) for number in range(3))
    whole = files.fingerprint(Role.DIFFUSION, first.name)
    assert len(whole) == 16 and files.fingerprint(Role.DIFFUSION, first.name) == whole
    assert asked(Role.DIFFUSION, first.name) is True
    os.utime(third, ns=(0, 10**18))
    touched = files.fingerprint(Role.DIFFUSION, first.name)
    second.unlink()
    lacking = files.fingerprint(Role.DIFFUSION, first.name)
    assert len({whole, touched, lacking}) == 3
    answer = asked(Role.DIFFUSION, first.name)
    assert isinstance(answer, str) and "beside it lacks m-00002-of-00003.gguf" in answer


def test_the_disk_is_measured_by_the_largest_model_of_either_format(models: Path) -> None:
    assert doctor.largest_model() == file_of(Role.DIFFUSION, models)
    path = gguf(models / "diffusion_models" / "x.gguf")
    assert doctor.largest_model() == path


@pytest.mark.parametrize("role", [Role.DIFFUSION, Role.TEXT])
def test_a_file_in_another_ones_folder_is_told_to_be_moved(models: Path, role: Role, families_folder: Path) -> None:
    source = checkpoints.write("wan_vae", families_folder)
    shutil.copy(source, file_of(role, models))
    answer = asked(role, file_of(role, models).name)
    assert str(answer).endswith("is a Wan VAE: move it to models/vae, and choose it in the FuseStream VAE Loader.")
    anywhere = models / "anywhere.safetensors"
    shutil.copy(source, anywhere)
    with pytest.raises(fusion.WrongFile, match="is a Wan VAE: choose it in the FuseStream VAE Loader"):
        fusion.inspect_file(str(anywhere), role)
