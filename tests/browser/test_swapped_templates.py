"""ComfyUI's templates with our loaders as a user finds them: they open, the front end offers what is missing, and queues what the
tests of what they make queue."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect

from bed.depth import is_thorough
from bed.server import Server
from bed.templates import SWAPPED
from bed.templates.from_stock.prompt import prompt
from bed.templates.from_stock.stand_ins import named
from browser.front_end import FrontEnd


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
