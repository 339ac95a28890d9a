"""Where the machine code of this process comes from.

First the prebuilt archive, if it was made from exactly the sources beside it. A stale or damaged one is never run: that
is said aloud, and the code is then compiled here if NVRTC is importable (once; kept in the user's cache folder). With
neither, CodeUnavailable carries the reasons and every op is served by its reference.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .binary import archive, unpacked
from .binary.arch import ONLY_FORCED
from .build import matrix
from .build.nvrtc import nvrtc
from .build.unit import build
from .errors import ArchiveError, BuildError, CodeUnavailable
from .ledger import LEDGER


def cache_folder() -> Path:
    """Where this user's compiled code and measured winners live. FUSESTREAM_CACHE overrides."""
    override = os.environ.get("FUSESTREAM_CACHE")
    if override:
        return Path(override)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home()) / "FuseStream"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusestream"


@dataclass(frozen=True)
class DeviceCode:
    """Every unit's code for one kind of card, and where it came from."""

    units: dict[str, archive.Unit]
    source_hash: str
    origin: str


def load(preference: list[str], prebuilt: Path | None = None, cache: Path | None = None) -> DeviceCode:
    """Each unit in the first of these variants (best first) that can be had."""
    path = prebuilt or _archive_of(preference)
    cache = cache or cache_folder()
    try:
        return _from_archive(path, preference, "prebuilt archive", cache)
    except ArchiveError as error:
        reason = str(error)
    LEDGER.say_once(f"Prebuilt kernels are not used: {reason}. Compiling them here instead.")
    try:
        return _compiled_here(preference[0], cache)
    except (BuildError, ArchiveError, OSError) as error:
        message = f"{reason}; compiling them here is not possible either: {error}"
        LEDGER.say_once(f"No kernels: {message}. Reference implementations serve every operation.")
        raise CodeUnavailable(message) from error


def _archive_of(preference: list[str]) -> Path:
    path = Path(os.environ.get("FUSESTREAM_ARCHIVE") or archive.PREBUILT)
    return path.with_name(archive.FORCED) if set(preference) <= set(ONLY_FORCED) else path


def _from_archive(path: Path, preference: list[str], origin: str, cache: Path) -> DeviceCode:
    current = matrix.source_hash()
    manifest, units = unpacked.read_units(path, preference, cache)
    if manifest.source_hash != current:
        raise ArchiveError(
            f"{path.name} is stale: it was built from sources {manifest.source_hash}, the sources here are {current}"
        )
    if not units:
        raise ArchiveError(f"{path.name} holds none of {', '.join(preference)}")
    return DeviceCode(units, current, f"{origin}, {manifest.compiler}")


_building = threading.Lock()


def _compiled_here(variant: str, cache: Path) -> DeviceCode:
    """Compile every unit for one variant, or reuse what was compiled before."""
    compiler, source_hash = nvrtc(), matrix.source_hash()
    path = cache / f"kernels-{source_hash}-{variant}.tar.xz"
    with _building:
        try:
            return _from_archive(path, [variant], "compiled here", cache)
        except ArchiveError as error:
            if path.exists():
                LEDGER.say_once(f"{path} cannot be used ({error}); the kernels are compiled again")
        names = [unit for unit in matrix.units() if variant in matrix.variants(unit)]
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:  # NVRTC runs outside the GIL
            built = dict(zip(names, pool.map(lambda unit: build(unit, variant), names), strict=True))
        packed = {unit: (one.code, one.kernels) for unit, one in built.items()}
        archive.write(
            path, {variant: packed}, source_hash=source_hash, compiler=compiler.version, filters=archive.QUICK
        )
        return _from_archive(path, [variant], "compiled here", cache)
