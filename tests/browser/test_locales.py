"""A user whose front end speaks another language finds our nodes in it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import expect

from bed.paths import ROOT
from bed.templates import EXAMPLES
from bed.templates.__main__ import WORKFLOWS
from browser.front_end import FrontEnd
from browser.overlays import CLIPPED, READING, hear, texts
from browser.test_template_elements import overlapping, show

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

ELEMENTS = "on => app.extensionManager.setting.set('Comfy.VueNodes.Enabled', on)"
OPEN = "workflow => app.loadGraphData(workflow)"
# Of the only note its node's title and its text.
NOTE = """() => {
    const note = app.graph.nodes.find(node => node.type === 'MarkdownNote')
    return [note.title, note.widgets[0].value]
}"""
SHOTS = ROOT / "output" / "notes"


@pytest.fixture(params=["ja", "zh"])
def language(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def settings(language: str) -> dict[str, Any]:
    return {"Comfy.Locale": language}


@pytest.mark.deep
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


@pytest.mark.deep("zh", "ja")
def test_notes_of_examples_are_in_the_users_language(front: FrontEnd, language: str) -> None:
    """With nodes of either kind; but for one that the user has changed. Elements that longer labels make wider do not overlap."""
    said = json.loads((ROOT / "nodes" / "web" / "notes" / f"{language}.json").read_text(encoding="utf-8"))
    front.page.evaluate(ELEMENTS, language == "ja")
    for example in (EXAMPLES[0], EXAMPLES[6]):
        workflow = json.loads((WORKFLOWS / f"{example.listed.stem}.json").read_text(encoding="utf-8"))
        (note,) = (node for node in workflow["nodes"] if node["type"] == "MarkdownNote")
        (english,) = note["widgets_values"]
        front.page.evaluate(OPEN, workflow)
        assert front.page.evaluate(NOTE) == [said[english]["title"], said[english]["text"]]
        heading, *_ = said[english]["text"].splitlines()
        shown = front.page.get_by_role("heading", name=heading.removeprefix("# "), exact=True)
        expect(shown).to_be_visible()
        assert "*" not in shown.locator("..").inner_text()
        SHOTS.mkdir(parents=True, exist_ok=True)
        front.page.screenshot(path=SHOTS / f"{example.name}-{language}.png")

        note["widgets_values"] = [f"{english} My own words."]
        front.page.evaluate(OPEN, workflow)
        assert front.page.evaluate(NOTE) == [note["title"], f"{english} My own words."]

    found = {}
    for example in EXAMPLES[::3] if language == "ja" else ():
        show(front, example)
        found[example.name] = overlapping(front)
    assert not any(found.values()), found
