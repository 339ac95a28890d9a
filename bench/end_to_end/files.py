"""The files of weights that rows need: made at their first use, a user's own, or copied to a disk; and removed.

Standard library only.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path

from .disk import is_in_ram
from .real import Found, find, rows_with_files
from .rows import TITLES, Model, Row
from .storages import file_name


class Files:
    """make: writes a model's file in a storage. keep: whether files stay for another call. own: a user's folder of checkpoints."""

    def __init__(
        self,
        folder: Path,
        make: Callable[[Model, str], str],
        say: Callable[[str], None],
        *,
        keep: bool = False,
        anew: bool = False,
        own: Path | None = None,
    ) -> None:
        self.folder, self.make, self.say = folder, make, say
        self.keep, self.anew, self.own_folder = keep, anew, own
        self.paths: dict[tuple[Model, str, bool], str] = {}  # model, storage, on a disk
        self.made: set[str] = set()  # of these, what the bench may remove
        self.real: dict[tuple[Model, str], Path] = {}  # a user's own, which it may not

    def of(self, row: Row) -> dict[str, str]:
        """The paths of a row's models, made where they are not there yet."""
        found: dict[str, str] = {}
        for model, storage in row.files:
            key = (model, storage, row.cold)
            if key not in self.paths:
                real = self.real.get((model, storage))
                path = str(real) if real else self._made(model, storage)
                self.paths[key] = self._on_disk(path) if row.cold else path
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
        needed = {(*file, row.cold) for row in needed_by for file in row.files}
        for key in [key for key in self.paths if key not in needed]:
            path = self.paths.pop(key)
            kept = self.keep and Path(path).parent == self.folder
            if path in self.made and not kept and path not in self.paths.values():
                Path(path).unlink(missing_ok=True)

    def served_by_own(self, rows: Sequence[Row]) -> list[Row]:
        """Take the user's files from here on. Those of the rows that they serve."""
        served, self.real = rows_with_files(rows, self.own, self.say)
        return served

    @cached_property
    def own(self) -> list[Found]:
        """The user's checkpoints."""
        assert self.own_folder is not None
        found = find(self.own_folder, self.say)
        for one in found:
            self.say(f"{TITLES[one.model]}, {one.storage}: {one.path.name}")
        return found
