"""The files of weights that rows need: made at their first use, copied to a disk, removed.

Standard library only.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from .row_types import Model, Row
from .storages import file_name

IN_RAM = ("tmpfs", "ramfs")


class Files:
    """make: writes a model's file in a storage. keep: files stay for another call."""

    def __init__(
        self,
        folder: Path,
        make: Callable[[Model, str], str],
        say: Callable[[str], None],
        *,
        keep: bool = False,
        anew: bool = False,
    ) -> None:
        self.folder, self.make, self.say = folder, make, say
        self.keep, self.anew = keep, anew
        self.paths: dict[tuple[Model, str, bool], str] = {}  # model, storage, on a disk
        self.made: set[str] = set()  # of these, what the bench may remove

    def of(self, row: Row) -> dict[str, str]:
        """The paths of a row's models, made where they are not there yet."""
        found: dict[str, str] = {}
        for model, storage in row.files:
            key = (model, storage, row.is_cold)
            if key not in self.paths:
                path = self._made(model, storage)
                self.paths[key] = self._on_disk(path) if row.is_cold else path
            found[model] = self.paths[key]
        return found

    def _made(self, model: Model, storage: str) -> str:
        kept = self.folder / file_name(model, storage)  # from a call that kept its files
        path = str(kept) if kept.exists() and not self.anew else self.make(model, storage)
        self.made.add(path)
        return path

    def _on_disk(self, path: str) -> str:
        """A copy that a disk has to be asked for: what lies in RAM alone is never cold."""
        if not is_in_ram(Path(path)):
            return path
        folder = Path(tempfile.gettempdir()) / "fusestream-bench-cold"
        folder.mkdir(exist_ok=True)
        if is_in_ram(folder):
            raise SystemExit(f"{folder} lies in RAM too: set TMPDIR to a folder on a disk for the rows of cold files")
        self.say(f"{Path(path).name} is copied to {folder}, a disk")
        copied = str(shutil.copy(path, str(folder)))
        self.made.add(copied)
        return copied

    def drop(self, needed_by: Iterable[Row]) -> None:
        """Disks are small: what none of these rows needs goes, unless it is to be kept."""
        needed = {(*file, row.is_cold) for row in needed_by for file in row.files}
        for key in [key for key in self.paths if key not in needed]:
            path = self.paths.pop(key)
            kept = self.keep and Path(path).parent == self.folder
            if path in self.made and not kept and path not in self.paths.values():
                Path(path).unlink(missing_ok=True)


def is_in_ram(path: Path, mounts: str = "/proc/mounts") -> bool:
    """Whether what lies there has no disk behind it. Where the system does not tell, it has."""
    try:
        lines = Path(mounts).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    place, best = path.resolve(), ("", "")
    for line in lines:
        _, mounted, kind, *_ = line.split(" ")
        if place.is_relative_to(mounted) and len(mounted) >= len(best[0]):  # the later of two covers the first
            best = (mounted, kind)
    return best[1] in IN_RAM
