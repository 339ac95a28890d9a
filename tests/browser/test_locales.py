"""A user whose front end speaks another language finds our nodes in it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bed.paths import ROOT
from browser.front_end import FrontEnd
from browser.overlays import CLIPPED, READING, hear, texts

ADDED = """type => {
    const node = LiteGraph.createNode(type)
    app.graph.add(node)
    return {
        title: node.title,
        labels: Object.fromEntries(node.widgets.map(w => [w.name, w.label])),
    }
}"""

# No other node in the graph, at its least width; its id.
ALONE = """type => {
    const node = LiteGraph.createNode(type)
    app.graph.clear()
    app.graph.add(node)
    node.setSize(node.computeSize())
    node.pos = [0, 0]
    return String(node.id)
}"""


@pytest.fixture(params=["ja", "zh"])
def language(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def settings(language: str) -> dict[str, Any]:
    return {"Comfy.Locale": language}


def test_nodes_and_their_meter_speak_the_users_language(front: FrontEnd, language: str) -> None:
    translated = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
    for type_, node in translated.items():
        shown = front.page.evaluate(ADDED, type_)
        assert shown["title"] == node["display_name"]
        inputs = {name: one["name"] for name, one in node["inputs"].items() if name in shown["labels"]}
        assert shown["labels"] | inputs == shown["labels"]

    ours = json.loads((ROOT / "locales" / language / "main.json").read_text(encoding="utf-8"))["fuseStream"]
    loader = front.page.evaluate(ALONE, "FuseStreamDiffusionModelLoader")
    meter = hear(front, loader, READING)
    held = ours["held"].format(memory="VRAM", held="6.41 GiB", limit="7.00 GiB")
    assert texts(meter) == [held, "12.1 GB/s", ours["waiting"].format(percent=10)]
    assert meter.evaluate(CLIPPED) == []
