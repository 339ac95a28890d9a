"""`dev.py overlay TREE FILES TARGET`: a copy of a ComfyUI with newer single files over it, those that fit.

A file fits if it compiles, if the names that it takes from other modules are there, and if it has those that others take
from it; `fits.py` looks. What was laid over it, and what was refused and why, stands in the copy's `laid-over.json`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from . import comfyui, fits, steps
from .paths import Bed

NOTE = "laid-over.json"
NEVER = ("comfyui_version.py", "pyproject.toml")  # the copy stays of the version that most of it is
LEFT_OUT = shutil.ignore_patterns(".git", "__pycache__")
# Each module by itself, so that all that fail are told. As the tests have it: with no GPU.
IMPORTS = """
import importlib, json, sys
import comfy.cli_args
comfy.cli_args.args.cpu = True
failed = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed[name] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(failed))
"""


def lay_over(tree: Path, files: Path, target: Path) -> dict[str, str]:
    """Make the copy; gives the files that were refused, each with the reason."""
    version = comfyui.version(tree)
    if version is None:
        raise steps.SetupFailed(f"{tree} is no ComfyUI. Give the folder that has its main.py.")
    given = {path.relative_to(files).as_posix() for path in files.rglob("*") if path.is_file()}
    if not given:
        raise steps.SetupFailed(f"{files} has no files to lay over it.")
    if target.exists():
        if not (target / NOTE).exists():
            raise steps.SetupFailed(f"{target} is there, and no copy that this command made. Name another folder.")
        shutil.rmtree(target)
    refused = dict.fromkeys(given & set(NEVER), "the copy keeps its version")
    refused |= fits.refused(tree, {name: files / name for name in given - refused.keys()})
    shutil.copytree(tree, target, ignore=LEFT_OUT)
    note(target, version, given - refused.keys(), refused)
    for name in sorted(given - refused.keys()):
        _copy(files / name, target / name)
    return refused


def try_imports(bed: Bed, tree: Path, target: Path, refused: dict[str, str]) -> dict[str, str]:
    """Import what was laid over it, with this environment, and take back what fails; all that is refused now."""
    told = json.loads((target / NOTE).read_text(encoding="utf-8"))
    laid: set[str] = set(told["laid_over"])
    while failed := _failing(bed, target, laid):
        laid -= failed.keys()
        refused |= failed
        for name in failed:
            if (tree / name).exists():
                _copy(tree / name, target / name)
            else:
                (target / name).unlink()
        note(target, told["tree"], laid, refused)
    return refused


def _failing(bed: Bed, target: Path, laid: set[str]) -> dict[str, str]:
    modules = {fits.module(name): name for name in sorted(laid) if name.endswith(".py") and name != "main.py"}
    if not modules:
        return {}
    done = subprocess.run(
        [bed.python, "-c", IMPORTS, *modules], cwd=target, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise steps.SetupFailed(f"ComfyUI in {target} cannot be imported:\n{done.stderr[-1500:]}")
    failed: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return {modules[name]: said for name, said in failed.items()}


def note(target: Path, version: str, laid: set[str], refused: dict[str, str]) -> None:
    """Write into the copy what it is."""
    told = {"tree": version, "laid_over": sorted(laid), "refused": dict(sorted(refused.items()))}
    (target / NOTE).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def laid_over(folder: Path) -> int:
    """How many newer files this ComfyUI folder has over its version."""
    path = folder / NOTE
    return len(json.loads(path.read_text(encoding="utf-8"))["laid_over"]) if path.exists() else 0


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
