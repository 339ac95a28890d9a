"""The preview of a video moves at its sampler, with both of the front end's kinds of nodes.

Its messages are told to the page here; what the server sends is in tests/server/test_previews.py.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image

from browser.front_end import FrontEnd
from fusestream.nodes.page import moving_preview

COLOURS = {"red": (200, 0, 0), "green": (0, 140, 0), "blue": (0, 0, 200)}
LEAST = 20_000  # pixels on the page of a picture that can be seen well
ELEMENTS = {True: "elements", False: "canvas"}  # what draws a node; the canvas is the one that needs the pack

# A sampler alone in the middle of the page, with widgets or without; its id.
ALONE = """async type => {
    app.graph.clear()
    const node = LiteGraph.createNode(type)
    app.graph.add(node)
    node.pos = [0, 0]
    node.setSize([300, node.computeSize()[1]])
    app.canvas.ds.scale = 0.8
    app.canvas.ds.offset = [500, 150]
    app.canvas.setDirty(true, true)
    return String(node.id)
}"""
INTO_A_SUBGRAPH = """() => {
    const { node, subgraph } = app.graph.convertToSubgraph(new Set(app.graph.nodes))
    return [String(node.id), String(subgraph.nodes[0].id)]
}"""
OPEN = "id => app.canvas.setGraph(id === null ? app.rootGraph : app.rootGraph.getNodeById(id).subgraph)"
TELL = """([node, picture]) => {
    const blob = new Blob([Uint8Array.from(atob(picture), letter => letter.charCodeAt(0))], { type: 'image/jpeg' })
    const detail = { blob, nodeId: node, displayNodeId: node, parentNodeId: node, realNodeId: node, jobId: 'one' }
    app.api.dispatchEvent(new CustomEvent('b_preview_with_metadata', { detail }))
}"""
IN_AN_ELEMENT = "id => app.graph.getNodeById(id).widgets?.filter(w => w.type === 'img').length ?? 0"
SAVED = "app.graph.serialize().nodes.map(node => node.widgets_values ?? [])"


@pytest.fixture(params=ELEMENTS, ids=ELEMENTS.get)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"Comfy.VueNodes.Enabled": request.param, "Comfy.Minimap.Visible": False}


def moving() -> str:
    frames = [Image.new("RGB", (32, 32), colour) for colour in COLOURS.values()]
    return base64.b64encode(moving_preview.encoded(frames)).decode()


def still(colour: str) -> str:
    file = io.BytesIO()
    Image.new("RGB", (256, 256), COLOURS[colour]).save(file, "JPEG")
    return base64.b64encode(file.getvalue()).decode()


def seen(front: FrontEnd) -> set[str]:
    """The colours of which there was a picture on the page for a while: all of them at some time, not all at once."""
    found: set[str] = set()
    for _ in range(25):
        page = Image.open(io.BytesIO(front.page.screenshot())).convert("RGB")
        counts = {pixel: count for count, pixel in page.getcolors(page.width * page.height) or []}
        near = {
            name: sum(
                n for pixel, n in counts.items() if max(abs(a - b) for a, b in zip(pixel, colour, strict=True)) < 12
            )
            for name, colour in COLOURS.items()
        }
        found |= {name for name, count in near.items() if count >= LEAST}
        if len(found) == len(COLOURS):
            break
        front.page.wait_for_timeout(70)
    return found


@pytest.mark.deep
@pytest.mark.parametrize("sampler", ["KSampler", "SamplerCustomAdvanced"])
def test_every_frame_is_seen_at_the_sampler(front: FrontEnd, sampler: str) -> None:
    node = front.page.evaluate(ALONE, sampler)
    saved = front.page.evaluate(SAVED)
    for _ in range(2):  # it may be replaced by the next
        front.page.evaluate(TELL, [node, moving()])
        assert seen(front) == set(COLOURS)
    assert front.page.evaluate(SAVED) == saved, "nothing of it is in the workflow"
    # The next model may be another's.
    front.page.evaluate(TELL, [node, still("green")])
    front.page.wait_for_timeout(500)
    assert seen(front) == {"green"}
    assert front.page.evaluate(IN_AN_ELEMENT, node) == 0


@pytest.mark.deep
def test_in_a_subgraph_it_moves_where_its_node_is(front: FrontEnd) -> None:
    front.page.evaluate(ALONE, "KSampler")
    outer, inner = front.page.evaluate(INTO_A_SUBGRAPH)
    front.page.evaluate(TELL, [f"{outer}:{inner}", moving()])
    front.page.evaluate(OPEN, outer)
    front.page.wait_for_timeout(500)
    front.page.evaluate(TELL, [f"{outer}:{inner}", moving()])
    assert seen(front) == set(COLOURS)
    # A workflow that was changed meanwhile may have no such node.
    front.page.evaluate(TELL, ["4711", moving()])
    front.page.evaluate(OPEN, None)
