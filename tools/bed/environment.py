"""The virtual environment: made, filled with pinned packages, repaired after a kill.

uv installs the packages in a quarter of pip's time, from where pip is told to take them.
Where uv cannot, pip does.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from . import debian, steps
from .paths import Bed

OLDEST = (3, 10)
# pip's options, and the variables that tell uv the same.
SAME_FOR_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
# pip's options that do not change what is installed, or from where.
OF_NO_MATTER = {
    "break-system-packages", "cache-dir", "compile", "config-file", "disable-pip-version-check", "log", "no-cache-dir",
    "no-color", "no-compile", "no-input", "no-python-version-warning", "no-warn-script-location", "progress-bar", "quiet",
    "require-virtualenv", "retries", "root-user-action", "verbose",
}  # fmt: skip


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
        wanted = ["-c", bed.constraints, *(word for file in files for word in ("-r", file))]
        if _uv_installs(bed, wanted):
            return
        steps.say("note: uv cannot install the packages here; pip does, which takes minutes")
        remove_half_installed(bed)
        remedy = (
            "Check that PyPI can be reached and the disk has 10 GB free, then call again: it goes on where it stopped."
        )
        steps.run([*pip(bed), "install", "--quiet", "--no-compile", *wanted], "installing packages", remedy)

    key = steps.key_of(sys.version, *files, bed.constraints)
    steps.once(
        bed.stamps / "packages", key, "installing packages (torch and ComfyUI's; a minute or more, 6 GB)", action
    )


def pip(bed: Bed) -> list[str | Path]:
    return [bed.python, "-m", "pip", "--disable-pip-version-check", "--no-input"]


def _uv_installs(bed: Bed, wanted: list[str | Path]) -> bool:
    """Whether uv was to be had and has installed what is `wanted`."""
    try:
        install_with_uv(bed, wanted, ["--python", bed.python])
    except steps.SetupFailed:  # pip says what is wrong, should it meet the same
        return False
    return True


def install_with_uv(bed: Bed, wanted: Sequence[str | Path], where: Sequence[str | Path]) -> None:
    """Install what is `wanted` into the environment or the folder that uv's options `where` name.

    Its cache lies on the environment's disk. The environment gets links to the files in it, so no
    file is there twice. The cache is removed at the end; after a kill the next call goes on with it.
    """
    variables = uv_variables(pip_configuration(bed))
    if variables is None:
        raise steps.SetupFailed("installing packages: pip is configured here with options that uv does not know")
    home = bed.cache / "uv"
    tool = home / "tool"
    shutil.rmtree(tool, ignore_errors=True)  # of a killed call: pip does not replace what is there
    environment = {key: value for key, value in os.environ.items() if not key.startswith("UV_")}
    environment |= {**variables, "UV_CACHE_DIR": str(home / "cache"), "UV_NO_CONFIG": "1"}
    # As pip has it: no index comes before another. Else uv takes a package from the first that has it.
    environment["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    uv = tool / "bin" / ("uv.exe" if os.name == "nt" else "uv")
    get = [*pip(bed), "install", "--quiet", "--target", tool, "-c", bed.constraints, "uv"]
    remedy = "Check that PyPI can be reached and the disk has 10 GB free, then call again."
    try:
        steps.run(get, "getting uv", remedy)
        steps.run([uv, "pip", "install", "--quiet", *where, *wanted], "installing packages", remedy, environment)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def pip_configuration(bed: Bed) -> dict[str, str]:
    """What `pip install` is told by its files and variables, by the option's name."""
    said = subprocess.run([*pip(bed), "config", "list"], capture_output=True, text=True, check=False).stdout
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}  # a later one goes before
    for line in said.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in sections:
            sections[section][option] = str(ast.literal_eval(value))
    return {option: value for section in sections.values() for option, value in section.items()}


def uv_variables(configuration: dict[str, str]) -> dict[str, str] | None:
    """The variables that tell uv what pip's `configuration` says; None if uv knows no such option."""
    if configuration.keys() - SAME_FOR_UV.keys() - OF_NO_MATTER:
        return None
    variables = {}
    for option, variable in SAME_FOR_UV.items():
        if words := configuration.get(option, "").split():
            variables[variable] = ("," if option == "find-links" else " ").join(words)
    return variables


def remove_half_installed(bed: Bed) -> None:
    """Forget packages that a killed pip or uv left without all their files.

    Both take a package for installed when its .dist-info folder has METADATA. Last they write
    RECORD, the list of its files. Before that pip has none, and uv the wheel's, without INSTALLER.
    Without the folder they simply install the package again over what is there.
    """
    for folder in bed.venv.glob("[Ll]ib/**/site-packages/*.dist-info"):
        record = folder / "RECORD"
        if not record.is_file() or f"{folder.name}/INSTALLER," not in record.read_text(encoding="utf-8"):
            shutil.rmtree(folder)
