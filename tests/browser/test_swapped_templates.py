"""ComfyUI's templates with our loaders as a user finds them: they open, the front end offers what is missing, and queues what the
tests of what they make queue."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from playwright.sync_api import expect

from bed.depth import is_thorough
from bed.server import Server
from bed.templates import SWAPPED
from bed.templates.examples import PICTURE
from bed.templates.from_stock.prompt import prompt
from bed.templates.from_stock.stand_ins import named
from browser.front_end import FrontEnd


@pytest.fixture
def settings(server: Server) -> dict[str, Any]:
    """The usual ones; before the page opens, the pictures that the templates load are there."""
    for one in SWAPPED:
        for node in one.shipped()["nodes"]:
            if node["type"] == "LoadImage":
                shutil.copyfile(server.base / "input" / PICTURE, server.base / "input" / node["widgets_values"][0])
    return {}


@pytest.mark.deep
def test_each_opens_and_queues_its_graph_and_its_files_are_offered(front: FrontEnd, server: Server) -> None:
    info: Any = server.get("/object_info")
    for one in SWAPPED if is_thorough() else SWAPPED[::3]:
        front.open_template(one.name)
        expect(front.page.get_by_test_id("subgraph-breadcrumb-missing-nodes-icon")).to_be_hidden()
        queued = {id_: {**node, "_meta": None} for id_, node in front.prompt().items()}
        wanted = {id_: {**node, "_meta": None} for id_, node in prompt(one.shipped(), info).items()}
        assert queued == wanted, one.name
        missing = [
            name for folder, name in named(one.shipped()) if not (server.base / "models" / folder / name).exists()
        ]
        if missing:
            front.error.get_by_role("button", name="View details").click()
            panel = front.page.get_by_test_id("properties-panel")
            for name in missing:
                expect(panel).to_contain_text(name)
