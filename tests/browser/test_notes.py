"""Every note of ours is whole where it stands: its node has room for all of its text, and neither another node nor the
front end's map lies on it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bed.depth import is_thorough
from bed.templates import EXAMPLES, STEMS, SWAPPED
from bed.templates.__main__ import WORKFLOWS
from bed.templates.from_stock.note import HEADING
from browser.front_end import RENDERERS, FrontEnd

WIDTHS = (1280, 1440, 1920) if is_thorough() else (1440,)
EVERY = (*EXAMPLES, *SWAPPED)[:: 1 if is_thorough() else 4]
HEADINGS = ["Which file goes where, what to expect", "How it works, what to expect", HEADING]
# Of each of our notes what is wrong with it, as it is drawn at its own size. A page that draws nodes on a canvas has the note's
# text in a box of its own above it, with a field to change it, which is not seen.
FAULTS = """async ([workflow, headings]) => {
    const frames = count => new Promise(done => {
        const next = () => count-- ? requestAnimationFrame(next) : done()
        next()
    })
    await app.loadGraphData(workflow, true, true, null, { openSource: "template" })  // fitted to the window
    await frames(2)
    const map = document.querySelector('[data-testid="minimap-container"]').getBoundingClientRect()
    const notes = app.graph.nodes.filter(n => headings.includes(n.title)), faults = notes.length === 1 ? [] : ["not one note"]
    for (const note of notes) {
        const [x, y, w, h] = note.getBounding()
        const [left, top] = app.canvasPosToClientPos([x, y]), [right, bottom] = app.canvasPosToClientPos([x + w, y + h])
        if (left < map.right && map.left < right && top < map.bottom && map.top < bottom) faults.push("the map lies on it")
        app.canvas.ds.scale = 1
        app.canvas.ds.offset = [200 - note.pos[0], 120 - note.pos[1]]
        app.canvas.setDirty(true, true)
        const find = () => document.querySelector(`[data-node-id="${note.id}"]`) ?? note.widgets[0].element
        for (let tries = 0; tries < 60 && !find().querySelector("h1")?.offsetHeight; tries++) await frames(1)
        await frames(2)
        const box = find(), texts = [...box.querySelectorAll("h1, p, li")].filter(each => each.innerText.trim())
        if (texts.length < 3) faults.push(`shows ${texts.length} lines`)
        for (const each of [box, ...box.querySelectorAll("*:not(textarea, svg, svg *)")]) {
            const hides = getComputedStyle(each).overflowY !== "visible"
            if (hides && each.scrollHeight > each.clientHeight + 1) faults.push(`${each.scrollHeight} in ${each.clientHeight}`)
            if (hides && each.scrollWidth > each.clientWidth + 1) faults.push(`${each.scrollWidth} wide in ${each.clientWidth}`)
        }
        const low = Math.max(...texts.map(each => each.getBoundingClientRect().bottom))
        if (low > box.getBoundingClientRect().bottom) faults.push("ends below its node")
        const [x0, y0, w0, h0] = note.getBounding()  // an element may have grown
        for (const other of app.graph.nodes) {
            const [x1, y1, w1, h1] = other.getBounding()
            const apart = x1 >= x0 + w0 || x0 >= x1 + w1 || y1 >= y0 + h0 || y0 >= y1 + h1
            if (other !== note && !apart) faults.push(`${other.getTitle()} lies on it`)
        }
    }
    return faults
}"""


@pytest.fixture(params=RENDERERS, ids=RENDERERS.get)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"Comfy.VueNodes.Enabled": request.param}


def test_every_note_has_room_for_its_text(front: FrontEnd) -> None:
    found = {}
    for width in WIDTHS:
        front.page.set_viewport_size({"width": width, "height": 900})
        for one in EVERY:
            workflow = json.loads((WORKFLOWS / f"{STEMS[one.name]}.json").read_text(encoding="utf-8"))
            found[one.name, width] = front.page.evaluate(FAULTS, [workflow, HEADINGS])
    assert not {where: faults for where, faults in found.items() if faults}


def test_a_note_that_is_cut_is_seen(front: FrontEnd) -> None:
    workflow = json.loads((WORKFLOWS / f"{STEMS[EXAMPLES[0].name]}.json").read_text(encoding="utf-8"))
    (note,) = (node for node in workflow["nodes"] if node["type"] == "MarkdownNote")
    note["size"][1] //= 3  # where nodes are elements it grows, and comes to lie on what is below
    other = next(node for node in workflow["nodes"] if node["type"] == "KSampler")
    other["pos"] = [note["pos"][0], note["pos"][1] + note["size"][1] + 60]
    assert front.page.evaluate(FAULTS, [workflow, HEADINGS]) != []
