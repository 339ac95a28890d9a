"""What a user of the portable ComfyUI for Windows does: unpack the zip, call the doctor, start it, queue a prompt.

`dev.py test --windows` makes the portable's folder and names it here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bed import tiny, toybox
from bed.client import Client
from bed.outcome import done, frames_of
from bed.server import Server
from fusestream.checkpoints import toys

PORTABLE = "FUSESTREAM_WINDOWS_PORTABLE"
pytestmark = pytest.mark.skipif(PORTABLE not in os.environ, reason=f"{PORTABLE} names no portable ComfyUI")


@pytest.fixture(scope="module")
def portable() -> Path:
    """The folder, with the pack unpacked in `custom_nodes` and the small trained model among the models."""
    folder = Path(os.environ[PORTABLE])
    nodes = folder / "ComfyUI" / "custom_nodes"
    with zipfile.ZipFile(folder / "FuseStream-main.zip") as archive:
        archive.extractall(nodes)
    for source, (_, kind) in zip(toybox.files(), tiny.LOADERS.values(), strict=True):
        target = folder / "ComfyUI" / "models" / kind / source.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    return folder


def outside() -> dict[str, str]:
    """The user's environment: no path of the tests."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COMFYUI_PATH")}


class Portable(Server):
    """Started as its file does, with what nobody sees in a browser."""

    def prepare(self) -> None: ...

    def command(self) -> list[str]:
        return [
            str(self.python), "-s", r"ComfyUI\main.py", "--cpu", "--windows-standalone-build", "--disable-auto-launch",
            "--port", str(self.port),
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        return outside()


@pytest.fixture(scope="module")
def client(portable: Path) -> Iterator[Client]:
    """Of the started server."""
    with Portable(portable / "python_embeded" / "python.exe", portable / "ComfyUI", portable) as server:
        yield Client(server.url)


def test_the_files_that_start_it_are_those_of_the_portable(portable: Path) -> None:
    assert (portable / "run_cpu.bat").read_text().startswith(r".\python_embeded\python.exe -s ComfyUI\main.py")
    assert shutil.which("git", path="") is None and (portable / "ComfyUI" / "custom_nodes" / "FuseStream-main").is_dir()


def test_the_doctor_is_called_with_the_portables_python(portable: Path) -> None:
    pack = portable / "ComfyUI" / "custom_nodes" / "FuseStream-main"
    command = [r"..\..\..\python_embeded\python.exe", "dev.py", "doctor", "--quick"]
    said = subprocess.run(
        command, cwd=pack, env=outside(), capture_output=True, text=True, encoding="utf-8", check=False, shell=True
    )
    assert said.returncode == 0, said.stderr
    assert "ComfyUI 0.30" in said.stdout and "NVIDIA" in said.stdout
    assert "für" not in said.stdout, "it names no folders of the user's"


def test_a_prompt_makes_the_video_that_it_asks_for(client: Client) -> None:
    frames = frames_of(client, done(client, toybox.workflow(toybox.PROMPT)))
    seen, background = toys.look(toybox.film_of(frames), 2)
    assert {toy.colour: (toy.shape, toy.direction) for toy in seen} == {"red": ("ball", "left"), "blue": ("box", None)}
    assert background in toybox.PROMPT
