"""The bench of the modules without a card: every row of it computes what torch does, and says what was promised and what came."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from fusestream.bench import kernels, modules
from fusestream.bench.module_cases import BEST, cases
from fusestream.bench.report import pages

PROMISES = {
    "attention 8 x 512 x 512": {BEST: 1.0},
    "feed-forward 1 x 4096 x 512": {BEST: 1.0},
    "output projection 8 x 1024 x 512": {},
    "instance norm 256 x 1024 x 1024 channels-first": {"eager": 4.0},
    "instance norm 256 x 256 x 256 channels-last": {"eager": 4.0},
    "style network 1024 x 1024": {"eager": 3.0, "torch.compile": 1.3},
    "ESRGAN x4 512 x 512, the network alone": {},
}


@pytest.mark.deep
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


def test_networks_and_nodes_have_a_process_each(monkeypatch):
    """Each imports ComfyUI as it needs it; one that fails costs the other nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ran = []
    monkeypatch.setattr(modules.subprocess, "call", lambda command: ran.append(command[2:]) or len(ran) == 1)
    assert modules.main(["--autotune"]) == 1
    assert ran == [["rows", "modules", "--autotune", "--part", part] for part in modules.PARTS]
    rows = {
        part: modules.rows_of(modules.command_line().parse_args(["--part", part]), "cuda") for part in modules.PARTS
    }
    assert len(rows["networks"]) == 15 and list(rows["nodes"]) == list(modules.NODES)


def test_rows_are_kept_as_they_are_done_and_shown_with_their_misses(monkeypatch, capsys, tmp_path: Path):
    """The second row breaks off, and the first is in the file; the page has its promise and the miss."""
    monkeypatch.delenv("COMFYUI_PATH")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(kernels, "environment", lambda: {"torch": "2.11", "date": "today"})

    def breaks():
        raise torch.OutOfMemoryError("no room")

    first = {**ROW, "asked": {"eager": 4.0}, "eager is": "channels-last", "ours GiB": 0.5, "eager GiB": 0.75}
    monkeypatch.setattr(modules, "rows_of", lambda *_: {"net": lambda: dict(first), "more": breaks})
    path = tmp_path / "nvidia-card.json"
    with pytest.raises(torch.OutOfMemoryError):
        modules.main(["--part", "networks", "--results", str(path)])
    assert "asked eager 4: MISS" in capsys.readouterr().out
    assert [row["label"] for row in json.loads(path.read_text())["modules"]["rows"]] == ["net"]
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    shown = pages.rendered_page("<!-- modules:begin -->\n<!-- modules:end -->\n")
    assert "Measured on nvidia card with torch 2.11 (today):" in shown
    ratios = "eager 3.50x, compile 1.25x, best 1.25x"
    assert f"| net | 7 ms (channels-last) | 2.5 ms |  | 2 ms | {ratios} | **missed** 4x eager | 0.75 / 0.50 |" in shown
    path.unlink()
    assert "Not measured yet." in pages.rendered_page(shown)
