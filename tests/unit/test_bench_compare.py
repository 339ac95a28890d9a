"""Two results of one card compared: regressions over the noise fail, noise does not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from fusestream.bench import compare

ROOT = Path(__file__).resolve().parents[2]


def model(seconds: list[float], peak: float = 6.0) -> dict[str, Any]:
    side = {"s": sorted(seconds)[len(seconds) // 2], "first s": 3.0, "peak GiB": peak, "all s": [[3.0, *seconds]]}
    return {"name": "14B", "ours": side}


def verdicts(before: dict[str, Any], after: dict[str, Any]) -> dict[str, str]:
    return {change.what: change.verdict for change in compare.changes(before, after) if change.verdict}


def results(*rows: dict[str, Any], kernels: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"models": {"rows": list(rows)}, "kernels": {"rows": kernels or []}}


def kernel(label: str, ours: float, stock: float = 100.0) -> dict[str, Any]:
    return {"op": "gelu", "label": label, "ours us": ours, "stock us": stock}


def test_a_slower_step_is_worse_and_a_faster_one_better() -> None:
    assert verdicts(results(model([1.0, 1.0])), results(model([1.1, 1.1]))) == {"14B, s": "WORSE"}
    assert verdicts(results(model([1.0, 1.0])), results(model([0.9, 0.9]))) == {"14B, s": "better"}
    assert verdicts(results(model([1.0, 1.0])), results(model([1.01, 1.01]))) == {}


def test_noise_is_what_the_repetitions_measured() -> None:
    assert verdicts(results(model([0.9, 1.0, 1.1])), results(model([1.1, 1.1, 1.1]))) == {}


def test_more_memory_is_worse() -> None:
    assert verdicts(results(model([1.0], 6.0)), results(model([1.0], 6.5))) == {"14B, peak GiB": "WORSE"}


def test_a_row_that_fails_now_is_worse() -> None:
    gone = {"name": "14B", "ours": {"error": "out of memory"}}
    assert list(verdicts(results(model([1.0])), results(gone)).values()) == ["WORSE"]
    assert verdicts(results(gone), results(model([1.0]))) == {}


def test_what_moved_stocks_rows_is_noise_for_ours() -> None:
    before = results(kernels=[kernel(str(i), 50.0) for i in range(4)])
    hot = results(kernels=[kernel(str(i), 54.0, stock=110.0) for i in range(4)])
    assert verdicts(before, hot) == {}
    slow = results(kernels=[kernel("0", 54.0), *(kernel(str(i), 50.0) for i in range(1, 4))])
    assert verdicts(before, slow) == {"kernels: gelu 0, ours us": "WORSE"}
    refused = results(kernels=[{"op": "gelu", "label": "0", "stock us": 100.0, "refused": "no code"}])
    assert "WORSE" in verdicts(before, refused).values()


def test_the_command_fails_on_a_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "bench" / "results" / "nvidia-h200.json"
    assert compare.main([str(path), str(path)]) == 0
    worse = copy.deepcopy(json.loads(path.read_text(encoding="utf-8")))
    worse["kernels"]["rows"][0]["ours us"] *= 1.5
    other = tmp_path / "after.json"
    other.write_text(json.dumps(worse))
    assert compare.main([str(path), str(other)]) == 1
    assert "WORSE   1.500x" in capsys.readouterr().out
    other.write_text("{}")
    assert compare.main([str(path), str(other)]) == 1
