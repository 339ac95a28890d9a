"""The bench of the modules without a card: every row of it computes what torch does, and says what was promised and what came."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fusestream.bench import apart, kernels, modules, report
from fusestream.bench.module_cases import BEST, cases

ROOT = Path(__file__).resolve().parents[3]
PROMISES = {
    "attention 8 x 512 x 512": {BEST: 1.0},
    "feed-forward 1 x 4096 x 512": {BEST: 1.0},
    "output projection 8 x 1024 x 512": {},
    "instance norm 256 x 1024 x 1024 channels-first": {"eager": 4.0},
    "instance norm 256 x 256 x 256 channels-last": {"eager": 4.0},
    "style network 1024 x 1024": {"eager": 3.0, "torch.compile": 1.3},
    "ESRGAN x4 512 x 512, the network alone": {},
}


@pytest.mark.usefixtures("one_thread")
def test_every_row_computes_what_torch_does(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(modules, "start_comfyui", lambda _: None)  # it runs
    assert modules.main([]) == 1
    assert modules.main(["--quick"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told.pop(0) == "no NVIDIA GPU on this machine"
    assert len(told) == 9 and all(": as torch's, error " in line for line in told)
    assert modules.main(["--quick", "--only", "style"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    asked = {case.label: dict(case.asked) for case in cases(quick=False)}
    assert len(asked) == 15
    for label, promised in PROMISES.items():
        assert next(found for name, found in asked.items() if name.startswith(label)) == promised


LISTING = """
import runpy, sys, torch
torch.cuda.is_available = lambda: True
sys.executable, sys.argv = "/bin/echo", ["bench", "modules"]
try:
    runpy.run_path("bench", run_name="__main__")
finally:
    print("imported", [name for name in ("comfy", "spandrel") if name in sys.modules])
"""


def test_rows_are_listed_where_comfyui_was_not_started():
    """Who runs them in other processes imports none of it; and one that says nothing is told of, row by row."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = subprocess.run(
        [sys.executable, "-c", LISTING],
        cwd=ROOT,
        env=environment | {"COMFYUI_PATH": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    told = said.stdout.splitlines()
    assert told.pop() == "imported []" and said.returncode == 1, said.stderr
    lost = [line.partition(": not measured")[0] for line in told if line.endswith("its process ended (exit code 0)")]
    assert len(lost) == 17 and lost[-2:] == list(modules.NODES)
    asked = [line for line in told if "--rows" in line]
    assert len(asked) == 17 and "style network 1024 x 1024" in asked[0] and modules.NODES[0] not in asked[0]


def test_a_row_is_done_under_the_name_that_it_was_asked_for(monkeypatch, capsys, tmp_path):
    """Those of nodes have sizes in their results'."""
    monkeypatch.delenv("COMFYUI_PATH")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(kernels, "environment", lambda: {})
    row = {**ROW, "asked": {}, "ours is": "CUDA graph", "torch.compile is": "reduce-overhead"}
    monkeypatch.setattr(modules, "rows_of", lambda *_: [(modules.NODES[0], lambda: dict(row))])
    assert modules.main(["--rows", json.dumps(modules.NODES[:1]), "--results", str(tmp_path / "card.json")]) == 0
    told = capsys.readouterr().out
    assert f"{apart.DONE}{modules.NODES[0]}\n" in told
    assert "2.000 ms (CUDA graph)" in told and "torch.compile (reduce-overhead) 1.25x" in told


@pytest.mark.usefixtures("one_thread")
def test_a_wrong_result_is_no_success(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("COMFYUI_PATH")
    right = modules.errors
    monkeypatch.setattr(modules, "errors", lambda *given: right(*given) | {"ours": 0.1})
    assert modules.main(["--quick", "--only", "projection"]) == 1
    assert "NOT AS TORCH'S, error 1.0e-01" in capsys.readouterr().out


def test_torch_compile_that_fails_is_told_and_the_fastest_mode_counts():
    def timed(net, _):
        return next(seconds[name] for name in seconds if name == net.mode)

    class Net(nn.Module):
        def forward(self, x):
            return x

    seconds = {"default": 0.004, "graphs": 0.003}
    with pytest.MonkeyPatch.context() as patch:

        def compile(net, *, dynamic, mode):
            assert dynamic is False
            if mode == "none":
                raise RuntimeError("Failed to find C compiler.\nand more")
            made = Net()
            made.mode = mode
            return made

        patch.setattr(torch, "compile", compile)
        modes = {name: {"mode": name} for name in ("none", "default", "graphs")}
        found = modules.compiled(Net(), [[1]], timed, modes)
        assert found.pop("torch.compile took s") >= 0
        assert found == {"torch.compile ms": 3.0, "torch.compile is": "graphs"}
        found = modules.compiled(Net(), [[1]], timed, {"none": {"mode": "none"}})
    assert found == {"torch.compile failed": "none: RuntimeError: Failed to find C compiler."}


ROW = {"op": "modules", "label": "net", "ours ms": 2.0, "eager ms": 7.0, "torch.compile ms": 2.5, "flash ms": 1.97}


@pytest.mark.parametrize(
    ("asked", "more", "met"),
    [
        ({"eager": 3.0, "torch.compile": 1.25}, {}, True),
        ({"eager": 3.6}, {}, False),
        ({BEST: 1.0}, {"others": ["flash"]}, True),  # within what two runs differ by
        ({BEST: 1.0}, {"others": ["flash"], "flash ms": 1.9}, False),
        ({"eager": 3.0, "GiB": 3.0}, {"ours GiB": 3.1}, False),
        ({"eager": 3.0, "stock": 1.5}, {}, None),
        ({"eager": 3.6, "stock": 1.5}, {}, False),
        ({"eager": 3.0}, {"right": False}, False),
        ({}, {}, None),
    ],
)
def test_what_holds_of_what_was_asked(asked, more, met):
    result = modules.judged({**ROW, "asked": asked, **more})
    assert result["met"] is met and result["eager / ours"] == 3.5
    word = {True: "holds", False: "MISS", None: "not measured"}[met]
    assert (f": {word}" in modules.line(result)) is bool(asked)


def test_a_row_that_ends_its_process_costs_no_other(monkeypatch, capsys):
    """Those behind it have another process, and those of nodes one as ComfyUI starts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    labels = ["net", "crashes", "attention", *modules.NODES]
    monkeypatch.setattr(modules, "rows_of", lambda *_: [(label, dict) for label in labels])
    ran = []

    def process(arguments):
        assert arguments[0] == "modules" and arguments[3:] == ["--autotune"]
        rows = json.loads(arguments[2])
        ran.append(rows)
        done = rows[: rows.index("crashes")] if "crashes" in rows else rows
        return done, -11 if len(done) < len(rows) else 0

    monkeypatch.setattr(apart, "process", process)
    assert modules.main(["--autotune"]) == 1
    assert ran == [["net", "crashes", "attention"], ["attention"], list(modules.NODES)]
    assert capsys.readouterr().out == "crashes: not measured, its process ended (signal 11)\n"
    labels.remove("crashes")
    assert modules.main(["--autotune"]) == 0


def test_a_process_tells_what_it_has_done(capfd, monkeypatch):
    script = "import os; print('a line'); print('DONE a row', flush=True); os.abort()"
    monkeypatch.setattr(apart, "BENCH", "-c")
    assert apart.process([script]) == (["a row"], -6)
    assert capfd.readouterr().out == "a line\n" and apart.words(3) == "exit code 3"


def test_rows_are_kept_as_they_are_done_and_shown_with_their_misses(monkeypatch, capsys, tmp_path: Path):
    """The second row breaks off, and the first is in the file; the page has its promise and the miss."""
    monkeypatch.delenv("COMFYUI_PATH")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(kernels, "environment", lambda: {"torch": "2.11", "date": "today"})

    def breaks():
        raise torch.OutOfMemoryError("no room")

    first = {**ROW, "asked": {"eager": 4.0}, "eager is": "channels-last", "ours GiB": 0.5, "eager GiB": 0.75}
    monkeypatch.setattr(modules, "rows_of", lambda *_: [("net", lambda: dict(first)), ("more", breaks)])
    path = tmp_path / "nvidia-card.json"
    with pytest.raises(torch.OutOfMemoryError):
        modules.main(["--rows", '["net", "more"]', "--results", str(path)])
    assert capsys.readouterr().out.splitlines()[-1] == "DONE net"
    assert [row["label"] for row in json.loads(path.read_text())["modules"]["rows"]] == ["net"]
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    shown = report.rendered_page("<!-- modules:begin -->\n<!-- modules:end -->\n")
    assert "Measured on nvidia card with torch 2.11 (today):" in shown
    ratios = "eager 3.50x, compile 1.25x, best 1.25x"
    assert f"| net | 7 ms (channels-last) | 2.5 ms |  | 2 ms | {ratios} | **missed** 4x eager | 0.75 / 0.50 |" in shown
    path.unlink()
    assert "Not measured yet." in report.rendered_page(shown)
