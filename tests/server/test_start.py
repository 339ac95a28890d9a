"""The pack as the server sees it: loaded without a complaint, its nodes described, its pages and templates served."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bed.server import PACK, Server, prepare
from bed.templates import STEMS, SWAPPED
from bed.templates.from_stock.prompt import prompt

ROOT = Path(__file__).resolve().parents[2]
COMPLAINTS = re.compile(r"IMPORT FAILED|Cannot import|Traceback|Error while calling")
NODES = sorted(path.stem for path in (ROOT / "nodes" / "web" / "docs").glob("*.md"))


def text(server: Server, path: str) -> str:
    with urllib.request.urlopen(server.url + path, timeout=30) as answer:
        body: str = answer.read().decode()
        return body


def test_the_pack_is_imported_without_a_complaint(server: Server) -> None:
    log = server.startup_log
    assert not COMPLAINTS.search(log), log
    seconds = re.search(rf"([\d.]+) seconds: .*{PACK}", log)
    most = 20.0 if sys.platform == "win32" else 2.0  # 0.3 where nothing else runs; Wine reads files slowly
    assert seconds and float(seconds.group(1)) < most, log


# ComfyUI's main.py, with every way to a GPU watched for calls that come from the pack; what was seen is printed at the end.
WATCHED = """
import atexit, ctypes, runpy, sys, traceback, torch
pack, main = sys.argv[1:3]
sys.argv[:] = sys.argv[2:]
sys.path.insert(0, main.rpartition("/")[0])
seen = []
def watch(owner, name):
    real = getattr(owner, name)
    def watched(*args, **kwargs):
        if any(pack in frame.filename for frame in traceback.extract_stack()):
            seen.append(name + ": " + "".join(traceback.format_stack(limit=4)))
        return real(*args, **kwargs)
    setattr(owner, name, watched)
for name in ("_lazy_init", "init", "is_available", "device_count", "get_device_properties", "mem_get_info"):
    watch(torch.cuda, name)
watch(ctypes, "CDLL")
atexit.register(lambda: print("TOUCHED", len(seen), *seen, flush=True))
runpy.run_path(main, run_name="__main__")
"""


@pytest.mark.deep
def test_the_quick_start_of_ci_is_clean_and_touches_no_gpu(tmp_path: Path) -> None:
    """`--quick-test-for-ci` ends well even where a pack cannot be imported: its log is what tells."""
    prepare(tmp_path)
    main = Path(os.environ["COMFYUI_PATH"]) / "main.py"
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, f"/{PACK}/", str(main), "--quick-test-for-ci", "--cpu", "--disable-api-nodes",
         "--base-directory", str(tmp_path), "--database-url", "sqlite:///:memory:"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert re.search(rf"[\d.]+ seconds: .*{PACK}\n", log), "the pack was not looked at"
    assert not COMPLAINTS.search(log), log
    assert not [
        line for line in log.splitlines() if re.search(r"error|warning|fail", line, re.IGNORECASE) and PACK in line
    ]
    assert "TOUCHED 0" in log, log[log.index("TOUCHED") :]


@pytest.fixture
def checkpoint(server: Server) -> Iterator[None]:
    """The name of one to choose, where the server has no other."""
    path = server.base / "models" / "checkpoints" / "whole.safetensors"
    path.parent.mkdir(exist_ok=True)
    path.touch()
    yield
    path.unlink()


@pytest.mark.parametrize("node", NODES)
def test_object_info_describes_the_node(server: Server, node: str, checkpoint: None) -> None:
    found: Any = server.get(f"/object_info/{node}")
    info = found[node]
    assert info["python_module"] == f"custom_nodes.{PACK}"
    assert info["category"].startswith("FuseStream/") and info["description"]
    if node == "FuseStreamDoctor":
        assert info["output"] == ["STRING"] and info["output_node"] and not info["input"]["required"]
        return
    if not node.endswith("Loader"):
        assert all(options["tooltip"] for _, options in info["input"]["required"].values())
        return
    assert info["output"] in (["MODEL"], ["CLIP"], ["VAE"], ["MODEL", "CLIP", "VAE"])
    for _, options in info["input"]["required"].values():
        assert options["tooltip"]
        assert any(name.endswith(".safetensors") for name in options["options"]), "the files of its folder are offered"


@pytest.mark.parametrize("node", NODES)
def test_help_page_is_served(server: Server, node: str) -> None:
    page = text(server, f"/extensions/{PACK}/docs/{node}.md")
    assert page == (ROOT / "nodes" / "web" / "docs" / f"{node}.md").read_text(encoding="utf-8")


def test_every_example_workflow_is_a_template_with_a_picture_and_a_twin(server: Server) -> None:
    listed: Any = server.get("/workflow_templates")
    assert set(listed[PACK]) == {path.stem for path in (ROOT / "workflows").glob("*.json")} == set(STEMS.values())
    classes: Any = server.get("/object_info")
    for name, stem in STEMS.items():
        address = f"/api/workflow_templates/{PACK}/{urllib.parse.quote(stem)}"
        graph = json.loads(text(server, f"{address}.json"))
        twin = ROOT / "workflows" / "api" / f"{name}.json"
        of_comfyui = name in {one.name for one in SWAPPED}  # these have none
        api = prompt(graph, classes) if of_comfyui else json.loads(twin.read_text(encoding="utf-8"))
        unknown = {node["class_type"] for node in api.values()} - set(classes)
        assert not unknown
        in_graph = sorted(node["type"] for node in graph["nodes"] if "Note" not in node["type"])
        assert of_comfyui or in_graph == sorted(node["class_type"] for node in api.values())
        with urllib.request.urlopen(f"{server.url}{address}.jpg", timeout=30) as picture:
            assert picture.read(3) == b"\xff\xd8\xff"
