"""A user whose front end speaks another language finds our nodes in it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bed.paths import ROOT
from browser.front_end import FrontEnd

ADDED = """type => {
    const node = LiteGraph.createNode(type)
    app.graph.add(node)
    return {
        title: node.title,
        labels: Object.fromEntries(node.widgets.map(w => [w.name, w.label])),
    }
}"""


@pytest.fixture(params=["ja", "zh"])
def language(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def settings(language: str) -> dict[str, Any]:
    return {"Comfy.Locale": language}


def test_nodes_speak_the_users_language(front: FrontEnd, language: str) -> None:
    translated = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
    for type_, texts in translated.items():
        shown = front.page.evaluate(ADDED, type_)
        assert shown["title"] == texts["display_name"]
        for name, label in shown["labels"].items():
            assert label == texts["inputs"][name]["name"]
