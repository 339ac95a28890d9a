"""All that the page has of ours, in every look: nodes on the canvas and as elements, dark and light, 1440 and 1920 pixels wide.

One page and one run for all of it: a look is changed as a user changes it, in the settings and by the size of the window. Nothing
overlaps, nothing is cut off, every text of ours has a contrast of 4.5 to 1. With --thorough, or where something is wrong, there are
screenshots in `output/looks`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import pytest
from playwright.sync_api import Locator, expect

from bed.depth import is_thorough
from bed.paths import ROOT
from bed.server import PACK
from bed.templates import EXAMPLES, TITLES, Example
from bed.templates.__main__ import SUBGRAPHS, WORKFLOWS
from bed.templates.blueprints import BLUEPRINTS
from browser.colours import CONTRASTS
from browser.front_end import CARDS as OURS
from browser.front_end import FrontEnd
from browser.overlays import CLIPPED, READING, hear
from browser.test_panel import CLIPPED as WIDER
from browser.test_panel import GONE, item, open_panel
from browser.test_plan import PLAN
from browser.test_preview import TELL, moving
from browser.test_report import MODEL
from browser.test_report import graph as two_runs

LEAST_CONTRAST = 4.5  # WCAG 2, AA, for text of this size
READABLE = 8 / 14  # of a scale: below, the front end draws nodes without their text
SHOTS = ROOT / "output" / "looks"
HEIGHTS = {1440: 900, 1920: 1080}  # of a window by its width
LOOKS = [(elements, theme, width) for elements in (False, True) for theme in ("dark", "light") for width in HEIGHTS]
# Those of the examples that test_template.py leaves out, each in one look.
SOME = EXAMPLES[1::2]
STREAMS = {**GONE, "resident": 2**29, "window": 2**28, "pinned": 2**31, "streams": True}

SET = "([id, value]) => app.extensionManager.setting.set(id, value)"
# Once what is drawn as elements is there, and two frames have found its sizes.
SETTLED = """async elements => {
    const frame = () => new Promise(requestAnimationFrame), graph = app.canvas.graph ?? app.graph
    const isDrawn = node => document.querySelector(`[data-node-id="${node.id}"]`)?.offsetHeight > 0
    for (let frames = 0; frames < 100 && elements && !graph.nodes.every(isDrawn); frames++) await frame()
    for (let frames = 0; frames < 2; frames++) await frame()
}"""
# As the template browser opens one: the front end fits it to the window.
OPEN = "([workflow, name]) => app.loadGraphData(workflow, true, true, name, { openSource: 'template' })"
# A node with its title as it lies on the page: on the canvas, or as an element.
BOXES = """() => (app.canvas.graph ?? app.graph).nodes.map(node => {
    const element = document.querySelector(`[data-node-id="${node.id}"]`)
    if (element) {
        const box = element.getBoundingClientRect()
        return [node.getTitle(), [box.left, box.top, box.right, box.bottom]]
    }
    const [x, y, width, height] = node.getBounding()
    return [node.getTitle(), [...app.canvasPosToClientPos([x, y]), ...app.canvasPosToClientPos([x + width, y + height])]]
})"""
# The nodes that a run fills, side by side, and the others out of sight.
SIDE_BY_SIDE = """types => {
    const all = types.map(type => app.graph.nodes.find(node => node.type === type))
    let x = 0
    for (const node of all) {
        node.pos = [x, 0]
        x += node.size[0] + 40
    }
    app.graph.nodes.filter(node => !all.includes(node)).forEach((node, i) => { node.pos = [1200 * i, 4000] })
    app.canvas.ds.scale = 0.7
    app.canvas.ds.offset = [120, 180]
    app.canvas.setDirty(true, true)
    return all.map(node => String(node.id))
}"""
COLOURED = 'app.graph.nodes.filter(node => node.bgcolor).map(node => `[data-node-id="${node.id}"]`).join()'
# A blueprint's inside, all of it in sight.
INSIDE = """() => {
    const graph = app.graph.nodes.find(node => node.subgraph).subgraph, ds = app.canvas.ds
    app.canvas.setGraph(graph)
    const boxes = [...graph.nodes, graph.inputNode, graph.outputNode].map(one => one.boundingRect)
    const [left, top] = [0, 1].map(i => Math.min(...boxes.map(box => box[i])))
    const [right, bottom] = [0, 1].map(i => Math.max(...boxes.map(box => box[i] + box[i + 2])))
    const { clientWidth, clientHeight } = app.canvas.canvas
    ds.scale = Math.min((clientWidth - 160) / (right - left), (clientHeight - 240) / (bottom - top))
    ds.offset = [100 / ds.scale - left, 150 / ds.scale - top]
    app.canvas.setDirty(true, true)
}"""
OUTSIDE = "() => app.canvas.setGraph(app.rootGraph)"
# Of our cards in the template browser: the text that has more lines than are shown, and each card's box.
CARDS = """dialog => [...dialog.querySelectorAll('[data-testid^="template-workflow-FuseStream"]')].map(card => {
    const box = card.getBoundingClientRect()
    const cut = [...card.querySelectorAll('p')].filter(one => one.scrollHeight > one.clientHeight + 1)
    return [cut.map(one => one.textContent), [box.left, box.top, box.right, box.bottom]]
})"""


class Looks:
    """The page in one look after the other. faults: of all of them, by place and look."""

    def __init__(self, front: FrontEnd) -> None:
        self.front, self.page = front, front.page
        self.faults: dict[str, list[str]] = {}
        self.name, self.elements = "", False

    def each(self, *kinds: bool) -> Iterator[int]:
        """The number of each look with these kinds of nodes, canvas or elements."""
        for kind in kinds:
            if kind != self.elements:
                self.page.evaluate(SET, ["Comfy.VueNodes.Enabled", kind])
                self.elements = kind
            for number, (elements, theme, width) in enumerate(LOOKS):
                if elements != kind:
                    continue
                self.name = f"{'elements' if kind else 'canvas'}-{theme}-{width}"
                self.page.evaluate(SET, ["Comfy.ColorPalette", theme])
                self.page.set_viewport_size({"width": width, "height": HEIGHTS[width]})
                self.settle()
                yield number

    def settle(self) -> None:
        self.page.evaluate(SETTLED, self.elements)

    def note(self, place: str, faults: Sequence[str]) -> None:
        if faults:
            self.faults[f"{place}, {self.name}"] = list(faults)
        if faults or is_thorough():  # each takes as long as all that is asked of the page
            SHOTS.mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=SHOTS / f"{place}-{self.name}.png")

    def overlapping(self, *more: tuple[str, list[float]]) -> list[str]:
        """Nodes, and what else has a box."""
        boxes = [*self.page.evaluate(BOXES), *more]
        return [f"{one} and {other} overlap" for (one, a), (other, b) in combinations(boxes, 2) if overlap(a, b)]

    def pale(self, shown: Locator) -> list[str]:
        """Texts that are hard to read; that there are some."""
        found = [pair for one in shown.all() for pair in one.evaluate(CONTRASTS)]
        pale = [f"{text[:40]!r} has a contrast of {ratio:.1f}" for text, ratio in found if ratio < LEAST_CONTRAST]
        return pale if found else ["no text is in sight"]


def overlap(a: list[float], b: list[float]) -> bool:
    """By more than what is rounded."""
    return all(a[i] < b[i + 2] - 0.5 and b[i] < a[i + 2] - 0.5 for i in (0, 1))


def box_of(shown: Locator) -> list[float]:
    box = shown.bounding_box()
    assert box is not None
    return [box["x"], box["y"], box["x"] + box["width"], box["y"] + box["height"]]


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"Comfy.VueNodes.Enabled": False, "Comfy.Minimap.Visible": False}


@pytest.mark.deep
def test_every_look(front: FrontEnd) -> None:
    looks = Looks(front)
    nodes_that_ran(looks)
    panel(looks)
    settings_of_ours(looks)
    template_browser(looks)
    for number in looks.each(True, False):
        blueprint(looks, number)
        for one in EXAMPLES if is_thorough() else SOME[number :: len(LOOKS)]:
            example(looks, one)
    assert not looks.faults, json.dumps(looks.faults, indent=1)


def nodes_that_ran(looks: Looks) -> None:
    """The loader with its quality, what it says of its steps, and its meter; the sampler with a preview; plan and report."""
    page, workflow = looks.page, two_runs()
    samplers = [node["inputs"] for node in workflow.values() if node["class_type"] == "KSampler"]
    for sampler in samplers:
        sampler["steps"] = 2
    inputs = {"model": samplers[0]["model"], "latent": samplers[0]["latent_image"], "steps": 2, "guidance": 6.0}
    workflow["906"] = {"class_type": PLAN, "inputs": inputs}
    page.evaluate("api => app.loadApiJson(api, 'looks')", workflow)
    looks.front.run()
    expect(looks.front.error).to_be_hidden()
    for _ in looks.each(False, True):
        loader, sampling, *_ = page.evaluate(SIDE_BY_SIDE, [MODEL, "KSampler", PLAN, "FuseStreamReport"])
        page.evaluate(TELL, [sampling, moving()])
        meter = hear(looks.front, loader, READING)
        looks.settle()
        faults = looks.overlapping(("the meter", box_of(meter)))
        faults += looks.pale(page.locator(".fusestream-overlay, .fusestream-text"))
        faults += [f"{text!r} is cut off" for text in meter.evaluate(CLIPPED)]
        looks.note("nodes", faults)


# What is the same with both kinds of nodes: it is looked at while nodes are elements.


def panel(looks: Looks) -> None:
    looks.page.route("**/fusestream/models", lambda route: route.fulfill(json={"models": [STREAMS]}))
    shown = open_panel(looks.front)
    expect(item(shown, STREAMS["name"])).to_be_visible()
    for _ in looks.each(True):
        looks.note("panel", [*looks.pale(shown), *(f"{text!r} is cut off" for text in shown.evaluate(WIDER))])
    looks.page.get_by_role("button", name=PACK, exact=True).press("Enter")
    expect(shown).to_have_count(0)


def settings_of_ours(looks: Looks) -> None:
    """On the front end's ground, in its colours; ours are the words."""
    looks.page.get_by_role("button", name="Settings (Ctrl").click()
    dialog = looks.page.get_by_role("dialog")
    dialog.get_by_text(PACK, exact=True).first.click()
    expect(dialog.get_by_text("Quality of new loaders")).to_be_visible()
    for _ in looks.each(True):
        labels = dialog.locator(".setting-item label, .form-label")
        looks.note("settings", [f"{text!r} is cut off" for one in labels.all() for text in one.evaluate(WIDER)])
    looks.page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)


def template_browser(looks: Looks) -> None:
    """What a card's title is too long for is said below it, whole."""
    dialog = looks.front.browse_templates()
    looks.front.load_cards(dialog, len(TITLES))
    expect(dialog.get_by_test_id(OURS)).to_have_count(len(TITLES))
    for _ in looks.each(True):
        found = dialog.evaluate(CARDS)
        faults = [f"{text!r} is cut off" for texts, _ in found for text in texts]
        faults += [f"two cards overlap at {a}" for (_, a), (_, b) in combinations(found, 2) if overlap(a, b)]
        looks.note("templates", faults)
    looks.page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)


def blueprint(looks: Looks, number: int) -> None:
    """One node for all of it, and what is in it; each with both kinds of nodes, and with --thorough in every look."""
    for task in BLUEPRINTS if is_thorough() else (BLUEPRINTS[number % len(BLUEPRINTS)],):
        workflow = json.loads((SUBGRAPHS / f"{task.name}.json").read_text(encoding="utf-8"))
        looks.page.evaluate(OPEN, [workflow, task.name])
        looks.settle()
        looks.note(f"{task.name}, closed", looks.overlapping())
        looks.page.evaluate(INSIDE)
        looks.settle()
        looks.note(f"{task.name}, open", looks.overlapping())
        looks.page.evaluate(OUTSIDE)


def example(looks: Looks, one: Example) -> None:
    """Its nodes, and the texts on grounds that we have chosen."""
    workflow = json.loads((WORKFLOWS / f"{one.title}.json").read_text(encoding="utf-8"))
    looks.page.evaluate(OPEN, [workflow, one.title])
    looks.settle()
    scale: float = looks.page.evaluate("app.canvas.ds.scale")
    faults = [f"drawn at a scale of {scale:.2f}"] if scale < READABLE else []
    if looks.elements:
        faults += looks.pale(looks.page.locator(looks.page.evaluate(COLOURED)))
    looks.note(one.name, [*faults, *looks.overlapping()])
