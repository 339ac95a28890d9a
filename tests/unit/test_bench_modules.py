"""The bench of the modules without a card: every row of it computes what torch does, and says so."""

from __future__ import annotations

import pytest
import torch

from fusestream.bench import modules


@pytest.mark.usefixtures("one_thread")
def test_every_row_computes_what_torch_does(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert modules.main([]) == 1
    assert modules.main(["--quick"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told.pop(0) == "no NVIDIA GPU on this machine"
    assert len(told) == 7 and all(line.endswith(": the same as torch's") for line in told)
    full = [case.label for case in modules.cases(quick=False)]
    assert len(set(full)) == len(full) == 14
    for words in (
        "attention 8 x 512 x 512",
        "instance norm 256 x 1024 x 1024",
        "style network 1024 x 1024",
        "ESRGAN x4 512",
    ):
        assert any(label.startswith(words) for label in full)


def test_a_row_says_what_was_measured_and_what_was_aimed_at():
    figures = {"ours ms": 1.0, "eager / ours": 3.5, "eager aim": 3.0, "torch.compile / ours": 1.2, "ours GiB": 0.5}
    assert modules.line({"label": "net", **figures}) == (
        "net: ours 1.000 ms, eager 3.50x (aim 3), torch.compile 1.20x; 0.50 GiB at the peak"
    )
