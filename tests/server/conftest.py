"""One real server for all server tests, with the tiny checkpoints in its model folders."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bed import tiny
from bed.client import Client, Workflow
from bed.server import Server


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The tiny diffusion model, text encoder and VAE, below the server's `models`."""
    return tiny.write_checkpoints(tmp_path_factory.mktemp("comfyui") / "models")


@pytest.fixture(scope="session")
def server(files: list[Path]) -> Iterator[Server]:
    base = files[0].parents[2]
    for pack in ("other_pack", "route_table"):
        folder = base / "custom_nodes" / f"A_{pack}"  # which comes before ours
        folder.mkdir(parents=True)
        shutil.copyfile(Path(__file__).with_name(f"{pack}.py"), folder / "__init__.py")
    with Server(Path(sys.executable), Path(os.environ["COMFYUI_PATH"]), base) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Client:
    return Client(server.url)


@pytest.fixture
def workflow(files: list[Path]) -> Workflow:
    """The example workflow on the tiny checkpoints, at the smallest size that still crosses the VAE's cache."""
    workflow = tiny.load_workflow()
    tiny.use_files(workflow, files)
    tiny.shrink(workflow, width=64, height=64, length=9, steps=3)
    return workflow


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.server)
