"""The virtual environment: made, filled with pinned packages, repaired after a kill."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

from . import debian, steps
from .paths import Bed

OLDEST = (3, 10)


def make_venv(bed: Bed) -> None:
    """An empty virtual environment at `bed.venv`."""
    if sys.version_info < OLDEST:
        raise steps.SetupFailed(
            f"Python {sys.version.split()[0]} is too old. Call dev.py with Python {OLDEST[0]}.{OLDEST[1]} or newer."
        )

    def action() -> None:
        if importlib.util.find_spec("ensurepip") is None:
            if not debian.can_install():
                raise steps.SetupFailed(
                    "Python lacks its venv module. Install the package python3-venv and call again."
                )
            debian.install("installing python3-venv", "python3-venv")
        shutil.rmtree(bed.venv, ignore_errors=True)
        remedy = f"Remove {bed.venv} and call again."
        steps.run([sys.executable, "-m", "venv", bed.venv], "making the virtual environment", remedy)

    steps.once(bed.stamps / "venv", steps.key_of(sys.version), f"making a virtual environment in {bed.venv}", action)


def install_packages(bed: Bed, *further: Path) -> None:
    """Install the bed's requirements and those in the files `further`, all under the bed's constraints."""
    files = [bed.requirements, *further]

    def action() -> None:
        remove_half_installed(bed)
        wanted = [word for file in files for word in ("-r", file)]
        command = [*pip(bed), "install", "--quiet", "--no-compile", "-c", bed.constraints, *wanted]
        remedy = (
            "Check that PyPI can be reached and the disk has 10 GB free, then call again: it goes on where it stopped."
        )
        steps.run(command, "installing packages", remedy)

    key = steps.key_of(sys.version, *files, bed.constraints)
    steps.once(bed.stamps / "packages", key, "installing packages (torch and ComfyUI's; a few minutes, 6 GB)", action)


def pip(bed: Bed) -> list[str | Path]:
    return [bed.python, "-m", "pip", "--disable-pip-version-check", "--no-input"]


def remove_half_installed(bed: Bed) -> None:
    """Forget packages that a killed pip left without a RECORD.

    pip takes a package for installed when its .dist-info folder has METADATA, but writes RECORD last. Without the
    folder it simply installs the package again over what is there.
    """
    for folder in bed.venv.glob("[Ll]ib/**/site-packages/*.dist-info"):
        if not (folder / "RECORD").is_file():
            shutil.rmtree(folder)
