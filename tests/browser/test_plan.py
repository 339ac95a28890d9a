"""A user asks before sampling: the plan alone is run by its node's button, then all of it, and the loader says how far it is."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from playwright.sync_api import expect

from bed import tiny
from browser.front_end import RENDERERS, FrontEnd

LOADER, PLAN = "FuseStreamDiffusionModelLoader", "FuseStreamPlan"
STEPS = 12
# The two nodes alone in sight, and a line of what was ever under the loader.
LOOK = """([loader, plan]) => {
    const [first, second] = [loader, plan].map(type => app.graph.nodes.find(n => n.type === type))
    app.graph.nodes.forEach((node, i) => { node.pos = [100 + 450 * i, 3000] })
    first.pos = [0, 0]
    second.pos = [450, 0]
    app.canvas.ds.scale = 0.8
    app.canvas.ds.offset = [120, 140]
    app.canvas.setDirty(true, true)
    window.seen = []
    window.setInterval(() => {
        const text = first.widgets.find(w => w.name === '$$node-text-preview')?.value
        if (text && text !== window.seen.at(-1)) window.seen.push(text)
    }, 50)
}"""
TEXT = """type => {
    const box = app.graph.nodes.find(n => n.type === type).widgets.find(w => w.name === 'fusestream_text')
    return box.element.querySelector('textarea').value
}"""
WIDTH = """type => {
    const node = app.graph.nodes.find(n => n.type === type)
    return node.imgs?.[0]?.naturalWidth ?? document.querySelector(`[data-node-id="${node.id}"] img`)?.naturalWidth ?? 0
}"""


@pytest.fixture(params=RENDERERS, ids=RENDERERS.get)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"Comfy.VueNodes.Enabled": request.param}


def graph() -> dict[str, Any]:
    """Up to the latents, planned and sampled."""
    workflow = tiny.load_workflow()
    tiny.shrink(workflow, width=64, height=64, length=9, steps=STEPS)
    names = {node["class_type"]: name for name, node in workflow.items()}
    for class_type in ("VAEDecode", "CreateVideo", "SaveVideo", "FuseStreamVAELoader"):
        del workflow[names[class_type]]
    sampler = workflow[names["KSampler"]]["inputs"]
    sampler["seed"] = uuid.uuid4().int % 2**32
    inputs = {"model": sampler["model"], "latent": sampler["latent_image"], "steps": 0, "guidance": 0.0}
    workflow["901"] = {"class_type": PLAN, "inputs": inputs}
    workflow["902"] = {"class_type": "PreviewAny", "inputs": {"source": [names["KSampler"], 0]}}
    return workflow


@pytest.mark.deep
def test_before_and_while_it_samples(front: FrontEnd) -> None:
    front.page.evaluate("api => app.loadApiJson(api, 'plan')", graph())
    front.page.evaluate(LOOK, [LOADER, PLAN])
    front.select(front.node("FuseStream Plan"))
    front.page.locator(".selection-toolbox").get_by_role("button", name="Execute to selected").click()
    front.page.wait_for_function(f"type => ({TEXT})(type).includes('It fits')", arg=PLAN, timeout=60_000)
    front.page.wait_for_function(f"type => ({WIDTH})(type) === 1120", arg=PLAN)
    text = front.page.evaluate(TEXT, PLAN)
    assert f"64x64, 9 frames, {STEPS} steps, two prompts a step" in text
    assert front.page.evaluate("window.seen") == [], "nothing was sampled"
    front.run()
    expect(front.error).to_be_hidden()
    seen = front.page.evaluate("window.seen")
    assert seen[-1].startswith(f"{STEPS} steps, ") and seen[-1].endswith(" of sampling")
    assert any(" a step, " in line and line.startswith("step ") and line.endswith(" left") for line in seen), seen
    saved = front.page.evaluate("type => app.graph.serialize().nodes.find(n => n.type === type).widgets_values", LOADER)
    assert len(saved) == 5, "the text is no input"
