"""The rules of the house, read from the source: who may import whom, and what the README may promise."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Each folder, and the other folders of the pack it may import from.
MAY_IMPORT = {
    "nodes": {"fusion", "memory", "kernels_cuda"},
    "fusion": {"memory", "kernels_cuda", "gpu"},
    "memory": {"gpu"},
    "kernels_cuda": {"gpu"},
    "gpu": set(),
}
BELOW_FUSION = ("memory", "kernels_cuda", "gpu")
COMFYUI = {
    "comfy",
    "comfy_api",
    "comfy_execution",
    "comfy_extras",
    "folder_paths",
    "server",
    "execution",
    "node_helpers",
}
SOURCES = [path for folder in MAY_IMPORT for path in sorted((ROOT / folder).rglob("*.py"))]


def imported(path: Path, root: Path = ROOT) -> set[str]:
    """The absolute names a file imports, and its relative ones resolved to `pack/folder/...`."""
    package = path.relative_to(root).parent.parts
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module or "")
        elif isinstance(node, ast.ImportFrom):
            base = ("pack", *package)[: len(package) + 2 - node.level]
            tail = tuple(node.module.split(".")) if node.module else ()
            found |= {"/".join((*base, *tail, alias.name)) for alias in node.names}
    return found


def pack_folder(name: str) -> str | None:
    parts = name.split("/")
    return parts[1] if parts[0] == "pack" and len(parts) > 1 else None


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    allowed = MAY_IMPORT[folder] | {folder, None}
    wrong = {name for name in imported(path) if pack_folder(name) not in allowed}
    assert not wrong, f"{folder} may import from {sorted(MAY_IMPORT[folder]) or 'no other folder'}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pack_imports_itself_relatively(path: Path) -> None:
    wrong = {name for name in imported(path) if name.split(".")[0] in {*MAY_IMPORT, "fusestream"}}
    assert not wrong, "the pack's own modules are imported relatively: ComfyUI has a top-level `nodes` of its own"


@pytest.mark.parametrize(
    "path",
    [p for p in SOURCES if p.relative_to(ROOT).parts[0] in BELOW_FUSION],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_nothing_below_fusion_knows_comfyui(path: Path) -> None:
    wrong = {name for name in imported(path) if name.split(".")[0] in COMFYUI}
    assert not wrong


def test_the_rules_see_a_breach(tmp_path: Path) -> None:
    path = tmp_path / "memory" / "deep" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text("from ...fusion import load\nfrom ..file import y\nimport comfy.sd\nfrom . import z\n")
    found = imported(path, tmp_path)
    assert found == {"pack/fusion/load", "pack/memory/file/y", "comfy.sd", "pack/memory/deep/z"}
    assert {pack_folder(name) for name in found} == {"fusion", "memory", None}


def test_no_empty_placeholder_modules() -> None:
    modules = [path for path in SOURCES if path.name != "__init__.py"]
    empty = [path for path in modules if len(path.read_text(encoding="utf-8").split()) < 20]
    assert not empty


def test_ci_runs_the_commands_the_readme_gives() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    commands = [line for line in ci.splitlines() if line.startswith("python3 ")]
    assert commands == ["python3 dev.py test"]
    assert all(re.search(rf"^{re.escape(command)}$", readme, re.MULTILINE) for command in commands)


def test_readme_names_only_commands_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    dev = (ROOT / "dev.py").read_text(encoding="utf-8")
    for command in set(re.findall(r"dev\.py (\w+)", readme)):
        assert f'"{command}":' in dev, command
