"""An archive's code for one kind of card, kept unpacked in the user's cache folder.

Unpacking takes a fifth of a second (xz is small, not quick), and the first step of the first video
after every start waits for it. The copy is an uncompressed archive of the same format, with the
code that this card takes, and is read with the same checks. If anything is wrong with it, the
archive itself is read instead.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path

from ..errors import ArchiveError
from ..ledger import LEDGER
from . import archive


def read_units(path: Path, preference: Sequence[str], cache: Path) -> tuple[archive.Manifest, dict[str, archive.Unit]]:
    """`archive.read_units` of this archive, from the copy if possible. The manifest then tells only
    of the variants that are used."""
    kept = _place(path, preference, cache)
    try:
        return archive.read_units(kept, preference)
    except ArchiveError as error:
        if kept.exists():
            LEDGER.say_once(f"{kept} cannot be used ({error}); it is unpacked again")
    manifest, units = archive.read_units(path, preference)
    if units:
        # a full disk, or a folder that is not ours: it will be unpacked again
        with contextlib.suppress(OSError):
            _keep(kept, manifest, units)
    return manifest, units


def _place(path: Path, preference: Sequence[str], cache: Path) -> Path:
    try:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ArchiveError(f"{path.name} cannot be read ({error})") from error
    card = hashlib.sha256(" ".join(preference).encode()).hexdigest()
    return cache / f"unpacked-{content[:16]}-{card[:8]}.tar"


def _keep(kept: Path, manifest: archive.Manifest, units: dict[str, archive.Unit]) -> None:
    built: dict[str, dict[str, tuple[bytes, dict[str, dict[str, int]]]]] = {}
    for name, unit in units.items():
        built.setdefault(unit.variant, {})[name] = unit.code, unit.kernels
    archive.write(kept, built, source_hash=manifest.source_hash, compiler=manifest.compiler, filters=None)
    of_this = kept.name.rsplit("-", 1)[0]
    for other in kept.parent.glob("unpacked-*.tar*"):
        if not other.name.startswith(of_this):
            other.unlink(missing_ok=True)  # from an earlier version of the pack, or begun by a process that was killed
