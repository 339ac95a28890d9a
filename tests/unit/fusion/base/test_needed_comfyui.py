"""In a ComfyUI that is too old the pack says so and leaves nothing behind; other packs load."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bed import comfyui, depth
from bed.paths import ROOT, Bed
from fusestream.fusion.base import needed_comfyui

SAYS = r"Cannot import .* module for custom nodes: FuseStream needs ComfyUI 0\.30 or newer, this is {}\. Update ComfyUI"
OTHER_PACK = "class Other: ...\nNODE_CLASS_MAPPINGS = {'Other': Other}\n"
# What a server does with its packs, in a process that has nothing else in it.
STARTS = """
import asyncio, json, logging, sys
logging.basicConfig(stream=sys.stderr)
import comfy.options
comfy.options.enable_args_parsing()
sys.argv = [sys.argv[0], "--cpu", *sys.argv[1:]]
packs = [sys.argv.pop() for _ in range(2)][::-1]
import nodes
loaded = [asyncio.run(nodes.load_custom_node(pack)) for pack in packs]
print(json.dumps({
    "loaded": loaded, "web": list(nodes.EXTENSION_WEB_DIRS), "nodes": sorted(nodes.NODE_CLASS_MAPPINGS),
    "modules": [name for name in sys.modules if name.startswith(packs[0].replace(".", "_x_") + ".")],
}))
"""


@pytest.fixture
def packs(tmp_path: Path) -> Iterator[list[str]]:
    """This pack and another one, as a server finds them."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "__init__.py").write_text(OTHER_PACK)
    yield [str(ROOT), str(other)]
    for name in [name for name in sys.modules if name.startswith((str(ROOT).replace(".", "_x_"), str(tmp_path)))]:
        del sys.modules[name]


def test_an_older_comfyui_goes_on_without_the_pack(
    packs: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ComfyUI's own loader, of today; only the version is another."""
    nodes: Any = importlib.import_module("nodes")  # ComfyUI's, of no package
    monkeypatch.setattr("comfyui_version.__version__", "0.3.64")
    monkeypatch.setattr(nodes, "NODE_CLASS_MAPPINGS", dict(nodes.NODE_CLASS_MAPPINGS))
    monkeypatch.setattr(nodes, "EXTENSION_WEB_DIRS", {})
    assert [asyncio.run(nodes.load_custom_node(pack)) for pack in packs] == [False, True]
    assert re.search(SAYS.format(r"0\.3\.64"), caplog.text)
    assert not nodes.EXTENSION_WEB_DIRS, "its scripts are served to a front end that has no such nodes"
    assert "Other" in nodes.NODE_CLASS_MAPPINGS
    assert not [name for name in nodes.NODE_CLASS_MAPPINGS if name.startswith("FuseStream")]
    assert f"{packs[0]}.nodes".replace(".", "_x_", packs[0].count(".")) not in sys.modules, "nothing else was imported"


def test_with_the_sources_of_an_older_comfyui(packs: list[str]) -> None:
    """The long form of the suite fetches them; else they are used where they lie."""
    folder = comfyui.find_too_old(Bed(), fetch=depth.is_thorough())
    if folder is None:
        pytest.skip("no older ComfyUI here: `dev.py test --thorough` fetches one, or set COMFYUI_OLD_PATH")
    command = [sys.executable, "-c", STARTS, *packs]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env=environment, check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["loaded"] == [False, True], done.stderr[-3000:]
    assert re.search(SAYS.format(re.escape(str(comfyui.version(folder)))), done.stderr)
    assert not found["web"] and "Other" in found["nodes"]
    assert not [name for name in found["nodes"] if name.startswith("FuseStream")]
    assert {name.partition(".fusion")[2] for name in found["modules"]} == {"", ".base", ".base.needed_comfyui"}


@pytest.mark.parametrize(
    ("found", "old"),
    [("0.3.64", True), ("0.29.9", True), ("v0.16.3", True), ("0.30.0", False), ("0.30.0rc1", False), ("0.100.0", False),
     ("1.0.0", False), ("a fork's own", False)],
)  # fmt: skip
def test_versions(found: str, old: bool) -> None:
    assert needed_comfyui.is_too_old(found) is old


def test_one_without_the_interface_is_told_too(tmp_path: Path) -> None:
    """From before ComfyUI told its version."""
    (tmp_path / "folder_paths.py").write_text("")
    words = "import sys; sys.path.insert(0, sys.argv[1]); import importlib.util as u; "
    words += (
        "s = u.spec_from_file_location('needed', sys.argv[2]); m = u.module_from_spec(s); s.loader.exec_module(m); "
    )
    command = [sys.executable, "-c", words + "m.refuse_older()", str(tmp_path), needed_comfyui.__file__]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
    assert "this is one from before it told its version. Update ComfyUI" in done.stderr
    (tmp_path / "folder_paths.py").unlink()  # no ComfyUI at all: the pack may be read
    assert subprocess.run(command, cwd=tmp_path, env=environment, check=False).returncode == 0


def test_the_registry_is_told_the_same() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-comfyui = ">={needed_comfyui.OLDEST}.0"' in project
