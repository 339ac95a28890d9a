"""Which ComfyUI the pack needs, and the message for an older one.

Checked before anything of ComfyUI's is used. Otherwise an older one would fail node by node, with
errors that name an argument of some function.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

OLDEST = "0.30"
# All of these ran the pack's tests: docs/comfyui-versions.md has the results.
RUN_WITH = ("0.30.0", "0.33.0")


class OldComfyUI(ImportError):
    """ComfyUI shows the words after the name of the pack, and goes on without it."""

    __module__ = "fusestream"


def version() -> str | None:
    """The version of the running ComfyUI; None: it does not tell, or there is none."""
    try:
        return str(importlib.import_module("comfyui_version").__version__)
    except (ImportError, AttributeError):
        return None


def version_of(folder: Path) -> str | None:
    """The version of the ComfyUI in a folder; None: it does not tell."""
    match = re.search(r'__version__\s*=\s*"([^"]+)"', (folder / "comfyui_version.py").read_text(encoding="utf-8"))
    return match[1] if match else None


def is_too_old(found: str) -> bool:
    """Whether a version is too old. One that cannot be read is taken for a newer one."""
    numbers = re.match(r"v?(\d+)\.(\d+)", found)
    return numbers is not None and tuple(map(int, numbers.groups())) < tuple(map(int, OLDEST.split(".")))


def refuse_older() -> None:
    """Raise in a ComfyUI that is too old. Does nothing where there is none (a type checker, a test
    or a bench that only reads the pack), or where it does not tell its version."""
    found = version()
    if found is None and importlib.util.find_spec("folder_paths") and not importlib.util.find_spec("comfy_api"):
        found = "one from before it told its version"
    elif found is None or not is_too_old(found):
        return
    raise OldComfyUI(
        f"FuseStream needs ComfyUI {OLDEST} or newer, this is {found}. Update ComfyUI and start it again. Until then it runs "
        "without FuseStream's nodes, and nothing else is changed."
    )


def pack_version() -> str:
    """The pack's version, from pyproject.toml."""
    project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    return next(line.split('"')[1] for line in project.splitlines() if line.startswith("version"))
