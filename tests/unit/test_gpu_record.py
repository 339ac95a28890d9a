"""The record of the GPU tests keeps what a test found beside how it ended."""

from __future__ import annotations

import importlib.util
import json
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


def report(file: str, when: str = "call", outcome: str = "passed", **found: Any) -> Any:
    return SimpleNamespace(nodeid=f"{file}::test", when=when, outcome=outcome, user_properties=list(found.items()))


def test_figures_reach_the_record_from_a_process_of_their_own(
    runner: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    apart = runner.Outcomes()
    for one in (report(SOAK, "setup", **FIGURES), report(SOAK, **FIGURES), report(OTHER)):
        apart.pytest_runtest_logreport(one)
    assert apart.files == {SOAK: {"passed": 1}, OTHER: {"passed": 1}} and apart.figures == {SOAK: FIGURES}
    whole = runner.Outcomes()
    whole.merge(json.loads(json.dumps(apart.as_json())))
    record = tmp_path / "record.json"
    monkeypatch.setattr(runner, "RECORD", record)
    monkeypatch.setattr(runner, "environment", lambda: {"gpu": "a card"})
    monkeypatch.setattr(runner, "state_of_the_archive", lambda: "current")
    runner.write_record(whole, {}, [])
    files = json.loads(record.read_text())["a card"]["files"]
    assert files[SOAK]["figures"] == FIGURES and "figures" not in files[OTHER]
