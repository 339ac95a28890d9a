"""Blueprints as a user finds them: in the node search, one node for a whole task, which runs."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect

from bed.depth import is_thorough
from bed.templates.blueprints import BLUEPRINTS, Blueprint
from bed.templates.inputs import PICTURE
from browser.front_end import RENDERERS, FrontEnd

EMPTY_SPOT = (640, 500)
# The one that was put down last, with what it needs and what saves its video, and small.
AROUND = """([picture, sizes]) => {
    const node = app.graph.nodes.find(n => n.subgraph), add = type => {
        const one = LiteGraph.createNode(type)
        app.graph.add(one)
        return one
    }
    const save = add('SaveVideo')
    node.connect(0, save, 'video')
    node.inputs.forEach((input, i) => {
        if (input.type !== 'IMAGE') return
        const image = add('LoadImage')
        image.widgets.find(w => w.name === 'image').value = picture
        image.connect(0, node, i)
    })
    for (const [name, value] of Object.entries(sizes)) node.widgets.find(w => w.name === name).value = value
    node.pos = [0, 0]
    save.pos = [600, 0]
    app.canvas.ds.scale = 0.8
    app.canvas.ds.offset = [120, 140]
    app.canvas.setDirty(true, true)
    return node.widgets.map(w => [w.label ?? w.name, w.value])
}"""


@pytest.fixture(params=RENDERERS, ids=RENDERERS.get)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"Comfy.VueNodes.Enabled": request.param}


def put_down(front: FrontEnd, task: Blueprint) -> list[list[Any]]:
    """By its name in the node search, on an empty canvas. What it shows."""
    front.page.evaluate("app.graph.clear()")
    search = front.open_search(EMPTY_SPOT)
    search.get_by_role("combobox").fill(" ".join(task.name.split()[:3]))
    search.get_by_test_id("result-item").filter(has_text=task.name).click()
    front.page.mouse.click(*EMPTY_SPOT)
    front.page.wait_for_function("app.graph.nodes.some(n => n.subgraph)")
    shown: list[list[Any]] = front.page.evaluate(AROUND, [PICTURE, {"width": 64, "height": 64, "length": 5}])
    return shown


@pytest.mark.deep
def test_each_is_found_and_whole_and_one_runs(front: FrontEnd) -> None:
    for task in reversed(BLUEPRINTS if is_thorough() else (BLUEPRINTS[0], BLUEPRINTS[-1])):
        shown = put_down(front, task)
        assert "prompt" in dict(shown) and all(value is not None for _, value in shown), shown
        wanted = [
            node.type for node in task.graph().nodes if node.type not in ("MarkdownNote", "SaveVideo", "LoadImage")
        ]
        queued = front.prompt()
        inner = {id_: node for id_, node in queued.items() if ":" in id_}
        assert sorted(node["class_type"] for node in inner.values()) == sorted(wanted)
        for node in inner.values():
            links = [value for value in node["inputs"].values() if isinstance(value, list)]
            assert all(link[0] in queued for link in links), node
        sizes = [node["inputs"] for node in inner.values() if "length" in node["inputs"]]
        assert [(one["width"], one["length"]) for one in sizes] == [(64, 5)]
    front.run()
    expect(front.error).to_be_hidden()
