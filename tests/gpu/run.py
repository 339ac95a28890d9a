"""Run the GPU tests and write down what was run on what.

    python tests/gpu/run.py                     all of tests/gpu, then record.json
    python tests/gpu/run.py --sanitize          the short tests under each tool of compute-sanitizer as well
    python tests/gpu/run.py -k norm_modulate    anything else goes to pytest; a partial run is not recorded

Needs torch, pytest, hypothesis and numpy. record.json holds, per card: versions, a hash of the sources under test, the
seed, and the outcome of every test file.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "gpu" / "record.json"
UNDER_TEST = ("kernels_cuda", "memory", "fusion")
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")


def sources_hash() -> dict[str, str]:
    """One hash per folder under test: of the code, not of its prose or its build products."""
    hashes = {}
    for folder in UNDER_TEST:
        files = sorted(p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".cu", ".cuh"))
        if files:
            digest = hashlib.sha256()
            for path in files:
                name = path.relative_to(ROOT).as_posix().encode()
                digest.update(name + b"\0" + path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
            hashes[folder] = digest.hexdigest()[:16]
    return hashes


class Outcomes:
    """A pytest plugin that counts outcomes per file."""

    def __init__(self) -> None:
        self.files: dict[str, Counter[str]] = {}
        self.skips: set[str] = set()
        self.seed = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            file = report.nodeid.split("::")[0]
            self.files.setdefault(file, Counter())[report.outcome] += 1
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


def write_record(outcomes: Outcomes, sanitized: dict[str, str]) -> None:
    here = environment()
    archive = subprocess.run(
        [sys.executable, str(ROOT / "kernels_cuda" / "build" / "cli.py"), "--check"],
        check=False,
        capture_output=True,
        text=True,
    ).stdout.strip()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record[here["gpu"]] = {
        **here,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "sources": sources_hash(),
        "archive": archive,
        "seed": outcomes.seed,
        "outcomes": {file: dict(count) for file, count in sorted(outcomes.files.items())},
        "skipped because": sorted(outcomes.skips),
        "compute-sanitizer": sanitized,
    }
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def sanitize(arguments: list[str]) -> dict[str, str]:
    """Each tool over the tests marked `sanitize`. torch's caching allocator is off, so that every overrun is seen."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    results = {}
    for check in SANITIZERS:
        command = [
            tool,
            "--tool",
            check,
            "--error-exitcode",
            "99",
            "--print-limit",
            "5",
            "--target-processes",
            "all",
            sys.executable,
            "-m",
            "pytest",
            "tests/gpu",
            "-m",
            "sanitize",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            *arguments,
        ]
        run = subprocess.run(
            command,
            cwd=ROOT,
            check=False,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )
        text = run.stdout + run.stderr
        summary = re.findall(r"=+ (ERROR SUMMARY: .*|RACECHECK SUMMARY: .*)", text)
        passed = re.findall(r"(\d+ passed.*)", text)
        results[check] = "; ".join([*summary, *passed[-1:]]) or f"exit status {run.returncode}"
        if run.returncode:
            print(text[-8000:])
            results[check] += f" (exit status {run.returncode})"
        print(f"{check}: {results[check]}", flush=True)
    return results


def main() -> int:
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    cli.add_argument("--sanitize", action="store_true", help="also run compute-sanitizer's four tools")
    options, rest = cli.parse_known_args()
    import pytest

    outcomes = Outcomes()
    status = int(pytest.main([str(ROOT / "tests" / "gpu"), "-q", "--rootdir", str(ROOT), *rest], plugins=[outcomes]))
    sanitized = sanitize(rest) if options.sanitize else {}
    partial = any(argument.startswith(("-k", "-m", "tests/")) for argument in rest)
    ran = sum(count["passed"] + count["failed"] for count in outcomes.files.values())
    if ran and not partial:
        write_record(outcomes, sanitized)
    for file, count in sorted(outcomes.files.items()):
        print(f"{file:44} {', '.join(f'{n} {what}' for what, n in sorted(count.items()))}")
    for check, result in sanitized.items():
        print(f"{check:44} {result}")
    print(f"sources {sources_hash()}, {'recorded in ' + RECORD.name if ran and not partial else 'not recorded'}")
    return status or int(any("exit status" in result for result in sanitized.values()))


if __name__ == "__main__":
    sys.exit(main())
