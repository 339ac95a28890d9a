"""What the templates load is there on a fresh install: it is put into the input folder as one opens, and nothing is asked for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from bed.server import Server
from bed.templates import EXAMPLES, STEMS, SWAPPED
from bed.templates.__main__ import INPUTS, WORKFLOWS
from bed.templates.from_stock.swap import nodes
from browser.front_end import FrontEnd

LOADERS = ("LoadImage", "LoadVideo")
NAMES = {path.name for path in INPUTS.iterdir()}
FIRST = "wan2.2_i2v_14B_4_steps"
OPEN = "workflow => app.loadGraphData(workflow)"
# Of the nodes that load: what they name and their lists do not have. The front end says that such a one is missing.
# The front end keeps the workflow of a page as a draft, and would ask for its pictures in another module's test.
OWN_PAGE = True
LACKING = """types => app.graph.nodes.filter(n => types.includes(n.type))
    .map(n => n.widgets.find(w => w.type === 'combo')).filter(w => !w.options.values.includes(w.value)).map(w => w.value)"""


@pytest.fixture
def settings(server: Server, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The usual ones; before the page opens, the inputs that other tests have go."""
    inputs = server.base / "input"
    for name in NAMES:
        shutil.move(inputs / name, tmp_path / name)
    yield {}
    for name in NAMES:
        shutil.move(tmp_path / name, inputs / name)


def loading(name: str) -> tuple[dict[str, Any], set[str]]:
    """A workflow, and the files that it loads."""
    workflow = json.loads((WORKFLOWS / f"{STEMS[name]}.json").read_text(encoding="utf-8"))
    return workflow, {node["widgets_values"][0] for node in nodes(workflow) if node["type"] in LOADERS}


def test_every_template_finds_its_inputs_on_a_fresh_install(front: FrontEnd, server: Server) -> None:
    inputs, put = server.base / "input", set[str]()
    users = inputs / "fusestream_example.jpg"
    for one in (*EXAMPLES, *SWAPPED):
        workflow, names = loading(one.name)
        if not names:
            continue
        front.page.evaluate(OPEN, workflow)
        put |= names
        assert {path.name for path in inputs.glob("fusestream_*")} == put <= NAMES
        assert front.page.evaluate(LACKING, LOADERS) == [], one.name
        if one in EXAMPLES:  # whose models are there
            expect(front.error).to_be_hidden()
        if one.name == FIRST:
            assert users.read_bytes() == (INPUTS / users.name).read_bytes()
            shutil.copyfile(INPUTS / "fusestream_example_last.jpg", users)
    assert put == NAMES
    assert users.read_bytes() != (INPUTS / users.name).read_bytes(), "one that is there stays as it is"


def test_an_input_that_is_none_of_ours_is_asked_for(front: FrontEnd) -> None:
    workflow, (name,) = loading("style_transfer")
    (picture,) = (node for node in workflow["nodes"] if node["type"] in LOADERS)
    picture["widgets_values"][0] = f"no_{name}"
    front.page.route("**/view?*", lambda route: route.abort("aborted"))  # its picture
    front.page.evaluate(OPEN, workflow)
    assert front.page.evaluate(LACKING, LOADERS) == [f"no_{name}"]
    expect(front.error).to_be_visible()
