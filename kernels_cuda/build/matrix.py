"""The build matrix: one unit per `.cu` file, one variant per architecture, and the options of both.

The source hash made here ties an archive to the sources beside it. It covers every `.cu` and
`.cuh`, the options and the matrix, so that code built in any other way is stale.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from ..binary.arch import EXTRA_CUBINS, VARIANTS, isa_class
from ..policy import ISA_CLASSES

SOURCES = Path(__file__).resolve().parents[1] / "src"

# --use_fast_math is left out on purpose, because it flushes denormals and drops NaN handling for
# the whole unit. A kernel that wants a fast intrinsic calls it by name.
OPTIONS = ("--std=c++17", "--device-as-default-execution-space")

# A unit may ask for more variants in its head: `// also built for: sm_86 sm_89`.
_EXTRA = re.compile(r"^// also built for: (.+)$", re.MULTILINE)
# Or be left out of a class: `// not built for: sm_61`.
_LEFT_OUT = re.compile(r"^// not built for: (.+)$", re.MULTILINE)
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def units(sources: Path = SOURCES) -> list[str]:
    return sorted(path.stem for path in sources.glob("*.cu"))


def variants(unit: str, sources: Path = SOURCES) -> list[str]:
    """All variants that a unit is built for."""
    source = (sources / f"{unit}.cu").read_text(encoding="utf-8")
    extra = _names(_EXTRA, source)
    for name in extra:
        if name not in EXTRA_CUBINS:
            raise ValueError(f"{unit}.cu asks for {name}; known extras are {', '.join(EXTRA_CUBINS)}")
    left_out = _names(_LEFT_OUT, source)
    for name in left_out:
        if name not in ISA_CLASSES:
            raise ValueError(f"{unit}.cu leaves out {name}; classes are {', '.join(ISA_CLASSES)}")
    return [variant for variant in (*VARIANTS, *extra) if isa_class(variant) not in left_out]


def _names(pattern: re.Pattern[str], source: str) -> list[str]:
    found = pattern.search(source)
    return found.group(1).replace(",", " ").split() if found else []


def headers(unit: str, sources: Path = SOURCES) -> list[Path]:
    """Our own headers that a unit includes, directly or not. Found here, because NVRTC writes no
    dependency files."""
    found: list[Path] = []
    waiting = [sources / f"{unit}.cu"]
    while waiting:
        for name in _INCLUDE.findall(waiting.pop().read_text(encoding="utf-8")):
            header = sources / name
            if header.exists() and header not in found:
                found.append(header)
                waiting.append(header)
    return sorted(found)


def unit_hash(unit: str, sources: Path = SOURCES) -> str:
    """The hash of what one unit is made from: its file, the headers that it includes, the options,
    its variants."""
    return _hashed((*OPTIONS, *variants(unit, sources)), (sources / f"{unit}.cu", *headers(unit, sources)))


def hash_sources(sources: Path = SOURCES) -> str:
    """The hash of what would be built now."""
    return _hashed((*OPTIONS, *VARIANTS), sorted((*sources.glob("*.cu"), *sources.glob("*.cuh"))))


def _hashed(settings: Iterable[str], files: Iterable[Path]) -> str:
    """Hash of settings and files. Line endings do not count, because some checkouts rewrite
    them."""
    digest = hashlib.sha256("\0".join(settings).encode())
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()[:16]


@lru_cache(maxsize=1)
def source_hash() -> str:
    """`hash_sources` of the pack's own sources, read once per process."""
    return hash_sources()
