"""The bench of two cards: its turns, what it promises, what it keeps when it is cut off, and a try on the CPU."""

from __future__ import annotations

import json
from array import array
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.model_management
import pytest

from fusestream import checkpoints
from fusestream.bench import report, two
from fusestream.bench.end_to_end import rows, worker
from fusestream.bench.end_to_end.runner import Turn


def run(seconds: float, *peaks: float, finite: bool = True) -> dict[str, Any]:
    found = {"s": [2 * seconds, seconds, seconds], "load s": 1.0, "peak GiB": max(peaks), "finite": finite}
    environment = {"card": "NVIDIA X", "torch": "2", "date": "today", "ComfyUI": "0.30.0"}
    return found | ({"peaks GiB": list(peaks)} if len(peaks) > 1 else {}) | {"environment": environment}


RUNS = {
    ("ours", 1): run(6.0, 6.5),
    ("ours", 2): run(3.2, 6.4, 6.2),
    ("stock", 2): run(4.4, 7.1, 7.0),
    ("stock", 1): run(8.1, 7.4),
}


class Bench:
    """What the turns ask of it; a turn takes no time. lost: the turn at which the machine goes."""

    ahead = 12
    files = SimpleNamespace(of=lambda row: {row.model: "weights"})

    def __init__(self, folder: Path, found: dict[tuple[str, int], Any], lost: tuple[str, int] | None = None) -> None:
        self.folder, self.found, self.lost = folder, found, lost
        self.options: Any = SimpleNamespace(limit=1.0, quick=False, real=None, results=folder / "found.json")
        self.ran: list[tuple[str, int]] = []

    def job(self, turn: Turn) -> dict[str, Any]:
        return {"who": turn.who, "cards": turn.side.cards, "sample_to": ""}

    def start(self, job: dict[str, Any], name: str) -> Any:
        return SimpleNamespace(wait_ready=lambda _: None)

    def finish(self, process: Any, word: dict[str, Any]) -> dict[str, Any]:
        turn = word["job"]["who"], word["job"]["cards"]
        if turn == self.lost:
            raise KeyboardInterrupt
        self.ran.append(turn)
        values = {"ours": 1.0, "stock": 1.02}[turn[0]] + (0.001 if turn[1] == 2 else 0.0)
        Path(word["job"]["sample_to"]).write_bytes(array("f", [values] * 8).tobytes())
        found: dict[str, Any] = self.found[turn]
        return found

    def free(self, row: rows.Row) -> float:
        return 8.0

    def tell(self, turn: Turn, run: dict[str, Any]) -> None: ...

    def end_writer(self) -> None: ...


def test_each_turn_has_a_process_and_what_is_promised_is_held(tmp_path: Path) -> None:
    bench: Any = Bench(tmp_path, RUNS)
    ours, stock = two.measured(bench, two.ROW)
    assert bench.ran == list(two.TURNS)
    assert ours["faster"] == pytest.approx(6.0 / 3.2) and ours["met"] is True
    assert stock["faster"] == pytest.approx(8.1 / 4.4) and stock["met"] is None, "nothing is promised of it"
    assert ours["error"] == pytest.approx(0.001, rel=0.01) and ours["beside stock"] == pytest.approx(
        0.02 / 1.02, rel=0.01
    )
    kept = json.loads(bench.options.results.read_text())[two.SECTION]
    table = two.table({two.SECTION: kept})
    assert "| FuseStream | 6 s | 3.2 s | 1.88x | 1.8x | 12 s / 6.4 s | 6.50 / 6.40, 6.20 GiB | 0.001 |" in table
    assert "| ComfyUI | 8.1 s | 4.4 s | 1.84x | - | 16.2 s / 8.8 s | 7.40 / 7.10, 7.00 GiB | 0.00098 |" in table
    head = report.head("nvidia x", {two.SECTION: kept}, two.SECTION)
    assert head.endswith("stock ComfyUI 0.30.0, 8 GiB of each card free:") and "Measured on nvidia x" in head


@pytest.mark.parametrize(
    "of_two",
    [
        run(3.4, 6.4, 6.2),
        run(3.2, 6.4, 7.1),
        run(3.2, 6.4, 6.2, finite=False),
        {"error": "out of memory", "peak GiB": 8},
    ],
)
def test_a_promise_that_was_not_kept_is_a_miss(tmp_path: Path, of_two: dict[str, Any]) -> None:
    bench: Any = Bench(tmp_path, RUNS | {("ours", 2): of_two})
    found = two.measured(bench, two.ROW)
    assert found[0]["met"] is False
    assert "**missed**" in two.table({two.SECTION: {"name": "work", "rows": found}})


def test_a_result_farther_from_one_cards_than_from_stocks_is_a_miss() -> None:
    row = {
        "asked": 1.8,
        "faster": 1.9,
        "two": {"peaks GiB": [6.0, 6.0], "finite": True},
        "one": {},
        "beside stock": 0.015,
    }
    assert two.met(row | {"error": 0.014}) is True and two.met(row | {"error": 0.016}) is False
    assert two.met(row | {"error": None}) is None, "a turn is missing"


def test_a_new_machine_remembers_nothing_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(worker.REMEMBERED, str(tmp_path))
    with worker.machine(rows.Side()):
        assert worker.os.environ[worker.REMEMBERED] == str(tmp_path)
    with worker.machine(rows.Side(remembers=False)):
        empty = Path(worker.os.environ[worker.REMEMBERED])
        assert empty != tmp_path and not list(empty.iterdir())
        (empty / "kernel-winners.json").write_text("{}")
    assert not empty.exists() and worker.os.environ[worker.REMEMBERED] == str(tmp_path)
    new = [row for row in rows.all_rows() if row.ours is not None and not row.ours.remembers]
    assert {row.group for row in new} == {"short"} and all(row.asked_first for row in new)


def test_what_was_found_is_kept_when_the_machine_goes(tmp_path: Path) -> None:
    bench: Any = Bench(tmp_path, RUNS, lost=("stock", 2))
    with pytest.raises(KeyboardInterrupt):
        two.measured(bench, two.ROW)
    (ours,) = json.loads(bench.options.results.read_text())[two.SECTION]["rows"]
    assert ours["met"] is True and ours["beside stock"] is None
    assert "ComfyUI" not in two.table(json.loads(bench.options.results.read_text()))


@pytest.mark.usefixtures("as_comfyui_runs")
@pytest.mark.parametrize("who", ["ours", "stock"])
def test_both_sides_are_tried_on_the_cpu(tmp_path: Path, who: str) -> None:
    path = str(checkpoints.write("wan_t2v", tmp_path))
    bench: Any = SimpleNamespace(folder=tmp_path, job=_job)
    found = {}
    for turn in sorted(two.turns(rows.quick(two.ROW), who), key=lambda turn: turn.number):
        comfy.model_management.unload_all_models()  # stock's node trips over what it takes for loaded, and is gone
        work = worker.Run(two.job_of(bench, turn))
        found[turn.number] = worker.done(work, {"wan14": path})
        others = work.model.get_additional_models_with_key("multigpu")
        assert found[turn.number]["finite"] and len(others) == turn.number - 1
    apart = two.distance(*(two.sample_of(bench, who, cards) for cards in (1, 2)))
    assert apart < 1e-3, "the same prompts, with sums in another order"


def _job(turn: Turn) -> dict[str, Any]:
    plain = {name: value for name, value in asdict(turn.row).items() if name not in ("stock", "ours")}
    return {"task": "work", "who": turn.who, "row": plain, "side": asdict(turn.side), "free": 8.0, "quick": True}
