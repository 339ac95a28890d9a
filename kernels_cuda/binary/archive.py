"""The prebuilt archive: one `.tar.xz` that any tar can list, read here with the standard library
alone.

It holds `manifest.json` first, then `<variant>/<unit>.cubin` or `.ptx`, oldest cards first. The
manifest holds the hash of the sources, the compiler, and for every member its SHA-256 and its
kernels' registers, shared memory, spills, code and parameter sizes. Writing is deterministic: the
same code gives the same bytes.

Reading trusts nothing. A truncated or altered file gives one ArchiveError that says what is wrong.
The caller asks whether the sources match (device_code.py), and never runs stale code.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..atomic_file import write_atomically
from ..errors import ArchiveError
from .arch import is_ptx

PREBUILT = Path(__file__).resolve().parents[1] / "prebuilt" / "kernels.tar.xz"
FORCED = "forced.tar.xz"  # beside it in a contributor's pack: variants loaded by name alone
FORMAT = 1
LARGEST_MEMBER = 256 * 2**20

Filters = Sequence[Mapping[str, Any]]
# For a release. Instructions have 16 bytes, and one card's code resembles another's, megabytes
# later.
SMALLEST: Filters = (
    {"id": lzma.FILTER_LZMA2, "preset": 6 | lzma.PRESET_EXTREME, "lc": 0, "lp": 4, "pb": 4, "dict_size": 2**26},
)
QUICK: Filters = ({"id": lzma.FILTER_LZMA2, "preset": 0},)

# variant -> unit -> (code, kernel facts)
Built = Mapping[str, Mapping[str, tuple[bytes, dict[str, dict[str, int]]]]]


def member_name(variant: str, unit: str) -> str:
    return f"{variant}/{unit}.{'ptx' if is_ptx(variant) else 'cubin'}"


@dataclass(frozen=True)
class Manifest:
    source_hash: str
    compiler: str
    # variant -> unit -> {"sha256", "size", "kernels": {name: facts}}
    variants: dict[str, dict[str, Any]]
    # unit -> hash of what it alone was made from, so that a build keeps unchanged units
    units: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Unit:
    """One unit's code in the variant that serves this card."""

    variant: str
    code: bytes
    kernels: dict[str, dict[str, int]]


def write(
    path: Path,
    built: Built,
    *,
    source_hash: str,
    compiler: str,
    hashes: Mapping[str, str] | None = None,
    filters: Filters | None = SMALLEST,
) -> Manifest:
    """Pack compiled units; without filters, uncompressed. The file appears whole or not at all.
    hashes: of each unit's sources."""
    variants: dict[str, dict[str, Any]] = {}
    for variant, units in built.items():
        variants[variant] = {
            unit: {"sha256": hashlib.sha256(code).hexdigest(), "size": len(code), "kernels": kernels}
            for unit, (code, kernels) in sorted(units.items())
        }
    there = {unit for units in built.values() for unit in units}
    manifest = Manifest(
        source_hash, compiler, variants, {unit: own for unit, own in sorted((hashes or {}).items()) if unit in there}
    )
    head = json.dumps(
        {
            "format": FORMAT,
            "source_hash": source_hash,
            "compiler": compiler,
            "units": manifest.units,
            "variants": variants,
        },
        indent=1,
        sort_keys=False,
    ).encode()
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        _add(tar, "manifest.json", head)
        for variant, units in built.items():
            for unit, (code, _) in sorted(units.items()):
                _add(tar, member_name(variant, unit), code)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    write_atomically(
        path, raw.getvalue() if filters is None else lzma.compress(raw.getvalue(), filters=filters), partial
    )
    return manifest


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)  # owner, mode and time stay at their fixed defaults
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def _manifest(path: Path, data: bytes) -> Manifest:
    try:
        head = json.loads(data)
        if head["format"] != FORMAT:
            raise ArchiveError(f"{path.name} has format {head['format']}, this version reads {FORMAT}")
        manifest = Manifest(
            str(head["source_hash"]), str(head["compiler"]), dict(head["variants"]), dict(head.get("units", {}))
        )
        for units in manifest.variants.values():
            for entry in units.values():
                _ = (entry["sha256"], entry["size"], [dict(facts) for facts in entry["kernels"].values()])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArchiveError(f"{path.name}: its manifest cannot be read ({error!r})") from error
    return manifest


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of every member, in order, as a stream."""
    if path.exists() and not path.is_file():  # nobody may ever write to a pipe
        raise ArchiveError(f"{path.name} is no plain file")
    with tarfile.open(path, mode="r|xz" if path.suffix == ".xz" else "r|") as tar:
        for info in tar:
            if info.size > LARGEST_MEMBER:
                raise ArchiveError(f"{path.name}: {info.name} claims {info.size} bytes")
            file = tar.extractfile(info)
            if file is not None:
                yield info.name, file.read()


def read_manifest(path: Path) -> Manifest:
    return _read(path, lambda _: ())[0]


def read_units(path: Path, preference: Sequence[str]) -> tuple[Manifest, dict[str, Unit]]:
    """The manifest, and each unit's code in the first variant of `preference` that has it, checked
    against its hash."""

    def best(manifest: Manifest) -> Iterable[tuple[str, str]]:
        # Worst first, so that a better variant's entry replaces it.
        chosen = {unit: variant for variant in reversed(preference) for unit in manifest.variants.get(variant, {})}
        return [(variant, unit) for unit, variant in chosen.items()]

    manifest, found = _read(path, best)
    return manifest, {unit: Unit(variant, *one) for (variant, unit), one in found.items()}


def read_all(path: Path) -> tuple[Manifest, Built]:
    """The manifest and all code, checked as for a card. Used by the build."""
    manifest, found = _read(
        path, lambda known: [(variant, unit) for variant in known.variants for unit in known.variants[variant]]
    )
    return manifest, {
        variant: {unit: found[variant, unit] for unit in units} for variant, units in manifest.variants.items()
    }


def _read(
    path: Path, choose: Callable[[Manifest], Iterable[tuple[str, str]]]
) -> tuple[Manifest, dict[tuple[str, str], tuple[bytes, dict[str, dict[str, int]]]]]:
    """The manifest, and the code and kernel facts of each (variant, unit) that `choose` names."""
    manifest: Manifest | None = None
    found: dict[tuple[str, str], tuple[bytes, dict[str, dict[str, int]]]] = {}
    wanted: dict[str, tuple[str, str]] = {}  # member name -> (variant, unit)
    try:
        for name, data in _members(path):
            if manifest is None:
                if name != "manifest.json":
                    raise ArchiveError(f"{path.name} begins with {name}, not with its manifest")
                manifest = _manifest(path, data)
                wanted = {member_name(variant, unit): (variant, unit) for variant, unit in choose(manifest)}
            elif name in wanted:
                variant, unit = wanted.pop(name)
                entry = manifest.variants[variant][unit]
                if hashlib.sha256(data).hexdigest() != entry["sha256"]:
                    raise ArchiveError(f"{path.name}: {name} is not what the manifest says (its SHA-256 differs)")
                found[variant, unit] = data, entry["kernels"]
            if not wanted:
                break
    except FileNotFoundError as error:
        raise ArchiveError(f"{path.name} does not exist") from error
    except (tarfile.TarError, lzma.LZMAError, EOFError, OSError, ValueError, RecursionError) as error:
        raise ArchiveError(f"{path.name} is damaged ({error})") from error
    if manifest is None:
        raise ArchiveError(f"{path.name} is empty")
    if wanted:
        raise ArchiveError(f"{path.name} lacks {', '.join(sorted(wanted))}")
    return manifest, found
