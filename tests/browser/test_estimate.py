"""The estimate at a model's loader as a user sees it: there when a workflow is open, new when something is edited, without a run.

What the server reckons is in tests/unit/nodes/test_estimate_route.py. For looks the page is told of
cards that this machine does not have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from comfyui_workflow_templates import get_asset_path
from playwright.sync_api import Locator, Route, expect

from bed.depth import is_thorough
from bed.server import Server
from bed.templates import EXAMPLES, files
from bed.templates.__main__ import WORKFLOWS
from browser.colours import PIXEL, contrast
from browser.front_end import FrontEnd
from browser.overlays import CLIPPED, READING, hear
from browser.toasts import toasts
from browser.widgets import Canvas, Elements

LOADERS = ("FuseStreamDiffusionModelLoader", "FuseStreamCheckpointLoader")
TEMPLATE = "wan2.1_t2v_1.3B"
ROUTE = "**/fusestream/estimate"
GIB = 2**30

STREAMS = {
    "verdict": "STREAMS", "taken": int(6.71 * GIB), "free": int(7.02 * GIB), "lacks": 0, "activations": int(1.93 * GIB),
    "window": int(0.53 * GIB), "steps": 20, "source": "PREDICTED", "step": "38 s", "all": "13 min",
    "auto": "INT8",
    "ram": {"files": int(33.1 * GIB), "eachStep": 0, "eachPrompt": int(13.4 * GIB)},
    "changes": [
        {"what": "quality", "values": ["Fastest"], "all": "7 min"}, {"what": "few steps", "values": [4], "all": "77 s"},
    ],
}  # fmt: skip
MOST = {**STREAMS, "isMost": True}
NOT = {
    **STREAMS, "verdict": "NOT", "lacks": int(1.21 * GIB), "source": None,
    "ram": {"files": int(33.1 * GIB), "eachStep": int(5.7 * GIB), "eachPrompt": int(26 * GIB)},
    "changes": [{"what": "frames", "values": [41], "all": None}, {"what": "size", "values": [480, 832], "all": None}],
}  # fmt: skip
# All of a workflow in sight, and its loaders.
SHOW = """async ([workflow, scale, x, y]) => {
    await app.loadGraphData(workflow)
    app.canvas.ds.scale = scale
    app.canvas.ds.offset = [x, y]
    app.canvas.setDirty(true, true)
}"""
IDS = "types => app.graph.nodes.filter(n => types.includes(n.type)).map(n => String(n.id))"
SET = "([id, value]) => app.extensionManager.setting.set(id, value)"
# What every node takes of the page, drawn in either way.
BOXES = """() => app.canvas.graph.nodes.map(node => {
    const element = document.querySelector(`[data-node-id="${node.id}"]`)
    if (element) return element.getBoundingClientRect().toJSON()
    const [x, y, width, height] = node.getBounding()
    const [left, top] = app.canvasPosToClientPos([x, y]), [right, bottom] = app.canvasPosToClientPos([x + width, y + height])
    return { left, top, right, bottom }
})"""
COLOURS = """element => {
    %s
    const lines = [...element.querySelectorAll('.fusestream-words')]
    return [getComputedStyle(element).backgroundColor, ...lines.map(one => getComputedStyle(one).color)].map(pixel)
}""".replace("%s", PIXEL)
RECT = "one => one.getBoundingClientRect().toJSON()"
QUEUED = "async () => { const told = await (await app.api.fetchApi('/queue')).json(); return Object.values(told).flat().length }"


@pytest.fixture(params=[Elements, Canvas] if is_thorough() else [Elements], ids=lambda one: one.__name__.lower())
def drawn_by(request: pytest.FixtureRequest) -> type[Canvas | Elements]:
    kind: type[Canvas | Elements] = request.param
    return kind


@pytest.fixture
def settings(drawn_by: type[Canvas | Elements]) -> dict[str, Any]:
    return drawn_by.SETTINGS


def workflow(name: str) -> Any:
    stem = next(example.listed.stem for example in EXAMPLES if example.name == name)
    return json.loads((WORKFLOWS / f"{stem}.json").read_text(encoding="utf-8"))


def shown(front: FrontEnd, node: str) -> Locator:
    return front.page.locator(f'[data-fusestream-estimate="{node}"]')


def told(front: FrontEnd, *of_each: dict[str, Any]) -> list[Any]:
    """From now on the server says this of every loader. What it was asked is put into what is returned."""
    asked: list[Any] = []

    def answer(route: Route) -> None:
        prompt = route.request.post_data_json["prompt"]
        asked.append(prompt)
        loaders = {name: list(of_each) for name, node in prompt.items() if node["class_type"] in LOADERS}
        route.fulfill(json={"loaders": loaders})

    front.page.route(ROUTE, answer)
    return asked


def is_told(value: Any) -> bool:
    """Whether the server is asked with it, whatever node it is of: not with texts, but for names of model files."""
    return isinstance(value, (int, float, bool, list)) or str(value).endswith((".safetensors", ".gguf"))


def overlap(one: dict[str, float], other: dict[str, float]) -> bool:
    across = one["left"] < other["right"] - 1 and other["left"] < one["right"] - 1
    return across and one["top"] < other["bottom"] - 1 and other["top"] < one["bottom"] - 1


def test_it_follows_what_is_edited(front: FrontEnd, drawn_by: type[Canvas | Elements]) -> None:
    asked: list[Any] = []
    queued: list[str] = []
    front.page.on("request", lambda one: asked.append(one.post_data_json) if one.url.endswith("/estimate") else None)
    front.page.on("request", lambda one: queued.append(one.url) if one.url.endswith("/prompt") else None)
    front.open_template(TEMPLATE)
    loader = front.node("FuseStream Diffusion Model Loader")
    estimate = shown(front, loader)
    expect(estimate).to_be_visible(timeout=60_000)
    expect(estimate).to_contain_text(re.compile(r"^Fits: .+ of .+to compute in.*"))
    front.look(f"real-{drawn_by.__name__}")
    before = str(estimate.text_content())
    widgets, size = drawn_by(front.page), front.node("Size and length")
    widgets.number(size, "length", 161)
    expect(estimate).not_to_have_text(before)
    front.page.wait_for_timeout(1500)
    count = len(asked)
    assert asked[-1]["prompt"][size]["inputs"]["length"] == 161
    front.select(front.node("KSampler"))
    front.page.wait_for_timeout(1500)
    assert len(asked) == count, "nothing that counts has changed"
    told(front, STREAMS)
    widgets.number(front.node("KSampler"), "steps", 7)
    expect(estimate).to_contain_text("38 s a step")
    expect(estimate).to_contain_text("auto: as stored, INT8 products, FP32 sums in attention")
    expect(estimate).to_contain_text("RAM: a new prompt reads 13.4 GiB again")
    told(front, MOST)
    widgets.number(front.node("KSampler"), "steps", 8)
    expect(estimate).to_contain_text("at most 38 s a step, 20 steps at most 13 min")
    front.page.unroute(ROUTE)
    widgets.number(front.node("KSampler"), "steps", 9)
    expect(estimate).to_contain_text(re.compile("known once it has sampled here|9 steps"))
    assert not queued and front.page.evaluate(QUEUED) == 0


@pytest.mark.parametrize("drawn_by", [Elements])
def test_a_file_that_came_is_seen_by_r(front: FrontEnd, server: Server) -> None:
    path = server.base / "models" / files.T2V_SMALL.folder / files.T2V_SMALL.name
    away = path.rename(path.with_suffix(".away"))
    try:
        front.open_template(TEMPLATE)
        estimate = shown(front, front.node("FuseStream Diffusion Model Loader"))
        expect(estimate).to_contain_text(f"This will not run: {files.T2V_SMALL.name} is not there.")
    finally:
        away.rename(path)
    front.page.locator("canvas").first.press("r")
    expect(estimate).to_contain_text(re.compile("^Fits"))


@pytest.mark.skipif(not is_thorough(), reason="it samples for minutes where the processor is busy")
@pytest.mark.parametrize("drawn_by", [Elements])
def test_what_a_run_took_is_told_next(front: FrontEnd, drawn_by: type[Elements]) -> None:
    front.open_template(TEMPLATE)
    estimate, widgets = shown(front, front.node("FuseStream Diffusion Model Loader")), drawn_by(front.page)
    for name, value in (("width", 64), ("height", 64), ("length", 5)):
        widgets.number(front.node("Size and length"), name, value)
    widgets.number(front.node("KSampler"), "steps", 3)
    front.run()
    expect(front.error).to_be_hidden()
    expect(estimate).to_contain_text(re.compile(r" a step, 3 steps .+, measured here"))
    widgets.number(front.node("Size and length"), "width", 128)
    expect(estimate).to_contain_text("by a run here at another size")


@pytest.mark.deep
@pytest.mark.parametrize("width", [1440, 1920] if is_thorough() else [1440])
def test_it_covers_nothing_and_can_be_read(front: FrontEnd, drawn_by: type[Canvas | Elements], width: int) -> None:
    front.page.set_viewport_size({"width": width, "height": 900})
    for name, one in (("wan2.1_t2v_1.3B", MOST), ("wan2.2_i2v_14B_4_steps", NOT), ("z_image_turbo", STREAMS)):
        told(front, one)
        front.page.evaluate(SHOW, [workflow(name), 0.62 if width < 1900 else 0.72, 120, 90])
        front.page.wait_for_timeout(1200)
        loaders = front.page.evaluate(IDS, list(LOADERS))
        for theme in ("dark", "light"):
            front.page.evaluate(SET, ["Comfy.ColorPalette", theme])
            front.page.wait_for_timeout(600)
            front.look(f"{name}-{drawn_by.__name__}-{width}-{theme}")
            boxes = front.page.evaluate(BOXES)
            places = []
            for loader in loaders:
                estimate = shown(front, loader)
                expect(estimate).to_be_visible()
                assert estimate.evaluate(CLIPPED) == []
                ground, *inks = estimate.evaluate(COLOURS)
                assert len(inks) == 5 and min(contrast(ink, ground) for ink in inks) >= 4.5
                places.append(estimate.evaluate(RECT))
                assert not [box for box in boxes if overlap(places[-1], box)], name
            assert not any(overlap(one, other) for i, one in enumerate(places) for other in places[:i])
        front.page.unroute(ROUTE)


@pytest.mark.deep
def test_every_example_has_room_for_it(front: FrontEnd) -> None:
    told(front, STREAMS)
    for example in EXAMPLES:
        front.page.evaluate(SHOW, [workflow(example.name), 0.55, 120, 120])
        loaders = front.page.evaluate(IDS, list(LOADERS))
        for loader in loaders:
            expect(shown(front, loader)).to_be_visible()
        front.look(f"room-{example.name}")


@pytest.mark.deep
def test_it_goes_where_there_is_none(front: FrontEnd, drawn_by: type[Canvas | Elements]) -> None:
    asked = told(front, STREAMS)
    front.page.evaluate(SHOW, [workflow(TEMPLATE), 0.62, 120, 90])
    (loader,) = front.page.evaluate(IDS, list(LOADERS))
    estimate = shown(front, loader)
    expect(estimate).to_be_visible()
    (prompt,) = asked
    assert all(is_told(value) for node in prompt.values() for value in node["inputs"].values()
               if not node["class_type"].startswith("FuseStream")), "no text of a prompt"  # fmt: skip
    hear(front, loader, READING)
    expect(estimate).to_have_count(0)
    front.page.evaluate(SET, ["FuseStream.Estimate.Enabled", False])
    front.page.evaluate(SET, ["FuseStream.Estimate.Enabled", True])
    expect(estimate).to_be_visible()
    front.page.evaluate(SET, ["FuseStream.Estimate.Enabled", False])
    expect(estimate).to_have_count(0)
    front.page.evaluate(SET, ["FuseStream.Estimate.Enabled", True])
    expect(estimate).to_be_visible()
    broken: Callable[[Route], None] = lambda route: route.fulfill(status=200, body="what?")  # noqa: E731
    front.page.route(ROUTE, broken)
    drawn_by(front.page).number(front.node("KSampler"), "steps", 3)
    expect(estimate).to_have_count(0)
    assert not toasts(front).count()


def test_what_comes_later_is_asked_for_again(front: FrontEnd) -> None:
    """The server was still at the file of another loader: nobody need edit anything for it."""
    later = {"sampler": "", "unknown": "later", "node": "", "values": {}}
    answers = [later, later, STREAMS]

    def answer(route: Route) -> None:
        prompt, one = route.request.post_data_json["prompt"], answers.pop(0) if len(answers) > 1 else answers[0]
        loaders = {name: [one] for name, node in prompt.items() if node["class_type"] in LOADERS}
        route.fulfill(json={"loaders": loaders})

    front.page.route(ROUTE, answer)
    front.page.evaluate(SHOW, [workflow(TEMPLATE), 0.62, 120, 90])
    (loader,) = front.page.evaluate(IDS, list(LOADERS))
    expect(shown(front, loader)).to_contain_text("another file is read first; it comes by itself.")
    expect(shown(front, loader)).to_contain_text("38 s a step")


INTO_SUBGRAPH = """async () => {
    const { node } = app.graph.convertToSubgraph(new Set(app.graph.nodes.filter(n => n.type !== 'MarkdownNote')))
    node.title = 'All of it'
    app.extensionManager.workflow.activeWorkflow.changeTracker.captureCanvasState()
    return String(node.id)
}"""


# Of ComfyUI's own: inputs and widgets of a subgraph, a bypassed one, subgraphs in subgraphs, a computed switch.
STOCKS = (
    "image_z_image_int8",
    "templates-6-key-frames",
    "video_wan2_2_14B_s2v",
    "templates-1_click_multiple_scene_angles-v1.0",
)
# A model by way of a Set and a Get node, as a pack has them: the front end resolves these, and no server knows them.
SET_AND_GET = """() => {
    class SetNode extends LGraphNode {
        isVirtualNode = true
        constructor() { super("Set"); this.addInput("*", "*"); this.addOutput("*", "*") }
    }
    class GetNode extends LGraphNode {
        isVirtualNode = true
        constructor() { super("Get"); this.addOutput("*", "*") }
        getInputLink() { return this.graph.getLink(this.graph.nodes.find(n => n.type === "SetNode").inputs[0].link) }
    }
    LiteGraph.registerNodeType("SetNode", SetNode)
    LiteGraph.registerNodeType("GetNode", GetNode)
    const loader = app.graph.nodes.find(n => n.type === "FuseStreamDiffusionModelLoader")
    const link = app.graph.getLink(loader.outputs[0].links[0])
    const taker = app.graph.getNodeById(link.target_id), slot = link.target_slot
    const set = LiteGraph.createNode("SetNode"), get = LiteGraph.createNode("GetNode")
    for (const node of [set, get]) app.graph.add(node)
    loader.connect(0, set, 0)
    get.connect(0, taker, slot)
}"""
PICTURE = '<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"/>'
OPEN = """async workflow => {
    const { swap } = await import("/extensions/FuseStream/js/swap.js")
    if (workflow) {
        swap(workflow, true)
        await app.loadGraphData(workflow)
    }
    const { openGraph } = await import("/extensions/FuseStream/js/open_graph.js")
    return openGraph(app.rootGraph)
}"""


def same(asked: dict[str, Any], queued: dict[str, Any]) -> None:
    """The same nodes and links, and of what is told the same values."""
    kinds = [{name: node["class_type"] for name, node in prompt.items()} for prompt in (asked, queued)]
    assert kinds[0] == kinds[1]
    for name, node in queued.items():
        wanted = {key: value for key, value in node["inputs"].items() if is_told(value)}
        found = {key: value for key, value in asked[name]["inputs"].items() if is_told(value)}
        assert found == wanted, (name, node["class_type"])


def test_what_is_asked_of_comfyuis_templates_is_what_would_be_queued(front: FrontEnd) -> None:
    told(front, STREAMS)
    front.page.route(
        "**/view?*", lambda route: route.fulfill(content_type="image/svg+xml", body=PICTURE)
    )  # what it loads
    for name in STOCKS if is_thorough() else STOCKS[:2]:
        template = json.loads(Path(get_asset_path(name, f"{name}.json")).read_text(encoding="utf-8"))
        same(front.page.evaluate(OPEN, template), front.prompt())
    front.page.evaluate(SHOW, [workflow(TEMPLATE), 0.62, 120, 90])
    front.page.evaluate(SET_AND_GET)
    asked = front.page.evaluate(OPEN, None)
    same(asked, front.prompt())
    loader = next(name for name, node in asked.items() if node["class_type"] in LOADERS)
    assert [loader, 0] in [value for node in asked.values() for value in node["inputs"].values()]


def test_what_is_asked_is_what_would_be_queued(front: FrontEnd) -> None:
    """Flat, in a subgraph, and with a node bypassed: the same nodes and links as `Run` sends, the same numbers."""
    asked = told(front, STREAMS)
    bypass = "() => { app.graph.nodes.find(n => n.type === 'LoraLoaderModelOnly').mode = 4; app.graph.afterChange?.()\n" \
             "app.extensionManager.workflow.activeWorkflow.changeTracker.captureCanvasState() }"  # fmt: skip
    front.page.evaluate(SHOW, [workflow("wan2.1_t2v_14B_4_steps"), 0.62, 120, 90])
    for change in (None, bypass, INTO_SUBGRAPH):
        count = len(asked)
        if change is not None:
            front.page.evaluate(change)
        while len(asked) == count and (change is not None or not asked):
            front.page.wait_for_timeout(200)
        same(asked[-1], front.prompt())
    loader = next(name for name, node in asked[-1].items() if node["class_type"] in LOADERS)
    assert ":" in loader
    expect(shown(front, loader)).to_be_visible()
    front.look("subgraph")
