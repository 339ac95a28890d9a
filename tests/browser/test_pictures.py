"""The pictures on help pages, in README and in docs/reports.md, as the front end draws them.

`python3 dev.py test tests/browser/test_pictures.py --update-pictures` takes them anew, after an input was added.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import expect

from bed.paths import ROOT
from bed.templates import files
from browser.front_end import FrontEnd

EXAMPLE, COMPARISON_PICTURE = "with_and_without", ROOT / "docs" / "images" / "with-and-without.png"
DOCS = ROOT / "nodes" / "web" / "docs"
CHECKPOINT = "sd_xl_base_1.0.safetensors"
# Picture, node, its first widget's value, and the node that takes its output by this input.
PICTURES = (
    ("diffusion-model-loader", "FuseStreamDiffusionModelLoader", files.T2V.name, "ModelSamplingSD3", "model"),
    ("text-encoder-loader", "FuseStreamTextEncoderLoader", files.UMT5.name, "CLIPTextEncode", "clip"),
    ("vae-loader", "FuseStreamVAELoader", files.VAE21.name, "VAEDecode", "vae"),
    ("checkpoint-loader", "FuseStreamCheckpointLoader", CHECKPOINT, "KSampler", "model"),
    ("kernels", "FuseStreamKernels", "off", "KSampler", "model"),
    ("text-encoder-kernels", "FuseStreamTextEncoderKernels", "off", "CLIPTextEncode", "clip"),
    ("vae-kernels", "FuseStreamVAEKernels", "off", "VAEDecode", "vae"),
    ("sparse-attention", "FuseStreamSparseAttention", "top-k", "KSampler", "model"),
    ("step-cache", "FuseStreamStepCache", 0.05, "KSampler", "model"),
    ("live-video", "FuseStreamLiveVideo", 1, "PreviewImage", "images"),
)
LOADERS_EXAMPLE, LOADERS_PICTURE = "wan2.1_t2v_1.3B", ROOT / "docs" / "images" / "loaders.png"
REPORT_PICTURE = ROOT / "docs" / "images" / "report-node.png"
LOADER = "FuseStream Diffusion Model Loader"
BUDGET = "([id, gib]) => { app.graph.getNodeById(id).widgets.find(w => w.name === 'vram_budget').value = gib }"
# From the comparison after its run: A's loader, sampler and report, the last one at a size to read it.
REPORT = """titles => {
    const places = [[0, 0], [340, 0], [680, 0], [9000, 0]]
    for (const node of [...app.graph.nodes]) {
        const place = titles.indexOf(node.getTitle())
        if (place < 0) { app.graph.remove(node); continue }
        node.pos = places[place]
        if (place === 2) { node.collapse(); node.setSize([640, 940]) }
        if (place === 3) node.setSize([1000, 700])
    }
    app.canvas.ds.scale = 0.68
    app.canvas.ds.offset = [180, 190]
    app.canvas.setDirty(true, true)
}"""
# The comparison that was put aside; the box around it on the page.
COMPARE = """() => {
    app.canvas.ds.scale = 0.8
    app.canvas.ds.offset = [-8800, 160]
    app.canvas.setDirty(true, true)
    const [left, top] = app.canvasPosToClientPos([9000, 0])
    return {x: left - 20, y: top - 45, width: 840, height: 625}
}"""
DOCTOR = "FuseStreamDoctor"
SMALL = {"width": 64, "height": 64, "length": 5, "steps": 2}
# Each number where a node has it: what a run of the example takes, and the numbers as they were.
SET = """sizes => {
    const before = []
    for (const widget of app.graph.nodes.flatMap(n => n.widgets ?? [])) {
        if (!(widget.name in sizes)) continue
        before.push([widget, widget.value])
        widget.value = sizes[widget.name]
    }
    window.putBack = () => before.forEach(([widget, value]) => { widget.value = value })
}"""
# The doctor alone, as it comes.
EXAMINE = """type => {
    const node = LiteGraph.createNode(type)
    app.graph.clear()
    app.graph.add(node)
    node.pos = [0, 0]
    app.canvas.ds.scale = 1
    app.canvas.ds.offset = [260, 160]
    app.canvas.setDirty(true, true)
}"""
# With its text, for which it has made room; the box around it on the page.
EXAMINED = """() => {
    const [left, top] = app.canvasPosToClientPos([-70, -55])
    return {x: left, y: top, width: 840, height: app.graph.nodes[0].size[1] + 75}
}"""
# A plan of the example alone, with its text and its picture; the box around it on the page.
PLAN = """type => {
    const plan = LiteGraph.createNode(type), by = name => app.graph.nodes.find(n => n.type === name)
    app.graph.add(plan)
    by('FuseStreamDiffusionModelLoader').connect(0, plan, 'model')
    by('EmptyHunyuanLatentVideo').connect(0, plan, 'latent')
    app.graph.remove(by('SaveVideo'))
    plan.pos = [9000, 0]
    plan.setSize([800, 920])
    app.canvas.ds.scale = 0.9
    app.canvas.ds.offset = [-8850, 120]
    app.canvas.setDirty(true, true)
    const [left, top] = app.canvasPosToClientPos([9000, 0])
    return {x: left - 60, y: top - 45, width: 840, height: 890}
}"""
# Which build of Linux the picture was taken on is of no interest.
ANY_KERNEL = """() => {
    for (const area of document.querySelectorAll(".fusestream-text textarea")) {
        area.value = area.value.replace(/Linux [^ ,]+/, "Linux 6.8.0")
    }
}"""
NO_ESTIMATES = "app.extensionManager.setting.set('FuseStream.Estimate.Enabled', false)"
# The two nodes alone at full size; the box around them on the page. New ones get numbers of their own: the front end would give
# them the values of those that had theirs.
DRAW = """([type, value, next, input]) => {
    const last = app.graph.last_node_id
    app.graph.clear()
    app.graph.last_node_id = app.graph.state.lastNodeId = last + 1
    const node = LiteGraph.createNode(type), taker = LiteGraph.createNode(next)
    app.graph.add(node); app.graph.add(taker)
    node.widgets[0].value = value
    node.setSize([430, node.computeSize()[1]]); taker.setSize([300, taker.computeSize()[1]])
    node.pos = [0, 0]; taker.pos = [500, 0]
    node.connect(0, taker, input)
    app.canvas.ds.scale = 1
    app.canvas.ds.offset = [260, 240]
    app.canvas.setDirty(true, true)
    const [left, top] = app.canvasPosToClientPos([-20, -60])
    const bottom = Math.max(node.size[1], taker.size[1]) + 20
    return {x: left, y: top, width: 840, height: bottom + 60}
}"""


def test_help_pages_show_their_nodes(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-pictures"):
        checkpoint = request.getfixturevalue("server").base / "models" / "checkpoints" / CHECKPOINT
        checkpoint.parent.mkdir(exist_ok=True)
        checkpoint.touch()  # a name to choose is all that a picture needs
        take(request.getfixturevalue("front"))
    others = [("doctor", DOCTOR), ("compare", "FuseStreamCompare"), ("plan", "FuseStreamPlan")]
    for picture, node in (*((picture, node) for picture, node, *_ in PICTURES), *others):
        assert f"](images/{picture}.png)" in (DOCS / f"{node}.md").read_text(encoding="utf-8")
        with Image.open(DOCS / "images" / f"{picture}.png") as image:
            assert image.width == 840


SHOWN = [("README.md", LOADERS_PICTURE), ("docs/reports.md", COMPARISON_PICTURE), ("docs/reports.md", REPORT_PICTURE)]


@pytest.mark.parametrize(("page", "picture"), SHOWN, ids=lambda one: Path(one).stem)
def test_the_pages_show_loaders_comparison_and_report(page: str, picture: Path) -> None:
    path = picture.relative_to((ROOT / page).parent).as_posix()
    assert f"]({path})" in (ROOT / page).read_text(encoding="utf-8")
    with Image.open(picture) as image:
        assert image.size == (1280, 800)


def take(front: FrontEnd) -> None:
    """Draw and save each picture."""
    (DOCS / "images").mkdir(exist_ok=True)
    front.page.get_by_test_id("toggle-minimap-button").click()  # it would hide a part of the graph
    front.open_template(LOADERS_EXAMPLE)
    front.page.wait_for_timeout(1000)
    front.page.screenshot(path=LOADERS_PICTURE)
    take_comparison(front)
    front.page.evaluate(REPORT, [LOADER, "A", "A: report", "A and B"])
    front.page.wait_for_timeout(1000)
    front.page.screenshot(path=REPORT_PICTURE)
    clip: Any = front.page.evaluate(COMPARE)
    front.page.wait_for_timeout(1000)
    front.page.screenshot(path=DOCS / "images" / "compare.png", clip=clip)
    take_plan(front)
    front.page.evaluate(NO_ESTIMATES)
    for picture, *drawn in PICTURES:
        clip = front.page.evaluate(DRAW, drawn)
        front.page.wait_for_timeout(500)  # a frame or two on a busy machine
        front.page.screenshot(path=DOCS / "images" / f"{picture}.png", clip=clip)
    front.page.set_viewport_size({"width": 1280, "height": 1600})
    front.page.evaluate(EXAMINE, DOCTOR)
    front.run()
    front.page.wait_for_timeout(6000)
    front.page.evaluate(ANY_KERNEL)
    clip = front.page.evaluate(EXAMINED)
    front.page.screenshot(path=DOCS / "images" / "doctor.png", clip=clip)
    press()


def take_plan(front: FrontEnd) -> None:
    """Of a size that was sampled before."""
    front.open_template(LOADERS_EXAMPLE)
    front.page.evaluate(SET, SMALL)
    clip: Any = front.page.evaluate(PLAN, "FuseStreamPlan")
    front.page.set_viewport_size({"width": 1280, "height": 1100})
    front.run()
    front.page.wait_for_timeout(6000)
    front.page.screenshot(path=DOCS / "images" / "plan.png", clip=clip)
    front.page.set_viewport_size({"width": 1280, "height": 800})


def press() -> None:
    """The pictures that users download, in as few colours as they need."""
    for path in (DOCS / "images").glob("*.png"):
        with Image.open(path) as image:
            pressed = image.convert("RGB").quantize(64, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        pressed.save(path, optimize=True)


def take_comparison(front: FrontEnd) -> None:
    """The example after a run of the stand-ins, with the sizes that it comes with."""
    front.open_template(EXAMPLE)
    front.page.evaluate(SET, SMALL)
    front.page.evaluate(BUDGET, [front.node(LOADER), 0.008])  # less than the tiny model's blocks
    front.run()
    expect(front.error).to_be_hidden()
    front.page.evaluate(BUDGET, [front.node(LOADER), -1])
    front.page.evaluate("window.putBack(); app.canvas.setDirty(true, true)")
    front.page.evaluate("app.canvas.ds.scale = 0.62; app.canvas.setDirty(true, true)")  # below, words are left out
    front.page.wait_for_timeout(6000)  # until it is no longer said that the job is done
    front.page.screenshot(path=COMPARISON_PICTURE)
