"""docs/examples/many_workers.py with Ray and two real ComfyUI servers on the small trained model: one's ComfyUI is killed at work,
then the other's Ray actor. Ray is in an environment of its own, made for this."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bed import demo, tiny, toybox
from bed.depth import is_thorough
from bed.server import ON_THE_CPU, has_nvidia_gpu, prepare

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "many_workers.py"
JOBS = ("red", "green", "blue", "yellow", "white")
LATER = 1.5  # seconds after a workflow was given to a worker: it is at it

pytestmark = [
    pytest.mark.skipif(not is_thorough(), reason="installs Ray and starts ComfyUI four times: with --thorough"),
    pytest.mark.skipif(sys.platform != "linux", reason="what dies with its parent is looked up in /proc"),
]


@pytest.fixture(scope="module")
def rays_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a new environment with the version that the example names."""
    wanted = re.search(r"pip install (ray==[\d.]+)", EXAMPLE.read_text(encoding="utf-8"))
    assert wanted is not None
    folder = tmp_path_factory.mktemp("ray")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wanted[1]], check=True)
    return python


def workflows(folder: Path) -> list[Path]:
    files = []
    for seed, colour in enumerate(JOBS):
        workflow = toybox.workflow(f"a {colour} ball rolls to the left on a plain background", seed)
        tiny.shrink(workflow, width=64, height=64, length=9, steps=40)
        files.append(folder / f"{colour}.json")
        files[-1].write_text(json.dumps(workflow), encoding="utf-8")
    return files


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_whoever_is_killed_nothing_is_lost_and_nothing_made_twice(rays_python: Path, tmp_path: Path) -> None:
    base, out = tmp_path / "comfyui", tmp_path / "results"
    prepare(base)
    command = [
        rays_python, EXAMPLE, "--out", out, "--comfyui", os.environ["COMFYUI_PATH"], "--python", sys.executable, "--workers", "2",
        "--gpus", "0", *workflows(tmp_path), "--", "--base-directory", base, "--disable-api-nodes",
        *demo.search_paths(toybox.files(), base), *([] if has_nvidia_gpu() else ON_THE_CPU),
    ]  # fmt: skip
    said: list[str] = []
    processes: dict[str, int] = {}
    killed: list[str] = []  # workers
    environment = {
        **os.environ,
        "HOME": str(tmp_path),  # where Ray leaves a token
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as ran:
        assert ran.stdout is not None
        for line in ran.stdout:
            said.append(line.strip())
            if up := re.match(r"worker (\d) is up: process (\d+)", line):
                processes[up[1]] = int(up[2])
            if (given := re.match(r"\w+: on worker (\d)", line)) and given[1] not in killed and len(killed) < 2:
                killed.append(given[1])
                # ComfyUI itself at the first worker, at the other one the actor that has started it.
                victim = processes[given[1]] if len(killed) == 1 else parent_of(processes[given[1]])
                threading.Timer(LATER, os.kill, (victim, signal.SIGKILL)).start()
    told = "\n".join(said)
    assert ran.returncode == 0, told
    assert sorted(killed) == ["0", "1"] and told.count("is lost") == 2, told
    assert "its process has ended" in told and "its actor has died" in told, told
    assert len(re.findall(r": on worker \d", told)) == len(JOBS) + 2, told
    assert all(told.count(f"{colour}: done, files: 1") == 1 for colour in JOBS), told
    assert sorted(path.name for path in out.iterdir()) == sorted(JOBS)
    for colour in JOBS:
        [video] = [path for path in (out / colour).rglob("*") if path.is_file()]
        assert len(demo.decode(video).frames) == 9
    assert not any(Path(f"/proc/{process}").exists() for process in processes.values()), "ComfyUI outlived its worker"
