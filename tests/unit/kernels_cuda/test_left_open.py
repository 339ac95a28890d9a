"""A process that dies with a pager open says what it died of, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bed import depth
from fusestream.kernels_cuda import unpack_soon

PROGRAM = Path(__file__).resolve().parents[2] / "left_open.py"


@pytest.mark.deep
def test_the_error_is_what_is_seen_last(tmp_path: Path) -> None:
    """Torch's own code is what the copying thread is in, by every backend, when the caller dies."""
    routes = [("cpu", "host"), ("plain", "registered")]
    if depth.is_thorough():
        routes += [("plain", "pinned"), ("plain", "managed")]
    dying = []
    for device, route in routes:
        (folder := tmp_path / route).mkdir()
        command = [sys.executable, str(PROGRAM), device, route, str(folder)]
        dying.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    for (_, route), process in zip(routes, dying, strict=True):
        _, said = process.communicate(timeout=120)
        assert process.returncode == 1, (route, said)
        assert said.splitlines()[-1] == "Mistake: the caller's own", (route, said)


def test_unpacking_kernels_is_waited_for() -> None:
    thread = unpack_soon(torch.device("cuda", 0))
    assert thread is not None and not thread.daemon
    thread.join()
