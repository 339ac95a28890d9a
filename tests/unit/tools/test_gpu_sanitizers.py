"""The sanitizers' shards, with a tool that does as it is told: every case is run, and each way to end is told apart."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOL = """#!{python}
import subprocess, sys, time
command = sys.argv[sys.argv.index({python!r}) :]
case = command[-1]
if "hangs" in case:
    time.sleep(60)
print("1 passed in 0.1s" if "fails" not in case else "1 failed in 0.1s")
sys.exit(99 if "overruns" in case else 1 if "fails" in case else 0)
"""


@pytest.fixture
def sanitizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("sanitizers", ROOT / "tests" / "gpu" / "sanitizers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "sanitizers", module)  # where dataclasses look for it
    spec.loader.exec_module(module)
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL.format(python=sys.executable))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(module, "SECONDS", 2)
    return module


def test_every_case_is_in_one_shard(sanitizers: ModuleType) -> None:
    cases = [f"a.py::test[{i}]" for i in range(30)]
    shards = sanitizers.cut(cases, "memcheck")
    assert [case for shard in shards for case in shard] == cases
    assert [len(shard) for shard in shards] == [12, 12, 6]
    assert sum(map(len, sanitizers.cut(cases, "initcheck"))) == 3


@pytest.mark.deep
@pytest.mark.skipif(sys.platform == "win32", reason="the tool of this test is a script that Windows does not start")
def test_errors_failures_and_hangs_are_told_apart(
    sanitizers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cases = ["a.py::clean", "a.py::overruns", "b.py::clean", "c.py::fails", "c.py::hangs"]
    monkeypatch.setattr(sanitizers, "collect", lambda *_: cases)
    monkeypatch.setattr(sanitizers, "LEFT_OUT", 1)
    monkeypatch.setattr(sanitizers, "CASES", 1)
    saved: dict[str, dict[str, object]] = {}
    assert not sanitizers.run([], tmp_path, 4, saved.__setitem__)
    assert {file: set(map(str, results.values())) for file, results in saved.items()} == {
        "a.py": {"2 passed in 2 shards, 1 with errors"},
        "b.py": {"1 passed in 1 shards, 0 with errors"},
        "c.py": {"0 passed in 2 shards, 0 with errors; not to their end: c.py::fails, c.py::hangs"},
    }
    assert all(set(results) == set(sanitizers.TOOLS) for results in saved.values())
    cases[:] = cases[2:3]
    assert sanitizers.run([], tmp_path, 4, saved.__setitem__)


@pytest.mark.deep
def test_the_cases_are_those_marked(sanitizers: ModuleType) -> None:
    found = sanitizers.collect([ROOT / "tests" / "gpu" / "test_to_half.py"], ROOT)
    assert found and all("test_to_half.py::" in case for case in found)
    assert not any("compile" in case for case in found)  # slow ones are not marked
