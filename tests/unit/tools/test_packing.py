"""What the Comfy Registry packs: all that runs and nothing else, small enough, and whole without the rest of the repository."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bed import steps
from bed.depth import is_thorough
from bed.paths import Bed

ROOT = Path(__file__).resolve().parents[3]
KERNELS = "kernels_cuda/prebuilt/kernels.tar.xz"  # of which every card gets all
MOST_BYTES, MOST_KERNELS, MOST_BESIDE_KERNELS = 11 * 2**20, 10_000_000, 2_300_000
RUNS = {
    "__init__.py", "fusion", "gpu", "kernels_cuda", "locales", "memory", "nodes", "subgraphs", "workflows",
    "CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", ".comfyignore", ".gitignore",
    "checkpoints",  # the example of a style alone
}  # fmt: skip
COMFY_CLI = "comfy-cli==1.23.0"  # what a publisher calls
# As ComfyUI loads a pack; then all that its nodes import when they run.
LOAD = """
import asyncio, importlib, importlib.util, sys
from pathlib import Path
folder = Path(sys.argv[1])
sys.path.insert(0, sys.argv[2])
sys.argv = sys.argv[:1]
import comfy.cli_args
comfy.cli_args.args.cpu = True
spec = importlib.util.spec_from_file_location("packed", folder / "__init__.py", submodule_search_locations=[str(folder)])
pack = sys.modules["packed"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pack)
extension = asyncio.run(pack.comfy_entrypoint())
nodes = asyncio.run(extension.get_node_list())
assert all(node.GET_SCHEMA().node_id.startswith("FuseStream") for node in nodes)
for part in ("nodes", "fusion", "memory", "kernels_cuda", "gpu"):
    for path in sorted((folder / part).rglob("*.py")):
        names = path.relative_to(folder).with_suffix("").parts
        if "__main__" not in names and "build" not in names:
            importlib.import_module(".".join(("packed", *names)).removesuffix(".__init__"))
from packed.fusion.networks.style.load import EXAMPLES
assert len(list(EXAMPLES.glob("*.safetensors"))) == 1
print(len(nodes), "nodes")
"""


def git(*arguments: str, told: str = "") -> list[str]:
    """Paths. That none is found is told as an error."""
    command = ["git", "-c", f"core.excludesFile={ROOT / '.comfyignore'}", *arguments]
    said = subprocess.run(command, cwd=ROOT, input=told, capture_output=True, text=True, check=False)
    assert said.returncode in (0, 1), said.stderr
    return [path for path in said.stdout.split("\0") if path]


@pytest.fixture(scope="module")
def packed() -> list[str]:
    """The paths of what is packed: the repository's files but those that `.comfyignore` names."""
    every = git("ls-files", "-z")
    ignored = set(git("check-ignore", "--no-index", "--stdin", "-z", told="\0".join(every)))
    return [path for path in every if path not in ignored and (ROOT / path).is_file()]


def test_only_what_runs_is_packed(packed: list[str]) -> None:
    assert {path.split("/")[0] for path in packed} <= RUNS
    assert [path for path in packed if path.startswith("checkpoints/")] == [
        "checkpoints/trained/style_ink_fp16.safetensors"
    ]
    assert KERNELS in packed
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "nodes" / "web").rglob("*.*")}
    assert pages and pages <= set(packed), "help pages, their pictures and scripts"
    assert not [path for path in packed if path.startswith("workflows/api/")]


def test_it_is_small(packed: list[str]) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in packed:
            archive.write(ROOT / path, path)
        kernels = archive.getinfo(KERNELS).compress_size
    told = f"{content.tell() / 2**20:.2f} MiB, {kernels / 2**20:.2f} of them kernels"
    assert content.tell() < MOST_BYTES and kernels < MOST_KERNELS, told
    assert content.tell() - kernels < MOST_BESIDE_KERNELS, told


@pytest.mark.skipif(not is_thorough(), reason="imports every module")
def test_it_needs_nothing_that_is_not_packed(packed: list[str], tmp_path: Path) -> None:
    for path in packed:
        if path.endswith((".py", ".json", ".cu", ".cuh", ".safetensors")):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            os.link(ROOT / path, tmp_path / path)
    command = [sys.executable, "-c", LOAD, str(tmp_path), os.environ["COMFYUI_PATH"]]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert said.returncode == 0 and re.search(r"\d+ nodes", said.stdout), said.stderr


@pytest.mark.skipif(not is_thorough(), reason="installs comfy-cli, in an environment of its own")
def test_comfy_cli_packs_the_same_and_finds_no_fault(packed: list[str], tmp_path: Path) -> None:
    """`comfy node pack` in a repository of these files, and what it packed through `comfy node validate`."""
    comfy = comfy_cli()
    tree, unpacked, home = tmp_path / "tree", tmp_path / "unpacked", tmp_path / "home"
    for path in git("ls-files", "-z"):
        if (ROOT / path).is_file():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            os.link(ROOT / path, tree / path)
    home.mkdir()
    path = f"{comfy.parent}{os.pathsep}{os.environ['PATH']}"  # it calls its own ruff
    env = {**os.environ, "HOME": str(home), "DO_NOT_TRACK": "1", "PATH": path}

    def call(*command: str | Path, folder: Path) -> str:
        said = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert said.returncode == 0, f"{said.stdout}\n{said.stderr}"
        return said.stdout + said.stderr

    call("git", "init", "--quiet", folder=tree)
    call("git", "add", "--all", "--force", folder=tree)
    call(comfy, "--skip-prompt", "node", "pack", folder=tree)
    zipped = tree / "node.zip"
    assert zipped.stat().st_size < MOST_BYTES
    with zipfile.ZipFile(zipped) as archive:
        assert sorted(archive.namelist()) == sorted(packed)
        archive.extractall(unpacked)
    assert "All validation checks passed" in call(comfy, "--skip-prompt", "node", "validate", folder=unpacked)


def comfy_cli() -> Path:
    """Its command, in an environment that is kept."""
    bed = Bed()
    venv = bed.cache / "comfy-cli"
    bin_ = venv / ("Scripts" if os.name == "nt" else "bin")

    def install() -> None:
        remedy = f"Check that PyPI can be reached, remove {venv} and call again."
        steps.run([sys.executable, "-m", "venv", "--clear", venv], "making an environment for comfy-cli", remedy)
        quietly = ["--disable-pip-version-check", "--quiet", "-c", bed.constraints]
        steps.run([bin_ / "python", "-m", "pip", "install", *quietly, COMFY_CLI], "installing comfy-cli", remedy)

    key = steps.key_of(sys.version, COMFY_CLI, bed.constraints)
    steps.once(venv / ".installed", key, "installing comfy-cli (half a minute, 0.4 GB)", install)
    return bin_ / "comfy"


def test_the_registry_is_told_where_all_of_it_is() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for key in ("Repository", "Documentation", '"Bug Tracker"', "Icon", "Banner"):
        assert re.search(rf'^{key} = "https://', project, re.MULTILINE), key
    for name, shape in (("icon", 1), ("banner", 21 / 9)):
        picture = (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8")
        width, height = (int(size) for size in re.search(r'width="(\d+)" height="(\d+)" role', picture).groups())  # type: ignore[union-attr]
        assert width / height == pytest.approx(shape, rel=0.01)
        assert f"docs/images/{name}.svg" in project
