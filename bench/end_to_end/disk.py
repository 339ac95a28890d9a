"""Which kind of storage a folder is on. Standard library only."""

from __future__ import annotations

from pathlib import Path

IN_RAM = ("tmpfs", "ramfs")


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
