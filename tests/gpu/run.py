"""Run the GPU tests and write down what was run on what.

    python tests/gpu/run.py                     all of tests/gpu, then record.json
    python tests/gpu/run.py --sanitize          the short tests under each tool of compute-sanitizer as well, in shards
    python tests/gpu/run.py --sanitize only     ... and nothing else
    python tests/gpu/run.py --what-changed      only the files whose sources changed since they were recorded, or that failed
    python tests/gpu/run.py --file test_conv.py only these files, recorded
    python tests/gpu/run.py -k norm_modulate    anything else goes to pytest; a partial run is not recorded

Needs torch, pytest, hypothesis and numpy. record.json holds, per card: versions, the seed, and the outcome of every test file
with a hash of the sources that it tests.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import hashlib
import importlib.util
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any

import sanitizers

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "gpu" / "record.json"
LOGS = ROOT / "output" / "gpu-tests"  # what each file printed: of one that was cut short, too
HANGS = 120  # seconds of one test after which pytest prints where all threads are
# These measure times or the card's memory: nothing runs beside them.
MOST_LINES = 1500  # of a file in which something failed
ALONE = (
    "test_command_line.py", "test_graph.py", "test_kernel_system.py", "test_many_prompts.py", "test_modules_captured.py",
    "test_pager.py", "test_patcher.py", "test_soak.py", "test_two_cards.py", "test_wan_vae.py",
)  # fmt: skip
TIMED = "timed"  # the mark of tests of other files that do


def _bench_sources() -> Any:
    """bench/sources.py, which is of a package that a script is not in."""
    spec = importlib.util.spec_from_file_location("bench_sources", ROOT / "bench" / "sources.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SOURCES = _bench_sources()
NETWORKS = SOURCES.NETWORKS  # within fusion, and apart: no model knows of them
MODELS = ("gpu", "kernels_cuda", "memory", "fusion")
# What a file tests, if it is not the kernels alone.
TESTS = {
    "test_pager.py": ("gpu", "memory"),
    **dict.fromkeys(
        (
            "test_any_vae.py", "test_command_line.py", "test_compatibility.py", "test_flux2.py", "test_graph.py",
            "test_image_vae.py", "test_int8_block.py", "test_language_models.py", "test_live.py", "test_ltx2.py",
            "test_minimax_h3.py",
            "test_many_prompts.py", "test_operations.py", "test_packed_models.py", "test_patcher.py", "test_qwen3.py",
            "test_qwen3_vl.py", "test_qwen_image.py", "test_soak.py", "test_sparse_node.py", "test_trained_sparse.py",
            "test_two_cards.py", "test_umt5.py", "test_unet.py",
            "test_wan_attention.py", "test_wan_vae.py", "test_weights_elsewhere.py", "test_z_image.py",
        ),
        MODELS,
    ),
    **dict.fromkeys(("test_picture_nets.py", "test_style.py"), (*MODELS, NETWORKS)),
}  # fmt: skip


def sources_hash() -> dict[str, str]:
    """One hash per folder under test."""
    found = ((folder, SOURCES.digest(folder, ROOT, [NETWORKS])) for folder in MODELS)
    found = (*found, (NETWORKS, SOURCES.digest(NETWORKS, ROOT)))
    return {folder: digest for folder, digest in found if digest is not None}


class Outcomes:
    """A pytest plugin that counts outcomes and seconds per file. figures: what tests found and want to be kept, by file."""

    def __init__(self) -> None:
        self.files: dict[str, Counter[str]] = {}
        self.seconds: Counter[str] = Counter()
        self.figures: dict[str, dict[str, Any]] = {}
        self.skips: set[str] = set()
        self.seed = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        file = report.nodeid.split("::")[0]
        self.seconds[file] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self.files.setdefault(file, Counter())[report.outcome] += 1
            if report.user_properties:
                self.figures.setdefault(file, {}).update(report.user_properties)
            if report.outcome == "skipped":
                self.skips.add(str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr))

    def pytest_collection_finish(self) -> None:
        module = next(
            (
                m
                for name, m in sys.modules.items()
                if name.endswith("gpu.conftest")
                or getattr(m, "__file__", None) == str(Path(__file__).with_name("conftest.py"))
            ),
            None,
        )
        self.seed = str(getattr(module, "SEED", ""))

    def merge(self, found: dict[str, Any]) -> None:
        for file, count in found["files"].items():
            self.files.setdefault(file, Counter()).update(count)
        self.seconds.update(found["seconds"])
        self.figures |= found["figures"]
        self.skips |= set(found["skips"])
        self.seed = found["seed"]

    def without(self, files: Collection[str]) -> Outcomes:
        """These files are left out."""
        left = Outcomes()
        left.merge(self.as_json())
        left.files = {file: count for file, count in self.files.items() if file not in files}
        return left

    def as_json(self) -> dict[str, Any]:
        return {
            "files": self.files,
            "seconds": self.seconds,
            "figures": self.figures,
            "skips": sorted(self.skips),
            "seed": self.seed,
        }


def run_here(arguments: list[str], result: Path | None) -> tuple[int, Outcomes]:
    """pytest in this process; `result`: where another process waits for the outcomes."""
    import pytest

    outcomes = Outcomes()
    status = int(
        pytest.main(["-q", f"-ofaulthandler_timeout={HANGS}", "--rootdir", str(ROOT), *arguments], plugins=[outcomes])
    )
    if result:
        result.write_text(json.dumps(outcomes.as_json()))
    return status, outcomes


def run_apart(
    files: list[Path], jobs: int, arguments: list[str], folder: Path, save: Callable[[Outcomes], None]
) -> tuple[int, Outcomes]:
    """Each file in a process of its own, `jobs` at a time, under one seed; then what wants to be alone. Saved as they end."""
    outcomes, worst, one_at_a_time = Outcomes(), 0, Lock()
    timed = [file for file in files if file.name not in ALONE and f"pytest.mark.{TIMED}" in file.read_text()]
    to_come = {file.relative_to(ROOT).as_posix() for file in timed}  # of these a part has not run yet
    env = {**os.environ, "FUSESTREAM_SEED": os.environ.get("FUSESTREAM_SEED") or str(secrets.randbelow(2**31))}
    # Processes side by side share the cores: each with a thread per core, they would wait for each other.
    sharing = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}

    def one(file: Path, part: str = "", more: Mapping[str, str] = MappingProxyType({})) -> None:
        nonlocal worst
        result = folder / ("-".join((file.stem, *part.split())) + ".json")
        told = ("-m", part) if part else ()
        command = [sys.executable, str(Path(__file__)), "--result", str(result), str(file), *arguments, *told]
        LOGS.mkdir(parents=True, exist_ok=True)
        log = LOGS / f"{result.stem}.log"
        with log.open("w", encoding="utf-8") as out:
            done = subprocess.run(
                command, cwd=ROOT, env={**env, **more}, check=False, stdout=out, stderr=subprocess.STDOUT
            )
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        print("\n".join(lines[-MOST_LINES:] if done.returncode else lines[-1:]), flush=True)
        with one_at_a_time:
            worst = max(worst, abs(done.returncode))
            if result.exists():
                outcomes.merge(json.loads(result.read_text()))
            else:
                outcomes.files[file.relative_to(ROOT).as_posix()] = Counter(failed=1)
            save(outcomes.without(to_come))

    with ThreadPoolExecutor(jobs) as pool:
        side_by_side = partial(one, part=f"not {TIMED}", more=sharing)
        list(pool.map(side_by_side, [file for file in files if file.name not in ALONE]))
    for file in timed:
        to_come.discard(file.relative_to(ROOT).as_posix())
        one(file, TIMED)
    for file in files:
        if file.name in ALONE:
            one(file)
    return worst, outcomes


@functools.cache
def environment() -> dict[str, str]:
    import torch

    properties = torch.cuda.get_device_properties(0)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        check=False,
        capture_output=True,
        text=True,
    ).stdout.split("\n")[0]
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": driver,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": sys.version.split()[0],
    }


@functools.cache
def state_of_the_archive() -> str:
    check = [sys.executable, str(ROOT / "kernels_cuda" / "build"), "--check"]
    return subprocess.run(check, check=False, capture_output=True, text=True).stdout.strip()


def sources_of(file: str) -> dict[str, str]:
    """The hashes of what a test file tests, and of the file."""
    tested = TESTS.get(Path(file).name, ("gpu", "kernels_cuda"))
    own = hashlib.sha256(SOURCES.code_of(ROOT / file).encode()).hexdigest()[:16]
    return {**{folder: digest for folder, digest in sources_hash().items() if folder in tested}, "itself": own}


def stale_files(entry: dict[str, Any]) -> list[Path]:
    """Test files that never ran on this card, ran on other sources, or failed."""
    known, found = entry.get("files", {}), []
    for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        file = path.relative_to(ROOT).as_posix()
        if file not in known or known[file]["sources"] != sources_of(file) or known[file]["outcomes"].get("failed"):
            found.append(path)
    return found


def longest_first() -> list[Path]:
    """All test files: by the seconds that they took on any card, or else by their size."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    known: Counter[str] = Counter()
    for entry in record.values():
        for file, found in entry["files"].items():
            known[Path(file).name] = max(known[Path(file).name], found.get("seconds", 0))
    paths = (ROOT / "tests" / "gpu").glob("test_*.py")
    return sorted(paths, key=lambda file: (known[file.name], file.stat().st_size), reverse=True)


def unsanitized_files(entry: dict[str, Any], files: list[Path]) -> list[Path]:
    """Those that the sanitizers never saw with these kernels on this card, or found something in."""
    known = entry.get("compute-sanitizer", {})
    kernels = sources_hash()["kernels_cuda"]

    def is_clean(found: dict[str, str]) -> bool:
        ended_well: bool = all(found[tool].endswith(" 0 with errors") for tool in sanitizers.TOOLS)
        return ended_well and found["kernels_cuda"] == kernels

    names = {file: file.relative_to(ROOT).as_posix() for file in files}
    return [file for file, name in names.items() if name not in known or not is_clean(known[name])]


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")


def sanitize(files: list[Path], jobs: int) -> bool:
    """Run the sanitizers over these files and write down what each found in each. Returns whether all were clean."""
    kernels = sources_hash()["kernels_cuda"]

    def save(file: str, results: dict[str, sanitizers.Result]) -> None:
        found = {tool: str(result) for tool, result in results.items()}
        print(f"{file:44} {found}", flush=True)
        write_record(Outcomes(), {file: {"date": today(), "kernels_cuda": kernels, **found}})

    # Small files first: a run that is cut off has been through most of them.
    return sanitizers.run(sorted(files, key=lambda file: file.stat().st_size), ROOT, jobs, save)


def write_record(outcomes: Outcomes, sanitized: dict[str, dict[str, str]] | None = None) -> None:
    """What ran takes the place of what is known of these files; the rest stays. sanitized: what each tool found, by file."""
    here, archive = environment(), state_of_the_archive()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    before = record.get(here["gpu"], {})
    date = today()
    ran = {
        file: {
            "date": date,
            "seed": outcomes.seed,
            "sources": sources_of(file),
            "outcomes": dict(count),
            "seconds": round(outcomes.seconds[file]),
            **({"figures": found} if (found := outcomes.figures.get(file)) else {}),
        }
        for file, count in outcomes.files.items()
    }
    record[here["gpu"]] = {
        **here,
        "date": date,
        "archive": archive,
        "files": {file: entry for file, entry in {**before.get("files", {}), **ran}.items() if (ROOT / file).exists()},
        "skipped because": sorted(outcomes.skips | set(before.get("skipped because", []))),
        "compute-sanitizer": {**before.get("compute-sanitizer", {}), **(sanitized or {})},
    }
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def say_if_stale() -> int:
    """One line of warning for each card whose record is of other sources than these. Never a failure."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if not record:
        print("warning: the GPU tests have no record; run `python tests/gpu/run.py` on a GPU machine")
    for gpu, entry in record.items():
        stale = [path.name for path in stale_files(entry)]
        failed = sum(known["outcomes"].get("failed", 0) for known in entry["files"].values())
        if stale:
            print(f"warning: {', '.join(stale)}: not passed with these sources on {gpu} (last run {entry['date']})")
        if failed:
            print(f"warning: {failed} GPU tests failed when they ran on {gpu}; see record.json")
        if not stale:
            print(f"the GPU tests passed with these sources on {gpu} ({entry['date']})")
    return 0


def main() -> int:
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    cli.add_argument(
        "--sanitize",
        nargs="?",
        const="too",
        choices=("too", "only"),
        help="compute-sanitizer's four tools as well, or only them",
    )
    cli.add_argument("--stale", action="store_true", help="run nothing: say whether the record is of these sources")
    cli.add_argument("--what-changed", action="store_true", help="only files whose record is not of these sources")
    cli.add_argument("--file", action="append", metavar="NAME", help="only this file of tests/gpu; may be given again")
    cli.add_argument("--jobs", type=int, default=1, help="test files that run side by side")
    cli.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # one file, for run_apart
    options, rest = cli.parse_known_args()
    if options.stale:
        return say_if_stale()
    if options.result:
        return run_here(rest, options.result)[0]
    files = longest_first()
    if options.what_changed and RECORD.exists():
        known = json.loads(RECORD.read_text()).get(environment()["gpu"], {})
        files = (
            unsanitized_files(known, files)
            if options.sanitize == "only"
            else [f for f in files if f in stale_files(known)]
        )
    if options.file:
        files = [file for file in files if file.name in options.file]
    if options.sanitize == "only":
        return int(not sanitize(files, options.jobs))
    partial = any(argument.startswith(("-k", "-m", "tests/")) for argument in rest)

    def save(outcomes: Outcomes) -> None:
        if not partial and any(count["passed"] + count["failed"] for count in outcomes.files.values()):
            write_record(outcomes)

    # What is recorded is recorded file by file: a run that is cut short keeps what it has.
    if options.jobs > 1 or not partial:
        with tempfile.TemporaryDirectory() as folder:
            status, outcomes = run_apart(files, options.jobs, rest, Path(folder), save)
    else:
        status, outcomes = run_here([*map(str, files), *rest], None)
    ran = sum(count["passed"] + count["failed"] for count in outcomes.files.values())
    for file, count in sorted(outcomes.files.items()):
        print(f"{file:44} {', '.join(f'{n} {what}' for what, n in sorted(count.items()))}")
    clean = sanitize(files, options.jobs) if options.sanitize else True
    print(f"sources {sources_hash()}, {'recorded in ' + RECORD.name if ran and not partial else 'not recorded'}")
    return status or int(not clean)


if __name__ == "__main__":
    sys.exit(main())
