"""Windows' own Python under Wine: the tests on Windows' calls, on a Linux machine.

`python.py` makes the bed in `.cache/windows-...`, `portable.py` the portable ComfyUI of it, `wine.py` runs a program of it,
`under_wine.py` is pytest's plugin there: which tests Wine cannot run, and why.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from .. import steps
from ..paths import ROOT, Bed
from . import portable, python, wine
from .under_wine import LEFT_OUT

# What runs if no tests are named, in a quarter of an hour: the host side of everything, the families' blocks, the demo's
# video and runs over HTTP, a user's portable ComfyUI. Of fusion and of the server's tests, what takes a few minutes.
_OF_FUSION = ("files", "base", "estimate", "doctor", "identify", "weights", "families")
_OF_SERVER = ("test_demo", "test_runs", "test_windows_portable")
USUAL = (
    *(f"tests/unit/{folder}" for folder in ("memory", "checkpoints", "gpu", "kernels_cuda", "nodes")),
    *(f"tests/unit/fusion/{folder}" for folder in _OF_FUSION),
    *(f"tests/server/{file}.py" for file in _OF_SERVER),
)
LONGEST_TEST = 300  # seconds, after which pytest tells where each thread is, and ends


def run_tests(bed: Bed, comfyui: Path, env: dict[str, str], rest: Sequence[str]) -> int:
    """Pytest's exit code. env: the tests' variables, of which ours come before; rest: pytest's arguments."""
    home = python.made(bed, comfyui)
    empty_temp(home)
    are_named = any((ROOT / word.partition("::")[0]).exists() for word in rest)
    steps.say(f"Windows' Python {python.VERSION} under Wine; {len(LEFT_OUT)} tests and files are left out by name")
    command = [
        "-m", "pytest", "-p", "bed.windows.under_wine", "-p", "no:cacheprovider",
        "-o", f"faulthandler_timeout={LONGEST_TEST}", "-o", "faulthandler_exit_on_timeout=true",
        *([] if are_named else USUAL), *rest,
    ]  # fmt: skip
    variables = {
        **env,
        "COMFYUI_PATH": wine.path_of(home, comfyui),
        "PYTHONPATH": wine.path_of(home, ROOT / "tools"),
        "OMP_NUM_THREADS": str(os.cpu_count() or 1),
        **{name: wine.path_of(home, folder) for name, folder in made_beside(home, comfyui).items()},
    }
    return wine.run(home, command, variables)


def empty_temp(home: Path) -> None:
    """Remove what runs that were killed have left in Windows' temporary folder: gigabytes of model files."""
    for left in (home / "prefix" / "drive_c" / "users").glob("*/Temp/*"):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def made_beside(home: Path, comfyui: Path) -> dict[str, Path]:
    """What tests find by a variable of theirs, made anew."""
    return {
        "FUSESTREAM_STAND_IN_DLLS": wine.build_driver(home),
        "FUSESTREAM_WINDOWS_PORTABLE": portable.made(home, comfyui),
    }
