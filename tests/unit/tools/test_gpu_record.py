"""The record of the GPU tests keeps what a test found beside how it ended."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bed.paths import ROOT

SOAK, OTHER = "tests/gpu/test_soak.py", "tests/gpu/test_conv.py"
FIGURES = {"VRAM": {"start": 1.0, "middle": 1.0, "end": 1.0}}


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "gpu"))  # run.py is a script beside its parts
    spec = importlib.util.spec_from_file_location("gpu_run", ROOT / "tests" / "gpu" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


@pytest.fixture
def record(runner: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the runner writes what it finds on a card."""
    monkeypatch.setattr(runner, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(runner, "environment", lambda: {"gpu": "a card"})
    monkeypatch.setattr(runner, "state_of_the_archive", lambda: "current")
    return tmp_path / "record.json"


def report(file: str, when: str = "call", outcome: str = "passed", **found: Any) -> Any:
    return SimpleNamespace(
        nodeid=f"{file}::test", when=when, outcome=outcome, user_properties=list(found.items()), duration=0.4
    )


@pytest.mark.deep
def test_figures_reach_the_record_from_a_process_of_their_own(runner: Any, record: Path) -> None:
    apart = runner.Outcomes()
    for one in (report(SOAK, "setup", **FIGURES), report(SOAK, **FIGURES), report(OTHER)):
        apart.pytest_runtest_logreport(one)
    assert apart.files == {SOAK: {"passed": 1}, OTHER: {"passed": 1}} and apart.figures == {SOAK: FIGURES}
    whole = runner.Outcomes()
    whole.merge(json.loads(json.dumps(apart.as_json())))
    runner.write_record(whole)
    files = json.loads(record.read_text())["a card"]["files"]
    assert files[SOAK]["figures"] == FIGURES and "figures" not in files[OTHER]
    assert files[SOAK]["seconds"] == 1 and files[OTHER]["seconds"] == 0  # its setup too
    assert next(file.name for file in runner.longest_first()) == Path(SOAK).name


def test_a_file_is_recorded_when_all_of_it_has_run(
    runner: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its timed tests come at last, alone on the card: a run that is cut short before them says nothing of the file."""
    plain, timed = (ROOT / "tests" / "gpu" / name for name in ("test_conv.py", "test_live.py"))
    assert f"pytest.mark.{runner.TIMED}" in timed.read_text() and f"pytest.mark.{runner.TIMED}" not in plain.read_text()

    def run(command: list[str], **_: Any) -> Any:
        result = Path(command[command.index("--result") + 1])
        files = [Path(part).relative_to(ROOT).as_posix() for part in command if part.endswith("py") and "test_" in part]
        found = {
            "files": {file: {"passed": 1} for file in files},
            "seconds": {},
            "figures": {},
            "skips": [],
            "seed": "1",
        }
        result.write_text(json.dumps(found))
        return SimpleNamespace(returncode=0, stdout="1 passed", stderr="")

    monkeypatch.setattr(runner.subprocess, "run", run)
    monkeypatch.setattr(runner, "LOGS", tmp_path)
    saved: list[dict[str, int]] = []
    status, outcomes = runner.run_apart(
        [timed, plain],
        1,
        [],
        tmp_path,
        lambda found: saved.append({Path(f).name: c["passed"] for f, c in found.files.items()}),
    )
    assert status == 0 and saved == [{}, {plain.name: 1}, {timed.name: 2, plain.name: 1}]
    assert sum(count["passed"] for count in outcomes.files.values()) == 3


@pytest.mark.deep
def test_the_sanitizers_are_recorded_by_file(runner: Any, monkeypatch: pytest.MonkeyPatch, record: Path) -> None:
    """A file that was clean with these kernels is not looked at again; one with errors, or cut off, or of others, is."""
    clean, wrong, cut_off, never = (
        ROOT / "tests" / "gpu" / f"test_{name}.py" for name in ("conv", "linear", "decode", "style")
    )
    result = runner.sanitizers.Result
    ends = {
        clean: result(passed=3, shards=1),
        wrong: result(passed=2, errors=1, shards=1),
        cut_off: result(shards=1, unfinished=["a case"]),
    }

    def run(_files: object, _root: object, _jobs: int, save: Any) -> bool:
        for file, found in ends.items():
            save(file.relative_to(ROOT).as_posix(), dict.fromkeys(runner.sanitizers.TOOLS, found))
        return False

    monkeypatch.setattr(runner.sanitizers, "run", run)
    assert not runner.sanitize([], 1)
    entry = json.loads(record.read_text())["a card"]
    assert entry["compute-sanitizer"]["tests/gpu/test_conv.py"]["memcheck"] == "3 passed in 1 shards, 0 with errors"
    everything = [clean, wrong, cut_off, never]
    assert runner.unsanitized_files(entry, everything) == [wrong, cut_off, never]
    monkeypatch.setattr(runner, "sources_hash", lambda: {"kernels_cuda": "others"})
    assert runner.unsanitized_files(entry, everything) == everything


def test_every_gpu_test_can_be_collected() -> None:
    """Where there is no card they are left out, and a name that one imports might be gone."""
    collect = [sys.executable, "-m", "pytest", "tests/gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(collect, cwd=ROOT, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:]
