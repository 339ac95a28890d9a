"""What a process holds: threads, open files, memory. Where the same work is done again and again, none of it grows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

# What comes and goes with the server's own connections and workers, and what an allocator keeps.
THREADS, FILES, BYTES = 4, 8, 200 << 20


@dataclass(frozen=True)
class Footprint:
    """Of one process. models: how often each file below the model folders is open."""

    threads: int
    files: int
    models: Counter[str]
    nbytes: int

    @classmethod
    def of(cls, process: int, models: Path) -> Footprint:
        found = psutil.Process(process)
        handles = found.num_handles() if psutil.WINDOWS else found.num_fds()
        paths = (Path(file.path) for file in found.open_files())
        is_open = Counter(path.name for path in paths if path.is_relative_to(models))
        return cls(found.num_threads(), handles, is_open, found.memory_info().rss)

    def grown(self, now: Footprint) -> list[str]:
        """What there is more of, in words."""
        found = []
        if now.threads > self.threads + THREADS:
            found.append(f"{self.threads} threads became {now.threads}")
        if now.files > self.files + FILES:
            found.append(f"{self.files} open files became {now.files}")
        if twice := {name: count for name, count in now.models.items() if count > 1}:
            found.append(f"open more than once: {twice}")
        if now.nbytes > self.nbytes + BYTES:
            found.append(f"{self.nbytes >> 20} MiB became {now.nbytes >> 20}")
        return found
