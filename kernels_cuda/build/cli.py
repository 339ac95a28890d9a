"""Build the device code and pack the archive.

    python kernels_cuda/build              compile what changed, write the archives in prebuilt/,
                                           report the flagged kernels
    python kernels_cuda/build --anew       compile everything, even if the archives there have it
                                           from these very sources
    python kernels_cuda/build --all        report every kernel
    python kernels_cuda/build --check      compile nothing; exit 1 and say so if an archive is stale
    python kernels_cuda/build --only norm_modulate --variant sm_75      compile these, do not pack

Needs three wheels and nothing else: ninja, nvidia-cuda-nvrtc-cu12, nvidia-cuda-runtime-cu12.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from ..binary import archive
from ..binary.arch import ONLY_FORCED
from ..binary.archive import FORCED, PREBUILT
from ..errors import ArchiveError, BuildError
from . import matrix, report
from .nvrtc import WHEELS, nvrtc
from .unit import Facts

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "kernels"
HERE = Path(__file__).resolve().parent
RELEASE_COMPILER = 12  # its cubins load from driver 525 on, those of 13 from 580 on


def ninja_command() -> str:
    """The wheel's ninja, else one on PATH."""
    try:
        from ninja import BIN_DIR  # noqa: PLC0415 - needed only to build

        return str(Path(BIN_DIR) / "ninja")
    except ImportError:
        found = shutil.which("ninja")
        if found is None:
            raise BuildError("ninja is not installed: pip install ninja") from None
        return found


def output(unit: str, variant: str, folder: Path = BUILD) -> Path:
    return folder / archive.member_name(variant, unit)


def ninja_file(pairs: list[tuple[str, str]], folder: Path = BUILD) -> str:
    """The ninja file of the build. The compiler's own scripts are inputs too, so that a change in
    them rebuilds everything."""

    def escape(path: Path | str) -> str:
        return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    tools = [
        HERE / "compile.py",
        HERE / "unit.py",
        HERE / "nvrtc.py",
        HERE / "matrix.py",
        HERE.parent / "binary" / "elf.py",
    ]
    implicit = " ".join(escape(tool) for tool in tools)
    lines = [
        "ninja_required_version = 1.5",
        f"compiler = {nvrtc().version}",  # in the command line, so that another compiler rebuilds everything
        "rule compile",
        f'  command = "{sys.executable}" "{HERE}" compile $unit $variant $out "$compiler"',
        "  description = $variant $unit",
        "  depfile = $out.d",
        "  deps = gcc",
    ]
    for unit, variant in pairs:
        target = escape(output(unit, variant, folder))
        lines += [
            f"build {target}: compile {escape(matrix.SOURCES / (unit + '.cu'))} | {implicit}",
            f"  unit = {unit}",
            f"  variant = {variant}",
        ]
    return "\n".join(lines) + "\n"


def compile_all(pairs: list[tuple[str, str]], jobs: int | None, folder: Path = BUILD) -> None:
    """Bring every (unit, variant) up to date, in parallel. Raises BuildError after ninja has shown
    the failures."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "build.ninja"
    script.write_text(ninja_file(pairs, folder))
    command = [ninja_command(), "-C", str(folder), "-f", str(script), "-k", "0"]
    if jobs:
        command += ["-j", str(jobs)]
    if subprocess.run(command, check=False, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}).returncode:
        raise BuildError("some units did not compile (see above)")


Built = dict[str, dict[str, tuple[bytes, dict[str, Facts]]]]


def collect(pairs: list[tuple[str, str]], folder: Path = BUILD) -> Built:
    built: Built = {}
    for unit, variant in pairs:
        out = output(unit, variant, folder)
        facts = json.loads(out.with_name(out.name + ".json").read_text())
        built.setdefault(variant, {})[unit] = (out.read_bytes(), facts)
    return built


def check(path: Path) -> int:
    try:
        manifest = archive.read_manifest(path)
    except ArchiveError as error:
        print(error)
        return 1
    if manifest.source_hash != matrix.source_hash():
        print(f"{path.name} is stale: built from {manifest.source_hash}, the sources are {matrix.source_hash()}")
        return 1
    print(f"{path.name} is current: {manifest.source_hash}, {manifest.compiler}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    cli.add_argument("--all", action="store_true", help="report every kernel, not only the flagged ones")
    cli.add_argument("--check", action="store_true", help="only say whether the archive matches the sources")
    cli.add_argument("--only", action="append", metavar="UNIT", help="compile this unit only; does not pack")
    cli.add_argument("--variant", action="append", help="compile this variant only; does not pack")
    cli.add_argument("--anew", action="store_true", help="keep nothing of the archives that are there")
    cli.add_argument("--jobs", type=int, help="compilations at a time (default: ninja decides)")
    cli.add_argument("--out", type=Path, default=PREBUILT, help="where the archive goes")
    options = cli.parse_args(arguments)
    if options.check:
        return max(check(path) for path in both(options.out))
    started = time.monotonic()
    pairs = [
        (unit, variant)
        for unit in options.only or matrix.units()
        for variant in matrix.variants(unit)
        if not options.variant or variant in options.variant
    ]
    selects = bool(options.only or options.variant)
    old = {} if selects or options.anew else kept(PREBUILT, pairs)
    anew = [(unit, variant) for unit, variant in pairs if unit not in old.get(variant, {})]
    try:
        compile_all(anew, options.jobs)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    built = collect(anew)
    built = {v: {**old.get(v, {}), **built.get(v, {})} for v in sorted({*old, *built}, key=_archive_order)}
    if selects:
        entries = {v: {u: {"kernels": facts} for u, (_, facts) in units.items()} for v, units in built.items()}
        print(report.table(archive.Manifest("", nvrtc().version, entries), everything=True))
        return 0
    if nvrtc().major > RELEASE_COMPILER:
        print(
            f"Warning: built with {nvrtc().version}, whose cubins need a newer driver than those of {RELEASE_COMPILER}.x. "
            f"For a release: pip install {WHEELS}"
        )
    for path, manifest in write_both(options.out, built, nvrtc().version):
        print(report.table(manifest, everything=options.all))
        raw = sum(entry["size"] for units in manifest.variants.values() for entry in units.values())
        print(
            f"{path.name}: {path.stat().st_size / 1024:.0f} KiB ({raw / 1024:.0f} unpacked), "
            f"{len(matrix.units())} units, {len(manifest.variants)} variants, sources {manifest.source_hash}, "
            f"{manifest.compiler}, {time.monotonic() - started:.1f} s"
        )
    return 0


def kept(path: Path, pairs: list[tuple[str, str]]) -> Built:
    """Code in the archives from these very sources, options and variants, by this compiler."""
    found: Built = {}
    for each in both(path):
        try:
            manifest, built = archive.read_all(each)
        except ArchiveError:
            continue  # this build replaces it
        if manifest.compiler != nvrtc().version:
            continue
        same = {unit for unit in matrix.units() if manifest.units.get(unit) == matrix.unit_hash(unit)}
        for variant, units in built.items():
            of_it = {unit: one for unit, one in units.items() if unit in same and (unit, variant) in pairs}
            found.setdefault(variant, {}).update(of_it)
    return found


def both(path: Path) -> tuple[Path, Path]:
    """The archive, and that of variants loaded by name alone."""
    return path, path.with_name(FORCED)


def write_both(path: Path, built: Built, compiler: str) -> list[tuple[Path, archive.Manifest]]:
    """Write each variant into its archive."""
    hashes = {unit: matrix.unit_hash(unit) for unit in matrix.units()}
    written = []
    for into, is_forced in zip(both(path), (False, True), strict=True):
        of_it = {variant: units for variant, units in built.items() if (variant in ONLY_FORCED) == is_forced}
        manifest = archive.write(into, of_it, source_hash=matrix.source_hash(), compiler=compiler, hashes=hashes)
        written.append((into, manifest))
    return written


def _archive_order(variant: str) -> tuple[bool, int, str]:
    return variant.startswith("compute_"), int("".join(c for c in variant if c.isdigit())), variant
