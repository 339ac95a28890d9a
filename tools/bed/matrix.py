"""Runs a row of the test matrix folder by folder, and notes what came out of each.

`dev.py matrix` lists the rows; `dev.py matrix ROW` runs one, `dev.py matrix ROW tests/unit` a folder of it; with
`--again` only what failed the last time. What is narrower than a folder runs too, and is not noted.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import comfyui, depth, overlay, steps, tested
from .paths import ROOT, Bed
from .rows import TOLD, Row
from .server import has_nvidia_gpu

VERSIONS = "import importlib.metadata as m, sys; print(*(f'{name}={m.version(name)}' for name in sys.argv[1:]))"


@dataclass
class Outcome:
    """How many tests passed and were skipped, and of those that failed what they said."""

    passed: int = 0
    skipped: int = 0
    failures: dict[str, str] = field(default_factory=dict)


def run_row(bed: Bed, row: Row, folder: Path, rest: Sequence[str], *, again: bool, workers: int) -> int:
    """Run its folders, or those of `rest`; 0 if all tests passed."""
    env = {"COMFYUI_PATH": str(folder), "PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": str(_threads(workers))}
    env |= {depth.SWITCH: "1"} if row.thorough else {}
    given = [word.rstrip("/") for word in rest]
    if not set(given) <= set(row.parts):
        return subprocess.call([bed.python, "-m", "pytest", *rest], cwd=ROOT, env={**os.environ, **env})
    entry = tested.entry_of(row.name, about(bed, folder))
    codes = []
    for part in given or row.parts:
        only = [test for test in entry.failures if test.startswith(part)] if again else [part]
        if not only:
            continue
        outcome = run_tests(bed, only, env, 1 if again else workers)
        if again:
            entry.mend(only, outcome.failures)
        else:
            entry.note(part, outcome.passed, outcome.skipped, outcome.failures)
        tested.keep(entry)
        codes.append(bool(outcome.failures))
        steps.say(f"{row.name}, {part}: {outcome.passed} passed, {len(outcome.failures)} failed")
    return int(any(codes))


def _threads(workers: int) -> int:
    return max(1, (os.cpu_count() or 1) // workers)


def run_tests(bed: Bed, tests: Sequence[str], env: Mapping[str, str], workers: int) -> Outcome:
    """Let pytest run these, and read its report."""
    spread = [f"-n{workers}", "--dist=loadscope", "--no-loadscope-reorder"] if workers > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        kept = [f"--junitxml={report}", "-o", "junit_family=xunit1"]
        command: list[str | Path] = [bed.python, "-m", "pytest", *tests, *spread, *kept]
        code = subprocess.call(command, cwd=ROOT, env={**os.environ, **env})
        if code not in (0, 1) or not report.exists():  # 1: some failed
            raise steps.SetupFailed(f"pytest ended with {code} before its end; nothing of it is noted")
        return read(report.read_text(encoding="utf-8"))


def read(report: str) -> Outcome:
    """What pytest's report tells."""
    outcome, passed, skipped = Outcome(), set[str](), set[str]()
    for case in ET.fromstring(report).iter("testcase"):
        test = f"{case.get('file')}::{case.get('name')}"
        failed = next((found for tag in ("failure", "error") if (found := case.find(tag)) is not None), None)
        if failed is not None:
            outcome.failures.setdefault(test, tested.in_one_line(failed.get("message") or ""))
        else:
            (skipped if case.find("skipped") is not None else passed).add(test)
    outcome.passed = len(passed - outcome.failures.keys())
    outcome.skipped = len(skipped - outcome.failures.keys())
    return outcome


def about(bed: Bed, folder: Path) -> dict[str, object]:
    """What a result is told with: versions, Python, platform, day; nothing of the machine."""
    ask: list[str | Path] = [bed.python, "-c", VERSIONS, *TOLD]
    said = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()
    return {
        "comfyui": comfyui.version(folder),
        "laid_over": overlay.laid_over(folder),
        "packages": dict(word.split("=", 1) for word in said),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}, {'NVIDIA GPU' if has_nvidia_gpu() else 'CPU'}",
        "day": datetime.date.today().isoformat(),
    }
