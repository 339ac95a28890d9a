"""What lies in model folders and is no model, and files that change under a stream: a sentence each time, nothing is executed, and
the server goes on."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bed import outcome, tiny
from bed.client import Client, Rejected, Workflow
from bed.outcome import LOADER
from bed.server import Server
from fusestream import checkpoints
from hostile import damage

SOON = 60  # seconds: what waits for ever, waits longer
LONGEST = 2000  # of a sentence


@pytest.fixture(scope="module")
def bad_files(server: Server, files: list[Path]) -> Iterator[dict[tuple[str, str], Path]]:
    """By loader and by name: each under a name for files with a header, and under one for torch's own."""
    found = {}
    for loader, source in zip(tiny.LOADERS, files, strict=True):
        for name, make in damage.DAMAGE.items():
            for suffix in (".safetensors", ".pth"):
                path = source.with_name(f"{name}{suffix}")
                make(path, source)
                found[loader, path.name] = path
    server.get("/object_info")  # as the browser's R key: the server lists its folders again
    yield found
    for path in found.values():
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def told(client: Client, workflow: Workflow) -> str:
    """What is said of a file: before anything is queued, or by the loader."""
    try:
        run = client.run(workflow, timeout=SOON)
    except Rejected as refused:
        (node,) = refused.body["node_errors"].values()
        (error,) = node["errors"]
        return str(error["details"])
    assert run.error is not None and run.error["node_type"] in tiny.LOADERS
    assert run.error["exception_type"].startswith("fusestream."), run.error
    return str(run.error["exception_message"])


def test_no_file_does_anything_but_get_a_sentence(
    client: Client, workflow: Workflow, bad_files: dict[tuple[str, str], Path]
) -> None:
    wanted = outcome.made(client, outcome.with_latents(workflow))
    odd = {}
    for (loader, name), path in bad_files.items():
        turn = copy.deepcopy(workflow)
        tiny.node_of(turn, loader)["inputs"][tiny.LOADERS[loader][0]] = name
        said = told(client, turn)
        if name not in said or "weights_only" in said or len(said) > LONGEST:
            odd[loader, name] = said
        assert not damage.marker(path).exists(), f"{name} was executed"
    assert not odd
    again = outcome.with_latents(outcome.sampled_anew(workflow, 1))
    assert torch.equal(outcome.made(client, again), wanted)


def test_the_pickles_would_do_it(tmp_path: Path) -> None:
    for name in ("pickle", "torch_pickle"):
        path = tmp_path / f"{name}.pth"
        damage.DAMAGE[name](path, path)
        with contextlib.suppress(Exception):  # what comes of it is no model
            torch.load(path, weights_only=False)
        assert damage.marker(path).exists()


# --------------------------------------------------------------------------------------------------- while it streams


def touch(path: Path, _other: Path) -> None:
    os.utime(path)


def write_over(path: Path, other: Path) -> None:
    with path.open("r+b") as file:
        file.write(other.read_bytes())


def cut(path: Path, _other: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace(path: Path, other: Path) -> None:
    shutil.copy(other, path.with_suffix(".new")).replace(path)


def delete(path: Path, _other: Path) -> None:
    path.unlink()


def put_a_pipe(path: Path, _other: Path) -> None:
    os.mkfifo(path.with_suffix(".pipe"))
    path.with_suffix(".pipe").replace(path)


@pytest.mark.every_other
@pytest.mark.skipif(os.name != "posix", reason="a file that is open stays as it is")
@pytest.mark.parametrize("deed", [touch, write_over, cut, replace, delete, put_a_pipe])
def test_a_file_that_changes_while_it_streams(
    server: Server, client: Client, workflow: Workflow, files: list[Path], deed: Callable[[Path, Path], Any]
) -> None:
    """The run ends with a sentence. Once the right file is there again, the next one makes what was always made."""
    mine = files[0].with_name(f"{deed.__name__}.safetensors")
    other = checkpoints.write("wan_t2v", files[0].parent, seed=1)
    shutil.copy(files[0], mine)
    server.get("/object_info")
    tiny.shrink(workflow, width=64, height=64, length=5, steps=2)
    tiny.node_of(workflow, "KSampler")["inputs"]["seed"] = 1819
    streamed = outcome.streamed(workflow)
    wanted = outcome.made(client, outcome.with_stocks_loader(streamed))
    tiny.node_of(streamed, LOADER)["inputs"]["model_name"] = mine.name
    long = copy.deepcopy(streamed)
    tiny.node_of(long, "KSampler")["inputs"]["steps"] = 500
    is_done = []

    def listen(kind: str, data: dict[str, Any]) -> None:
        if kind == "progress" and data["max"] == 500 and data["value"] >= 2 and not is_done:
            is_done.append(deed(mine, other))

    run = client.run(long, listen)
    assert run.error is not None and run.error["exception_type"] == "fusestream.FileChanged"
    assert mine.name in run.error["exception_message"] and "Press Run again" in run.error["exception_message"]
    if deed is not touch:
        shutil.copy(files[0], mine.with_suffix(".new")).replace(mine)
    assert torch.equal(outcome.made(client, streamed), wanted)
    mine.unlink()


# ------------------------------------------------------------------------------------------------------ names and words


def test_a_script_in_a_name_and_in_a_header_is_only_words(
    server: Server, client: Client, workflow: Workflow, files: list[Path]
) -> None:
    """A sound file with such a name is loaded, and a bad one is named as it is."""
    if os.name == "nt":
        pytest.skip("no file can have such a name")
    sound, bad = (files[0].with_name(f"{name}{damage.SCRIPT}.safetensors") for name in ("sound", "bad"))
    damage.with_metadata(files[0], sound, {"title": damage.SCRIPT, "modelspec.title": damage.SCRIPT * 1000})
    damage.write_page(bad, files[0])
    server.get("/object_info")
    streamed = outcome.streamed(workflow)
    wanted = outcome.made(client, streamed)
    for path in (sound, bad):
        tiny.node_of(streamed, LOADER)["inputs"]["model_name"] = path.name
        if path is sound:
            assert torch.equal(outcome.made(client, streamed), wanted)
        else:
            assert bad.name in told(client, streamed)
        path.unlink()
