"""Two results of one card compared: regressions over the noise fail, noise does not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from fusestream.bench import compare, side_by_side

ROOT = Path(__file__).resolve().parents[3]


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


def test_an_int8_file_that_was_multiplied_otherwise_is_not_compared() -> None:
    """What is the default since there is `auto` was not before. Of an FP16 file both are the same."""
    before, after = model([1.0, 1.0]), model([1.1, 1.1])
    before["ours"]["side"], after["ours"]["side"] = {"precision": "precise"}, {}
    for storage, found in (("fp16", {"14B, s": "WORSE"}), ("int8_convrot", {})):
        assert verdicts(results({**before, "storage": storage}), results({**after, "storage": storage})) == found


def test_a_card_that_ran_slower_for_stock_too_is_noise() -> None:
    before, after = (
        [{**model([s]), "name": str(i), "stock": {"s": 2 * s}} for i in range(5)] for s in (1.0, 1.06)
    )  # fmt: skip
    alone = {**model([1.0]), "name": "alone"}
    assert verdicts(results(*before, alone), results(*after, {**model([1.05]), "name": "alone"})) == {}
    assert verdicts(results(*before, alone), results(*after, {**model([1.2]), "name": "alone"})) == {
        "alone, s": "WORSE"
    }


def test_a_result_that_is_not_finite_or_farther_from_stocks_is_worse() -> None:
    one = model([1.0]) | {"accuracy": {"ours against stock": 0.02}}
    two = copy.deepcopy(one) | {"accuracy": {"ours against stock": 0.025}}
    assert verdicts(results(one), results(two)) == {}
    two["accuracy"]["ours against stock"] = 0.05
    assert verdicts(results(one), results(two)) == {"14B, error against stock": "WORSE"}
    two = copy.deepcopy(one)
    two["ours"]["finite"] = False
    assert verdicts(results(one), results(two)) == {"14B: its result is not finite now": "WORSE"}


def test_a_promise_of_the_pager_that_is_missed_now_is_worse() -> None:
    def pager(found: float, **others: Any) -> dict[str, Any]:
        return {"pager": {"rows": [{"label": "(b)", "found": found, "bound": 1.03, "unit": "x", **others}]}}

    assert list(verdicts(pager(1.0), pager(1.04)).values()) == ["WORSE"]
    assert list(verdicts(pager(1.2), pager(1.0)).values()) == ["better"]
    assert verdicts(pager(1.2), pager(1.4)) == verdicts(pager(1.0), pager(1.02)) == {}
    failed = {"pager": {"rows": [{"label": "(b)", "error": "no memory"}]}}
    assert list(verdicts(pager(1.0), failed).values()) == ["WORSE"]


def test_ours_farther_from_fp32_on_the_same_weights_is_worse() -> None:
    def fidelity(call: float, weights: str = "w", ours: bool = True) -> dict[str, Any]:
        row = {"name": "precise", "ours": ours, "call": {"median": call, "worst": call}}
        return {"fidelity": {"weights": weights, "rows": [row, {"name": "reference"}]}}

    what = "fidelity: precise, error of a model call"
    assert verdicts(fidelity(1e-3), fidelity(1.2e-3)) == {what: "WORSE"}
    assert verdicts(fidelity(1e-3), fidelity(0.8e-3)) == {what: "better"}
    assert verdicts(fidelity(1e-3), fidelity(1.05e-3)) == verdicts(fidelity(1e-3), fidelity(2e-3, "others")) == {}
    assert verdicts(fidelity(1e-3, ours=False), fidelity(2e-3, ours=False)) == {}
    failed = {"fidelity": {"weights": "w", "rows": [{"name": "precise", "error": "no kernel"}]}}
    assert list(verdicts(fidelity(1e-3), failed).values()) == ["WORSE"]


def test_results_of_two_cards_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for card in ("NVIDIA H200", "NVIDIA RTX 2070"):
        row = model([1.0]) | {"environment": {"card": card}}
        files.append(tmp_path / f"{card}.json")
        files[-1].write_text(json.dumps(results(row)))
    assert compare.main([str(files[0]), str(files[1])]) == 1
    assert "two cards: NVIDIA H200 and NVIDIA RTX 2070" in capsys.readouterr().out


def test_rows_of_one_file_alone_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for number, rows in enumerate(((model([1.0]), {**model([1.0]), "name": "x"}), (model([1.0]),))):
        files.append(str(tmp_path / f"{number}.json"))
        Path(files[-1]).write_text(json.dumps(results(*rows)))
    assert compare.main(files) == 0
    assert "1 rows are in the first alone, 0 in the second" in capsys.readouterr().out


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


# --------------------------------------------------------------------------------------------------------- side by side


def test_two_trees_are_run_in_turns_and_their_medians_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = tmp_path / "before"
    (tree / "bench").mkdir(parents=True)
    (tree / "bench" / side_by_side.ENTRY).write_text("")
    seconds = {tree / "bench": iter([1.0, 1.02]), ROOT / "bench": iter([1.3, 1.32])}
    ran: list[list[str]] = []

    def run(command: list[str], check: bool) -> None:
        ran.append(command[1:])
        row = model([next(seconds[Path(command[1])])] * 2)
        Path(command[command.index("--results") + 1]).write_text(json.dumps(results(row)))

    monkeypatch.setattr(side_by_side.subprocess, "run", run)
    assert compare.main([str(tree), str(ROOT), "models", "--only", "14B"]) == 1
    assert [Path(command[0]).parent for command in ran] == [tree, ROOT, tree, ROOT]
    assert all(command[1:6] == ["models", "--only", "14B", "--side", "ours"] for command in ran)
    assert "WORSE   1.297x        1.01 ->       1.31" in capsys.readouterr().out


def test_settings_are_options_of_the_command_and_no_part_of_a_rows_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], check: bool) -> None:
        ran.append(command[2:])
        side = {"precision": command[command.index("--precision") + 1]}
        row = {**model([1.0, 1.0]), "storage": "int8_convrot"}
        row["ours"]["side"] = side
        Path(command[command.index("--results") + 1]).write_text(json.dumps(results(row)))

    monkeypatch.setattr(side_by_side.subprocess, "run", run)
    assert compare.main(["--turns", "1", "precision=auto", "precision=turbo,kernels=on"]) == 0
    assert ran[1][:-1] == [
        *("models", "--side", "ours", "--same-name", "--precision", "turbo", "--kernels", "on", "--results")
    ]


@pytest.mark.parametrize("words", [["a.json", "b.json", "models"], ["nowhere", "precision=fast"], ["precision=", "."]])
def test_what_is_neither_results_nor_a_version_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main(words)


def test_turns_are_joined_row_by_row() -> None:
    one, two = (results(model([s, s]), kernels=[kernel("0", 10 * s)]) for s in (1.0, 2.0))
    found = side_by_side.joined([one, two, {}])
    assert found["kernels"]["rows"][0]["ours us"] == 15.0
    assert found["models"]["rows"][0]["ours"]["all s"] == [[3.0, 1.0, 1.0], [3.0, 2.0, 2.0]]
