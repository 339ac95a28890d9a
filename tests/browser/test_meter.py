"""The live meter as a user sees it: readable in their language and theme, beside no other node's business, and at the right node.

Its messages are told to the page here: the messages that the server sends are in
tests/unit/nodes/page/test_meter.py, a whole run in test_report.py;
other languages in test_locales.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect

from browser.colours import PIXEL, contrast
from browser.front_end import RENDERERS, FrontEnd
from browser.overlays import CLIPPED, GIB, HEAR, READING, hear, texts

LOADER = "FuseStreamDiffusionModelLoader"
# The most digits that any card has use for.
LARGEST = {**READING, "held": int(129.87 * GIB), "limit": int(139.81 * GIB), "rate": 123.4e9, "waiting": 1}
WORDS = ["VRAM 6.41 GiB of 7.00 GiB", "12.1 GB/s", "10% waiting"]

SET = "([id, value]) => app.extensionManager.setting.set(id, value)"
# Three nodes of a type below each other, all of them in view; the gap is between them as they are drawn. Their ids.
STACK = """async ([type, gap, width]) => {
    const frames = n => new Promise(done => setTimeout(done, n * 50))
    app.graph.clear()
    app.canvas.ds.scale = 0.8
    app.canvas.ds.offset = [250, 150]
    const nodes = [0, 1, 2].map(i => {
        const node = LiteGraph.createNode(type)
        app.graph.add(node)
        node.setSize([width === 'least' ? node.computeSize()[0] : node.size[0], node.computeSize()[1]])
        node.pos = [0, 300 * i]
        return node
    })
    app.canvas.setDirty(true, true)
    await frames(10)
    let y = 0
    for (const node of nodes) {
        node.pos = [0, y]
        const element = document.querySelector(`[data-node-id="${node.id}"]`)
        const height = element ? element.getBoundingClientRect().height / 0.8 : node.size[1] + LiteGraph.NODE_TITLE_HEIGHT
        y += height + gap
    }
    app.canvas.setDirty(true, true)
    await frames(10)
    return nodes.map(node => String(node.id))
}"""
# A node's box on the page with its title; drawn as an element, it may be higher than the graph knows.
BOX = """id => {
    const element = document.querySelector(`[data-node-id="${id}"]`)
    if (element) return element.getBoundingClientRect().toJSON()
    const [x, y, width, height] = app.canvas.graph.getNodeById(id).getBounding()
    const [left, top] = app.canvasPosToClientPos([x, y]), [right, bottom] = app.canvasPosToClientPos([x + width, y + height])
    return { left, top, right, bottom }
}"""
# Red, green, blue and opacity of what it is painted with, its own ground first, then its ink and its bars.
COLOURS = """meter => {
    %s
    const bars = [meter.querySelector('.fusestream-bar > div'), ...meter.lastChild.children]
    const painted = [getComputedStyle(meter).backgroundColor, getComputedStyle(meter.querySelector('.fusestream-line div')).color]
    return [...painted, ...new Set(bars.map(one => getComputedStyle(one).backgroundColor))].map(pixel)
}""".replace("%s", PIXEL)
SUBGRAPH = """() => {
    app.graph.clear()
    const inner = LiteGraph.createNode('%s')
    app.graph.add(inner)
    const { node, subgraph } = app.graph.convertToSubgraph(new Set([inner]))
    node.pos = [0, 0]
    app.canvas.ds.scale = 0.8
    app.canvas.ds.offset = [250, 250]
    const within = subgraph.nodes[0]
    // A node of the same number outside.
    const other = LiteGraph.createNode('%s')
    other.id = within.id
    app.graph.add(other)
    other.pos = [500, 0]
    return { node: String(node.id), inner: String(within.id), other: String(other.id) }
}""".replace("%s", LOADER)
RECT = "one => one.getBoundingClientRect().toJSON()"
SAY = "key => import('/extensions/FuseStream/js/words.js').then(words => words.words(key, { percent: 10 }))"
OPEN = "id => app.canvas.setGraph(id === null ? app.rootGraph : app.rootGraph.getNodeById(id).subgraph)"


@pytest.fixture(params=RENDERERS, ids=RENDERERS.get)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"Comfy.VueNodes.Enabled": request.param, "Comfy.Minimap.Visible": False}


def overlap(one: dict[str, float], other: dict[str, float]) -> bool:
    across = one["left"] < other["right"] - 1 and other["left"] < one["right"] - 1
    return across and one["top"] < other["bottom"] - 1 and other["top"] < one["bottom"] - 1


@pytest.mark.deep
def test_real_figures_are_read_in_every_theme(front: FrontEnd) -> None:
    for width in ("default", "least"):
        node = front.page.evaluate(STACK, [LOADER, 200, width])[0]
        for reading in (READING, LARGEST):
            meter = hear(front, node, reading)
            assert texts(meter) == WORDS or reading is LARGEST
            assert meter.evaluate(CLIPPED) == []
    assert texts(hear(front, node, {**READING, "memory": "RAM"}))[0] == "RAM 6.41 GiB of 7.00 GiB"
    grounds = []
    for theme in ("dark", "light"):
        front.page.evaluate(SET, ["Comfy.ColorPalette", theme])
        ground, ink, *bars = hear(front, node, READING).evaluate(COLOURS)
        assert contrast(ink, ground) >= 4.5
        assert len(bars) == 4 and min(contrast(bar, ground) for bar in bars) >= 3, "used, resident, streamed, now"
        grounds.append(sum(ground[:3]) / 3)
    assert grounds[0] < 60 and grounds[1] > 200
    front.page.evaluate(SET, ["Comfy.Locale", "ko"])  # which we do not speak
    assert front.page.evaluate(SAY, "waiting") == "10% waiting"


@pytest.mark.deep
def test_it_covers_no_other_node(front: FrontEnd) -> None:
    # With room below all of them; and close together, where the first has room above it and the middle one nowhere.
    for gap, where in ((90, "below below below"), (2, "above within below")):
        ids = front.page.evaluate(STACK, [LOADER, gap, "default"])
        boxes = {id_: front.page.evaluate(BOX, id_) for id_ in ids}
        found_at = [hear(front, id_, READING).evaluate(RECT) for id_ in ids]
        for id_, at, place in zip(ids, found_at, where.split(), strict=True):
            own, others = boxes[id_], [box for other, box in boxes.items() if other != id_]
            assert not any(overlap(at, box) for box in others), (gap, place)
            title = {**own, "bottom": own["top"] + 24}
            assert not overlap(at, title) and abs(at["left"] - own["left"]) < 3
            found = "below" if at["top"] >= own["bottom"] else "above" if at["bottom"] <= own["top"] else "within"
            assert found == place, gap
        expect(front.page.locator("[data-fusestream-meter]")).to_have_count(0)  # silence


@pytest.mark.deep
def test_in_a_subgraph_it_is_where_its_node_is(front: FrontEnd) -> None:
    ids = front.page.evaluate(SUBGRAPH)
    assert ids["inner"] != ids["node"]  # and the same as the other's, before front end 1.58
    path = f"{ids['node']}:{ids['inner']}"

    def drawn_at(node: str) -> bool:
        front.page.wait_for_timeout(200)
        at = hear(front, path, READING).evaluate(RECT)
        box = front.page.evaluate(BOX, node)
        return abs(at["left"] - box["left"]) < 3 and 0 <= at["top"] - box["bottom"] < 20

    assert drawn_at(ids["node"]) and not drawn_at(ids["other"])
    front.page.evaluate(OPEN, ids["node"])
    assert drawn_at(ids["inner"])
    # A node that is elsewhere, or nowhere in the workflow, is not shown at any.
    for node in (ids["other"], "4711", f"{ids['other']}:{ids['inner']}"):
        front.page.evaluate(HEAR, ["meter", {**READING, "node": node}])
        expect(front.page.locator(f'[data-fusestream-meter="{node}"]')).to_be_hidden()
        expect(front.page.locator(f'[data-fusestream-meter="{node}"]')).to_have_count(1)
    front.page.evaluate(OPEN, None)
    assert drawn_at(ids["node"])


@pytest.mark.deep
@pytest.mark.parametrize("settings", [{}])
def test_the_meter_can_be_switched_off(front: FrontEnd) -> None:
    (node, *_) = front.page.evaluate(STACK, [LOADER, 120, "default"])
    meter = hear(front, node, READING)
    front.page.evaluate(SET, ["FuseStream.Meter.Enabled", False])
    expect(meter).to_have_count(0)
    front.page.evaluate(HEAR, ["meter", {**READING, "node": node}])
    expect(meter).to_have_count(0)
    front.page.evaluate(SET, ["FuseStream.Meter.Enabled", True])
    hear(front, node, READING)
    expect(meter).to_have_count(0)  # silence
