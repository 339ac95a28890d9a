"""The example workflows where the front end draws nodes as elements, as new installs do: nothing overlaps, notes can be read."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest

from bed.templates import EXAMPLES, Example
from bed.templates.__main__ import WORKFLOWS
from browser.colours import CONTRASTS
from browser.front_end import FrontEnd

LEAST_CONTRAST = 4.5  # WCAG 2, AA, for text of this size
LOADERS = ("FuseStreamDiffusionModelLoader", "FuseStreamTextEncoderLoader")  # those with a live meter
# All of a workflow in sight, at a scale at which an element is drawn whole.
OPEN = """async workflow => {
    await app.loadGraphData(workflow)
    app.canvas.ds.scale = 0.55
    app.canvas.ds.offset = [120, 120]
    app.canvas.setDirty(true, true)
}"""
DRAWN = """() => app.graph.nodes.every(n => document.querySelector(`[data-node-id="${n.id}"]`)?.offsetHeight > 0)"""
# Once the elements have had two frames to find their sizes.
SETTLED = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
BOXES = """() => app.graph.nodes.map(node => {
    const box = document.querySelector(`[data-node-id="${node.id}"]`).getBoundingClientRect()
    return [node.getTitle(), [box.left, box.top, box.right, box.bottom]]
})"""
READING = {
    "memory": "VRAM",
    "held": 3 << 30,
    "limit": 7 << 30,
    "block": 1,
    "blocks": 40,
    "resident": [0, 5],
    "rate": 1.21e10,
    "waiting": 0.1,
}
# A meter at each loader that has one, as while it streams; what it is drawn at and its box.
METERS = """async ([types, reading]) => {
    const loaders = app.graph.nodes.filter(n => types.includes(n.type))
    const hear = () => {
        for (const node of loaders) {
            const detail = { ...reading, node: String(node.id) }
            app.api.dispatchEvent(new CustomEvent('fusestream.meter', { detail }))
        }
    }
    const look = () => [...document.querySelectorAll('[data-fusestream-meter]')].map(meter => {
        const box = meter.getBoundingClientRect(), id = meter.dataset.fusestreamMeter
        const node = document.querySelector(`[data-node-id="${id}"]`).getBoundingClientRect()
        const title = app.graph.getNodeById(id).getTitle()
        return [`${title}'s meter`, [box.left, box.top, box.right, box.bottom], box.top >= node.bottom]
    })
    let found = []
    for (let frame = 0; frame < 120; frame++) {  // nodes grow when the words of their widgets are there, and make room below
        if (frame % 10 === 0) hear()  // then a meter looks for its place: several times a second
        await new Promise(done => requestAnimationFrame(done))
        found = look()
        if (frame % 10 > 1 && found.every(([, , isBelow]) => isBelow)) break
    }
    app.api.dispatchEvent(new CustomEvent('execution_success', { detail: {} }))
    return [loaders.length, found]
}"""
NOTE = """() => `[data-node-id="${app.graph.nodes.find(n => n.type === 'MarkdownNote').id}"] .comfy-markdown-content`"""


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"Comfy.VueNodes.Enabled": True}


@pytest.mark.deep
def test_nothing_overlaps_and_every_note_can_be_read(front: FrontEnd) -> None:
    """Both themes on one page, which takes longer to open than all the workflows. One note is coloured as the others are."""
    faults = {}
    for theme, examples in (("dark", EXAMPLES), ("light", EXAMPLES[:1])):
        front.page.evaluate("theme => app.extensionManager.setting.set('Comfy.ColorPalette', theme)", theme)
        for example in examples:
            show(front, example)
            if found := [*overlapping(front), *unreadable(front, [file.name for file in example.graph().files()])]:
                faults[f"{example.name}, {theme}"] = found
    assert not faults


def show(front: FrontEnd, example: Example) -> None:
    workflow = json.loads((WORKFLOWS / f"{example.listed.stem}.json").read_text(encoding="utf-8"))
    front.page.evaluate(OPEN, workflow)
    front.page.wait_for_function(DRAWN)
    front.page.evaluate(SETTLED)


def overlapping(front: FrontEnd) -> list[str]:
    """Nodes, and the meters of loaders, which lie below theirs."""
    nodes = front.page.evaluate(BOXES)
    loaders, meters = front.page.evaluate(METERS, [LOADERS, READING])
    out = [f"{name} is not below its node" for name, _, below in meters if not below]
    if len(meters) != loaders:
        out.append(f"{loaders} loaders, {len(meters)} meters")
    boxes = [*nodes, *((name, box) for name, box, _ in meters)]
    return out + [f"{one} and {other} overlap" for (one, a), (other, b) in combinations(boxes, 2) if overlap(a, b)]


def overlap(a: list[float], b: list[float]) -> bool:
    return all(a[i] < b[i + 2] and b[i] < a[i + 2] for i in (0, 1))


def unreadable(front: FrontEnd, files: list[str]) -> list[str]:
    contrasts: list[tuple[str, float]] = front.page.locator(front.page.evaluate(NOTE)).evaluate(CONTRASTS)
    shown = " ".join(text for text, _ in contrasts)
    out = [f"the note lacks {file}" for file in files if file not in shown]
    return out + [f"{text!r} has a contrast of {ratio:.1f}" for text, ratio in contrasts if ratio < LEAST_CONTRAST]
