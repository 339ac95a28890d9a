"""The host's cost of a block: its rows are measured where they say, and nothing stays wrapped."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusestream import checkpoints
from fusestream.bench import host
from fusestream.fusion.stream.block_stream import BlockStream
from fusestream.memory import Pager

pytestmark = pytest.mark.usefixtures("as_comfyui_runs")


def test_every_row_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoints.write("wan_t2v", tmp_path)
    before = Pager.acquire, Pager.release, BlockStream.enter, BlockStream.leave
    found = host.measured(path, "off", host.SMALL, profile=False) | host.measured(
        path, "auto", host.SMALL, profile=True
    )
    assert before == (Pager.acquire, Pager.release, BlockStream.enter, BlockStream.leave)
    assert found.keys() == {"the pager: acquire + release", "weights in and out", "stock's block", "a fused block"}
    assert found.keys() >= host.AIMS.keys() and all(0 < each < 1e6 for each in found.values())
    assert found["the pager: acquire + release"] < found["weights in and out"], "the one is part of the other"
    assert "function calls" in capsys.readouterr().out, "where the time goes"


def test_the_time_is_the_functions_own() -> None:
    class Thing:
        def acquire(self, text: str, *, times: int) -> str:
            return text * times

        def release(self) -> None:
            raise KeyError

        enter = leave = acquire

    clocked = host.Clocked(Thing, Thing)
    with clocked():
        assert Thing().acquire("a", times=2) == "aa"
        with pytest.raises(KeyError):
            Thing().release()
    assert {name: len(found) for name, found in clocked.seconds.items()} == {"acquire": 1, "release": 1}
