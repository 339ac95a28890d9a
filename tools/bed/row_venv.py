"""A row's virtual environment, in `.cache/rows`: its own packages over the pinned environment, or all of them anew.

What lies over it comes first on Python's path; the pinned environment itself stays as it is.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from . import comfyui, environment, steps
from .paths import Bed
from .rows import Row

PINNED = re.compile(r"^\s*([\w.-]+)\s*==\s*([\w.+!-]+)")
NAME = re.compile(r"^\s*([\w.-]+)")
TEMPLATES = "comfyui-workflow-templates"  # which pins packages of its own, whose names begin so


def bed_of(bed: Bed, row: Row, folder: Path) -> Bed:
    """Where the row of this ComfyUI folder has its environment: made and filled, or the pinned one."""
    if row.name == "pinned":
        return bed
    version = comfyui.version(folder)
    name = row.name if version == comfyui.VERSION and row.name != "tree" else f"{row.name}-{version}"
    home = bed.cache / "rows" / name
    own = replace(bed, venv=home, cache=bed.cache / "rows" / "work", constraints=home.with_name(f"{name}.constraints"))
    asked = home.with_name(f"{name}.requirements")
    home.parent.mkdir(parents=True, exist_ok=True)
    wanted = requirements(folder, row)
    asked.write_text("\n".join(wanted) + "\n", encoding="utf-8")
    kept = constraints(bed.constraints.read_text(encoding="utf-8").splitlines(), wanted)
    own.constraints.write_text("\n".join(kept) + "\n", encoding="utf-8")
    if row.own_torch:
        environment.make_venv(own)
        environment.install_packages(own, asked)
    else:
        _lay_over(bed, own, asked)
    return own


def requirements(folder: Path, row: Row) -> list[str]:
    """What the ComfyUI in `folder` asks for, with the row's pins in place of its own."""
    lines = (folder / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pinned = {plain(name) for name in row.pins}
    others = [line for line in lines if (found := NAME.match(line)) and plain(found.group(1)) not in pinned]
    return [*others, *(f"{name}=={version}" for name, version in row.pins.items())]


def constraints(pinned: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """The pinned constraints, less those that what is `wanted` pins otherwise."""
    asked, here = _pins(wanted), _pins(pinned)
    changed = {name for name, version in asked.items() if here.get(name, version) != version}

    def goes(line: str) -> bool:
        found = PINNED.match(line)
        name = plain(found.group(1)) if found else ""
        return name in changed or (TEMPLATES in changed and name.startswith(TEMPLATES))

    return [line for line in pinned if not goes(line)]


def _pins(lines: Sequence[str]) -> dict[str, str]:
    return {plain(found.group(1)): found.group(2) for line in lines if (found := PINNED.match(line))}


def plain(name: str) -> str:
    """A package's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _lay_over(bed: Bed, own: Bed, asked: Path) -> None:
    """An environment that has the pinned one's packages, and before them those that `asked` wants otherwise."""

    def action() -> None:
        shutil.rmtree(own.venv, ignore_errors=True)
        steps.run([sys.executable, "-m", "venv", own.venv], "making the row's environment", f"Remove {own.venv}.")
        below = f"import site; site.addsitedir({str(site_packages(bed))!r})\n"
        (site_packages(own) / "pinned.pth").write_text(below, encoding="utf-8")
        command = [*environment.pip(own), "install", "--quiet", "--no-compile", "-c", own.constraints, "-r", asked]
        steps.run(command, "installing the row's packages", "Check that PyPI can be reached, then call again.")

    key = steps.key_of(sys.version, asked, own.constraints, (bed.stamps / "packages").read_text(encoding="utf-8"))
    steps.once(own.stamps / "packages", key, f"installing the packages of {own.venv.name}", action)


def site_packages(bed: Bed) -> Path:
    """Where the environment has its packages."""
    ask: list[str | Path] = [bed.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
