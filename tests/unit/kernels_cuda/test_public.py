"""What other packs and programs see of FuseStream: names that stay, the alias inside ComfyUI, the wheel outside of it."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from bed import wheel
from bed.depth import is_thorough
from fusestream.kernels_cuda import public
from fusestream.nodes import alias

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "modules.md").read_text(encoding="utf-8")
EXAMPLE, FUSING = re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)
# A name that goes from here, or means another thing, takes a new version.
NAMES = {
    "0.2.0": {
        "LEDGER",
        "FusedAttention",
        "FusedConvNormAct2d",
        "FusedFFN",
        "FusedFeedForward",
        "FusedGroupNormSiLU",
        "FusedInstanceNorm2d",
        "FusedLinearAttention",
        "FusedMultiheadAttention",
        "FusedOutputProjection",
        "FusedTransformerEncoderLayer",
        "FusedUpsampleConv2d",
        "KernelPolicy",
        "KernelRefused",
        "Line",
        "Table",
        "__version__",
        "fuse",
        "unfuse",
    }
}
# What a program says to the wheel, and what it must not have brought along.
TRIED = """
import sys
assert not {"comfy", "folder_paths", "fusestream.nodes", "fusestream.fusion"} & set(sys.modules)
assert fusestream.__version__ == VERSION and set(fusestream.__all__) <= set(dir(fusestream))
network = nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())).eval()
"""


def test_the_names_are_those_of_this_version() -> None:
    assert set(public.__all__) == NAMES[public.__version__]
    assert f'\nversion = "{public.__version__}"\n' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f"`{name}" in PAGE or f"fusestream.{name}" in PAGE for name in public.__all__ if name[0] not in "_LT")


def test_the_alias_has_the_names_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fusestream")
    alias.attach()
    import fusestream
    from fusestream import FusedAttention

    assert FusedAttention is public.FusedAttention and fusestream.__version__ == public.__version__
    with pytest.raises(AttributeError, match="fusestream has no 'FusedSoftmax'; there are LEDGER, FusedAttention"):
        _ = fusestream.FusedSoftmax
    with pytest.raises(ModuleNotFoundError, match="'fusestream' is not a package"):
        __import__("fusestream.anything")
    alias.attach()
    assert sys.modules["fusestream"] is fusestream


def test_the_example_of_the_page_runs_and_is_of_twenty_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len([line for line in EXAMPLE.splitlines() if line.strip()]) <= 20
    monkeypatch.delitem(sys.modules, "fusestream")
    alias.attach()
    with contextlib.redirect_stdout(io.StringIO()) as told:
        exec(EXAMPLE, {"__name__": "example"})
    assert told.getvalue().startswith("torch.Size([1, 384, 256])")
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
    with contextlib.redirect_stdout(io.StringIO()) as told:
        exec(FUSING, {"fusestream": sys.modules["fusestream"], "network": network})
    assert told.getvalue() == "0: Conv2d, ReLU -> FusedConvNormAct2d\n" and type(network[0]) is torch.nn.Conv2d


@pytest.mark.deep
def test_the_wheel_holds_what_a_program_needs(tmp_path: Path) -> None:
    """Unpacked somewhere, its package alone on the path: the page's example, and nothing of ComfyUI."""
    made = wheel.build(tmp_path)
    assert made.read_bytes() == wheel.build(tmp_path / "again").read_bytes()
    with zipfile.ZipFile(made) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
        [record] = [archive.read(name).decode() for name in names if name.endswith("RECORD")]
    assert {line.split(",")[0] for line in record.splitlines()} == set(names)
    assert "fusestream/kernels_cuda/prebuilt/kernels.tar.xz" in names
    assert not [name for name in names if name.startswith(("fusestream/nodes", "fusestream/fusion")) or ".pyc" in name]
    run(sys.executable, tmp_path, {"PYTHONPATH": str(tmp_path / "site")})


@pytest.mark.deep
def test_the_example_without_comfyui_runs(tmp_path: Path) -> None:
    example = ROOT / "docs" / "examples" / "without_comfyui.py"
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 50
    with zipfile.ZipFile(wheel.build(tmp_path)) as archive:
        archive.extractall(tmp_path / "site")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COMFYUI", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, example], cwd=tmp_path, env=kept | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "GroupNorm, SiLU -> FusedGroupNormSiLU" in done.stdout and "largest difference" in done.stdout


@pytest.mark.skipif(not is_thorough(), reason="dev.py test --thorough")
def test_the_wheel_in_a_bare_environment(tmp_path: Path) -> None:
    """pip installs it; torch is the one of the environment that runs the tests, seen through a path file."""
    made = wheel.build(tmp_path)
    bare = tmp_path / "bare"
    venv.create(bare, with_pip=True)
    python = bare / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    subprocess.run([python, "-m", "pip", "install", "--no-index", "--no-deps", "-q", made], check=True, timeout=300)
    [site] = [path for path in bare.rglob("site-packages") if (path / "fusestream").is_dir()]
    (site / "torch.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")
    run(str(python), tmp_path, {})


def run(python: str, folder: Path, variables: dict[str, str]) -> None:
    code = EXAMPLE + TRIED.replace("VERSION", repr(public.__version__)) + FUSING
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COMFYUI", "PYTHON"))}
    done = subprocess.run(
        [python, "-c", code], cwd=folder, env=kept | variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "0.0: Conv2d, BatchNorm2d, ReLU -> FusedConvNormAct2d" in done.stdout
