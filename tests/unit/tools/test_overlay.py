"""Newer single files over a copy of a ComfyUI: those that fit are laid over it, the others refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bed import overlay, steps

TREE = {
    "main.py": "",
    "comfyui_version.py": '__version__ = "0.99.0"\n',
    "comfy/ops.py": "import torch\n\n\ndef cast(weight):\n    return weight\n\n\nclass Linear: ...\n",
    "comfy/model.py": "import comfy.ops\nfrom .ops import Linear\n\n\ndef load():\n    return comfy.ops.cast(Linear())\n",
    "comfy/late.py": "try:\n    from .ops import never_was\nexcept ImportError:\n    never_was = None\n",
    "custom_nodes/kept.txt": "of the user\n",
    ".git/HEAD": "ref\n",
}


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def laid(tmp_path: Path, files: dict[str, str]) -> tuple[dict[str, str], Path]:
    """What was refused, and the copy."""
    tree, target = written(tmp_path / "tree", TREE), tmp_path / "copy"
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    refused = overlay.lay_over(tree, written(tmp_path / "newer", files), target)
    assert {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()} == before, "the tree was touched"
    return refused, target


def test_what_fits_is_laid_over_a_copy_that_says_so(tmp_path: Path) -> None:
    newer = {
        "comfy/model.py": "import comfy.new\nfrom comfy.ops import Linear\n\nload = comfy.new.quick\n",
        "comfy/new.py": "def quick(): ...\n",
        "requirements.txt": "comfy-kitchen==9\n",
    }
    refused, target = laid(tmp_path, newer)
    assert refused == {}
    assert {name: (target / name).read_text() for name in newer} == newer
    assert (target / "comfy/ops.py").read_text() == TREE["comfy/ops.py"]
    assert not (target / ".git").exists()
    told = json.loads((target / overlay.NOTE).read_text())
    assert told == {"tree": "0.99.0", "laid_over": sorted(newer), "refused": {}}
    assert overlay.laid_over(target) == 3 and overlay.laid_over(tmp_path / "tree") == 0


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("comfy/ops.py", "def cast(weight): ...\n", "comfy/model.py takes Linear from comfy/ops.py"),
        ("comfy/ops.py", "class Linear: ...\n", "comfy/model.py takes cast from comfy/ops.py"),
        ("comfy/new.py", "from .ops import cast_later\n", "comfy/new.py takes cast_later from comfy/ops.py"),
        ("comfy/new.py", "import comfy.ops as o\n\no.wide()\n", "comfy/new.py takes wide from comfy/ops.py"),
        ("comfy/new.py", "def half(:\n", "does not compile"),
        ("comfyui_version.py", '__version__ = "1"\n', "the copy keeps its version"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, name: str, text: str, reason: str) -> None:
    """The rest is laid over all the same."""
    refused, target = laid(tmp_path, {name: text, "comfy/fits.py": "from .ops import cast, Linear\n"})
    assert refused.keys() == {name} and reason in refused[name]
    assert (target / "comfy/fits.py").exists()
    assert ((target / name).read_text() if (target / name).exists() else None) == TREE.get(name)


@pytest.mark.parametrize(
    "text",
    [
        "def __getattr__(name): ...\n",
        "from .other import cast, Linear\n",
        "if True:\n    cast = 1\ntry:\n    Linear = 2\nexcept OSError: ...\n",
        "def fill():\n    global cast, Linear\n",
        "globals().update(cast=1, Linear=2)\n",
    ],
)
def test_a_name_may_come_in_many_ways(tmp_path: Path, text: str) -> None:
    refused, _ = laid(tmp_path, {"comfy/ops.py": text, "comfy/other.py": TREE["comfy/ops.py"]})
    assert refused == {}


def test_who_needs_a_refused_file_is_refused_too(tmp_path: Path) -> None:
    newer = {
        "comfy/ops.py": "def cast(weight): ...\n\n\ndef wide(): ...\n",  # Linear is gone
        "comfy/new.py": "from .ops import wide\n",
    }
    refused, target = laid(tmp_path, newer)
    assert refused.keys() == newer.keys() and not (target / "comfy/new.py").exists()


def test_only_its_own_copies_are_replaced(tmp_path: Path) -> None:
    _, target = laid(tmp_path, {"comfy/new.py": "x = 1\n"})
    laid(tmp_path, {"comfy/new.py": "x = 2\n"})
    assert (target / "comfy/new.py").read_text() == "x = 2\n"
    (target / overlay.NOTE).unlink()
    with pytest.raises(steps.SetupFailed, match="no copy that this command made"):
        laid(tmp_path, {"comfy/new.py": "x = 3\n"})
    with pytest.raises(steps.SetupFailed, match="is no ComfyUI"):
        overlay.lay_over(tmp_path / "newer", tmp_path / "newer", tmp_path / "other")
