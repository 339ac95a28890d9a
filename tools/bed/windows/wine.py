"""Wine: found or installed, its folder made, a program of Windows' Python run in it.

Drive w: is the repository, x: a ComfyUI that lies elsewhere. Wine's z:, the machine's root, is taken
away: a file's resolved path would be another on it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PureWindowsPath

from .. import debian, steps
from ..paths import ROOT

COMPILER = "x86_64-w64-mingw32-gcc"
PACKAGES = ("wine", "wine64", "gcc-mingw-w64-x86-64-win32")
DRIVER = ROOT / "tests" / "stand_in_driver" / "driver.c"
WORDS = "the tests on Windows' Python need Wine 8 or newer and mingw's compiler"
# Microsoft's own, because Wine's lack functions that numpy and torch call.
NATIVE = "ucrtbase,vcruntime140,vcruntime140_1,msvcp140,msvcp140_1,msvcp140_2,concrt140"


def find_or_install() -> None:
    """See that Wine and the compiler are here."""
    missing = [name for name in ("wine", COMPILER) if shutil.which(name) is None]
    if not missing:
        return
    if not debian.can_install():
        raise steps.SetupFailed(
            f"{WORDS}; missing here: {', '.join(missing)}. On Debian or Ubuntu: apt-get install {' '.join(PACKAGES)}."
        )
    steps.say("installing Wine and mingw's compiler (500 MB)")
    debian.install("installing Wine", *PACKAGES)
    if still := [name for name in missing if shutil.which(name) is None]:
        raise steps.SetupFailed(f"{WORDS}; Debian's packages did not bring {', '.join(still)}.")


def environment(home: Path) -> dict[str, str]:
    """Of every program of Wine in this bed."""
    return {
        **os.environ,
        "WINEPREFIX": str(home / "prefix"),
        "WINEARCH": "win64",
        "WINEDEBUG": "-all",
        "WINEDLLOVERRIDES": f"mscoree,mshtml=;{NATIVE}=n,b",
        "KMP_AFFINITY": "disabled",  # OpenMP asks for processor groups, which Wine does not tell
    }


def make_prefix(home: Path) -> None:
    """Wine's own folder, as Windows 10's."""
    shutil.rmtree(home / "prefix", ignore_errors=True)
    remedy = f"Remove {home} and call again."
    for command in (["wineboot", "-i"], ["winecfg", "-v", "win10"]):
        steps.run(["wine", *command], "making Wine's folder", remedy, environment(home))
    _drives(home).joinpath("z:").unlink(missing_ok=True)


def _drives(home: Path) -> Path:
    return home / "prefix" / "dosdevices"


def build_driver(home: Path) -> Path:
    """The folder with the tests' stand-in for the driver, as Windows loads it, and one that lacks what an older
    driver lacks."""
    folder = home / "driver"
    folder.mkdir(exist_ok=True)
    for name, more in (("driver", ()), ("older_driver", ("-DOLDER",))):
        # Windows' Python finds no library of the compiler's, so all is in one.
        command = [
            COMPILER,
            "-O1",
            "-std=gnu11",
            "-shared",
            "-static",
            *more,
            str(DRIVER),
            "-o",
            f"{folder / name}.dll",
        ]
        steps.run(command, "building the stand-in driver", f"Look at {DRIVER}.")
    return folder


def path_of(home: Path, path: Path) -> str:
    """A path of this machine as Windows' programs are told it: in the repository, or the one folder that lies
    elsewhere, which gets a drive."""
    drive, folder, within = ("w:", ROOT, path) if path.is_relative_to(ROOT) else ("x:", path, path)
    link = _drives(home) / drive
    link.unlink(missing_ok=True)
    link.symlink_to(folder)
    return f"{drive}\\{PureWindowsPath(within.relative_to(folder))}"


def run(home: Path, arguments: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run Windows' Python in this folder; what it says comes out here, its exit code back.

    Python refuses to start without an input that Wine knows, and with an output that is a file: so
    it gets an empty input and a pipe.
    """
    command = ["wine", path_of(home, home / "python" / "python.exe"), *arguments]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env={**environment(home), "PYTHONUNBUFFERED": "1", **variables},
    ) as process:
        assert process.stdout is not None
        while piece := process.stdout.read1():  # type: ignore[attr-defined]
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
    return process.returncode
