"""An input of an example comes into ComfyUI's input folder once, whole, and never over a file of the user's."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import folder_paths
import pytest

from fusestream.nodes.page import example_inputs

NAME = "fusestream_example.jpg"


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(folder_paths, "get_input_directory", lambda: str(tmp_path))
    return tmp_path


def asked(name: str) -> tuple[int, dict[str, Any]]:
    request: Any = SimpleNamespace(match_info={"name": name})
    answer = asyncio.run(example_inputs.answer(request))
    assert isinstance(answer.body, bytes)
    return answer.status, json.loads(answer.body)


def test_it_is_put_there_once(inputs: Path) -> None:
    assert asked(NAME) == (200, {"is_new": True})
    assert (inputs / NAME).read_bytes() == (example_inputs.FOLDER / NAME).read_bytes()
    (inputs / NAME).write_text("the user's own", encoding="utf-8")
    assert asked(NAME) == (200, {"is_new": False})
    assert (inputs / NAME).read_text(encoding="utf-8") == "the user's own"


@pytest.mark.parametrize("name", ["../../__init__.py", "other.png", "", "."])
def test_no_other_file_is(inputs: Path, name: str) -> None:
    assert asked(name)[0] == 404
    assert not list(inputs.iterdir())


def test_a_full_disk_leaves_no_half_of_it(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.FileIO):
        def write(self, content: Any) -> int:
            super().write(bytes(content[:9]))
            raise OSError("no space left on device")

    monkeypatch.setattr(Path, "open", lambda path, mode: Full(path, "x"))
    assert asked(NAME) == (500, {"error": "It could not be written."})
    assert not list(inputs.iterdir())


def test_a_folder_that_is_gone_is_said(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_paths, "get_input_directory", lambda: str(inputs / "gone"))
    assert asked(NAME)[0] == 500
