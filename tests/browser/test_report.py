"""A user compares kernels on and off: both reports and their comparison are shown on the nodes, and the meter moves meanwhile."""

from __future__ import annotations

import copy
import uuid
from typing import Any

import pytest
from playwright.sync_api import expect

from bed import tiny
from browser.front_end import RENDERERS, FrontEnd

MODEL = "FuseStreamDiffusionModelLoader"
PICTURES = """type => app.graph.nodes.filter(n => n.type === type).map(n => n.imgs?.[0]?.naturalWidth
    ?? document.querySelector(`[data-node-id="${n.id}"] img`)?.naturalWidth ?? 0)"""
# Of each text box: its text, and the lines in which it is drawn; the box itself may be out of sight.
TEXTS = """() => [...document.querySelectorAll('.fusestream-text')].map(box => {
    const twin = box.cloneNode(true), area = twin.querySelector('textarea')
    Object.assign(twin.style, { position: 'absolute', width: '500px', height: '100px' })
    area.value = box.querySelector('textarea').value
    document.body.append(twin)
    const lines = Math.round((area.scrollHeight - 12) / parseFloat(getComputedStyle(area).lineHeight))
    twin.remove()
    return [area.value, lines]
})"""
# What was ever seen of a meter: its words, and whether it was below its node, or above where another node lies below.
WATCH = """() => {
    window.seen = []
    new MutationObserver(() => {
        for (const meter of document.querySelectorAll('[data-fusestream-meter]')) {
            const node = app.graph.getNodeById(meter.dataset.fusestreamMeter)
            const [x, y] = app.canvasPosToClientPos([node.pos[0], node.pos[1] + node.size[1]])
            const box = meter.getBoundingClientRect()
            const clear = box.top >= y || box.bottom <= app.canvasPosToClientPos([node.pos[0], node.pos[1] - 20])[1]
            const beside = clear && box.width > 0 && Math.abs(box.left - x) < 3
            window.seen.push({ words: meter.innerText, blocks: meter.lastChild.children.length, beside, type: node.type })
        }
    }).observe(document.body, { subtree: true, childList: true, attributes: true })
}"""


# A canvas node loads its picture when it is drawn: all of the graph into view.
SEE_ALL = "() => { app.canvas.ds.scale = 0.3; app.canvas.ds.offset = [300, 300]; app.canvas.setDirty(true, true) }"


def graph() -> dict[str, Any]:
    """Two samplers over one streamed model, the second one without our kernels."""
    workflow = tiny.load_workflow()
    tiny.shrink(workflow, width=64, height=64, length=5, steps=10)
    names = {node["class_type"]: name for name, node in workflow.items()}
    for class_type in ("VAEDecode", "CreateVideo", "SaveVideo", "FuseStreamVAELoader"):
        del workflow[names[class_type]]
    sampler, inputs = names["KSampler"], workflow[names["KSampler"]]["inputs"]
    workflow[names[MODEL]]["inputs"]["vram_budget"] = 0.25  # the widget's step: all blocks stay
    inputs["seed"] = uuid.uuid4().int % 2**32
    model = inputs["model"]
    workflow["901"] = {"class_type": "FuseStreamKernels", "inputs": {"model": model, "kernels": "off"}}
    workflow["902"] = copy.deepcopy(workflow[sampler])
    workflow["902"]["inputs"]["model"] = ["901", 0]
    for name, source, of in (("903", sampler, model), ("904", "902", ["901", 0])):
        workflow[name] = {"class_type": "FuseStreamReport", "inputs": {"after": [source, 0], "model": of}}
    workflow["905"] = {"class_type": "FuseStreamCompare", "inputs": {"first": ["903", 1], "second": ["904", 1]}}
    return workflow


@pytest.fixture(params=RENDERERS, ids=RENDERERS.get)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"Comfy.VueNodes.Enabled": request.param}


def test_reports_and_the_meter(front: FrontEnd) -> None:
    front.page.evaluate("api => app.loadApiJson(api, 'compare')", graph())
    front.page.evaluate(SEE_ALL)
    front.page.evaluate(WATCH)
    front.run()
    expect(front.error).to_be_hidden()
    widths = front.page.evaluate("app.graph.nodes.filter(n => n.type === 'FuseStreamReport').map(n => n.size[0])")
    assert min(widths) >= 500, "new ones have room for their picture"
    for node, width, count in (("FuseStreamReport", 1120, 2), ("FuseStreamCompare", 2240, 1)):
        front.page.wait_for_function(
            f"([type, width, n]) => ({PICTURES})(type).filter(w => w === width).length === n", arg=[node, width, count]
        )
    texts = front.page.evaluate(TEXTS)
    assert len(texts) == 3
    for said, lines in texts:
        assert lines >= said.rstrip().count("\n") + 1 > 5, "lines run into each other"
    seen = [one for one in front.page.evaluate("window.seen") if one["type"] == MODEL]
    assert any(one["beside"] for one in seen) and all(one["blocks"] == 4 for one in seen if one["words"]), seen[:3]
    assert seen[-1]["words"].startswith("RAM "), "of a CPU"
    assert "VRAM" not in seen[-1]["words"] and "GB/s" in seen[-1]["words"]
    expect(front.page.locator("[data-fusestream-meter]")).to_have_count(0)
