"""compute-sanitizer over the small GPU tests, in shards: so many cases a process, each with its own end.

A tool that watches every access takes a hundred times as long as the kernel, and one process after the other would not end. Cases
are those marked `sanitize`: small ones, of every variant of every kernel.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
CASES = 12  # of a shard
SECONDS = int(os.environ.get("FUSESTREAM_SANITIZER_SECONDS") or 300)  # that one may take
# torch's own kernels are not under test, and checking them too takes ten times as long. Only initcheck must watch them:
# it has to see who wrote what our kernels read.
NOT_OURS = [
    word
    for name in ("at6native", "3cub", "cutlass", "cudnn", "gemm", "gemv")
    for word in ("--kernel-regex-exclude", f"kns={name}")
]
SLOWEST = "initcheck"  # ... and so gets every twelfth case
LEFT_OUT = 12
FOUND_ERRORS = 99


@dataclass
class Result:
    """Of one tool over one file. unfinished: shards that were stopped, or ended in a way that is no test's."""

    passed: int = 0
    errors: int = 0
    shards: int = 0
    unfinished: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        words = f"{self.passed} passed in {self.shards} shards, {self.errors} with errors"
        return f"{words}; not to their end: {', '.join(self.unfinished)}" if self.unfinished else words

    @property
    def clean(self) -> bool:
        return not self.errors and not self.unfinished


def collect(files: Iterable[Path], root: Path) -> list[str]:
    """The cases marked `sanitize`, as pytest names them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "sanitize", "-p", "no:cacheprovider"]
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}  # they change what is printed
    done = subprocess.run([*command, *map(str, files)], cwd=root, capture_output=True, text=True, check=False, env=env)
    return [line for line in done.stdout.splitlines() if "::" in line]


def cut(cases: Sequence[str], tool: str) -> list[list[str]]:
    """Shards of one file's cases: the file's kernels are compiled once per process."""
    chosen = cases[::LEFT_OUT] if tool == SLOWEST else cases
    return [list(chosen[i : i + CASES]) for i in range(0, len(chosen), CASES)]


def run(files: Iterable[Path], root: Path, jobs: int, save: Callable[[str, dict[str, Result]], None]) -> bool:
    """Every tool over every case, `jobs` shards at a time; each file's results are saved as soon as they are whole.

    Returns whether all were clean."""
    work = [
        (file, tool, shard)
        for file, cases in groupby(collect(files, root), key=file_of)
        for some in [list(cases)]
        for tool in TOOLS
        for shard in cut(some, tool)
    ]
    clean = True
    with ThreadPoolExecutor(jobs) as pool:
        ended = pool.map(lambda one: run_shard(one[1], one[2], root), work)
        for file, shards in groupby(zip(work, ended, strict=True), key=lambda one: one[0][0]):
            results = {tool: Result() for tool in TOOLS}
            for (_, tool, shard), (passed, errors, whole) in shards:
                result = results[tool]
                result.shards += 1
                result.passed += passed
                result.errors += errors
                if not whole:
                    result.unfinished.append(shard[0])
            save(file, results)
            clean &= all(result.clean for result in results.values())
    return clean


def file_of(case: str) -> str:
    return case.split("::", maxsplit=1)[0]


def run_shard(tool: str, cases: list[str], root: Path) -> tuple[int, bool, bool]:
    """How many passed, whether the tool found errors, and whether the shard came to its end.

    torch's caching allocator is off, so that every overrun is seen.
    """
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    options = ["--tool", tool, "--error-exitcode", str(FOUND_ERRORS), "--print-limit", "5", "--target-processes", "all"]
    if tool == "memcheck":  # that a module has no such global is an answer, which the launcher asks for
        options += ["--report-api-errors", "no"]
    if tool != SLOWEST:
        options += NOT_OURS
    try:
        done = subprocess.run(
            [found, *options, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *cases],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )
    except subprocess.TimeoutExpired:
        print(f"{tool}: {cases[0]} and those behind it: stopped after {SECONDS} s", flush=True)
        return 0, False, False
    counted = re.findall(r"(\d+) passed", done.stdout)
    if done.returncode:
        print(f"{tool}: {cases[0]} and those behind it:\n{done.stdout[-3000:]}", flush=True)
    return int(counted[-1]) if counted else 0, done.returncode == FOUND_ERRORS, done.returncode in (0, FOUND_ERRORS)
