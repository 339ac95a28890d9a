"""The commands that swap the loaders of the open workflow: everything about a node stays, and what cannot be swapped is named."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

from bed.depth import is_thorough
from bed.paths import ROOT
from bed.server import Server
from browser.front_end import RENDERERS, FrontEnd
from browser.overlays import READING, hear
from browser.test_meter import BOX, overlap
from browser.toasts import close, is_kind, sentence, toasts

JS = ROOT / "nodes" / "web" / "js"

MODEL, TEXT, VAE = "FuseStreamDiffusionModelLoader", "FuseStreamTextEncoderLoader", "FuseStreamVAELoader"
OURS, THEIRS = "Use FuseStream loaders", "Use ComfyUI loaders"
SWAPPED = {OURS: "FuseStream's now.", THEIRS: "no longer FuseStream's."}
NAMES = {
    "Load Diffusion Model": "FuseStream Diffusion Model Loader",
    "Load CLIP": "FuseStream Text Encoder Loader",
    "Load VAE": "FuseStream VAE Loader",
}
UNET_FILE, CLIP_FILE = "wan2.1_t2v_1.3B_fp16.safetensors", "umt5_xxl_fp8_e4m3fn_scaled.safetensors"
VAE_FILE, GGUF_FILE = "wan_2.1_vae.safetensors", "wan2.1-t2v-14b-Q4_K_M.gguf"
# Puts a node into the open graph, with these values in its widgets.
ADD = """window.add = (type, pos, values = {}) => {
    const node = LiteGraph.createNode(type)
    app.graph.add(node)
    node.pos = pos
    for (const [name, value] of Object.entries(values)) node.widgets.find(w => w.name === name).value = value
    return node
};
window.noted = () => app.extensionManager.workflow.activeWorkflow.changeTracker.captureCanvasState();"""
# Stock's three loaders with all that a user can change about them. Two are in a subgraph: the first one's file is a widget of the
# subgraph's node, the other one's type comes from a primitive. Links and values go to their takers.
SCENE = """([unet_name, clip_name, vae_name]) => {
    app.graph.clear()
    const unet = add('UNETLoader', [100, 100], { unet_name }), clip = add('CLIPLoader', [100, 300], { clip_name, type: 'wan' })
    const vae = add('VAELoader', [100, 560], { vae_name })
    const shift = add('ModelSamplingSD3', [600, 100]), text = add('CLIPTextEncode', [600, 300])
    const decode = add('VAEDecode', [600, 560]), type = add('PrimitiveNode', [-200, 300])
    unet.connect(0, shift, 'model')
    clip.connect(0, text, 'clip')
    vae.connect(0, decode, 'vae')
    type.connect(0, clip, clip.inputs.findIndex(input => input.name === 'type'))
    type.widgets[0].value = 'wan'
    Object.assign(vae, { title: 'My VAE', color: '#223344', bgcolor: '#334455', mode: 4 })
    unet.mode = 2
    unet.setSize([420, 170])
    clip.flags.collapsed = true
    const group = new LiteGraph.LGraphGroup('Decoding')
    app.graph.add(group)
    group.pos = [80, 500]
    group.size = [420, 260]
    const { node: outer } = app.graph.convertToSubgraph(new Set([unet, clip, shift, text, type]))
    outer.subgraph.inputNode.connectByType(-1, outer.subgraph.nodes.find(node => node.type === 'UNETLoader'), 'COMBO')
    outer.widgets.find(widget => widget.name === 'unet_name').value = unet_name
    noted()
}"""
# What a workflow says of its nodes, their links and groups by what they lead to, subgraphs too.
TOLD = """() => [app.rootGraph, ...app.rootGraph.subgraphs.values()].map(graph => ({
    nodes: graph.nodes.map(node => ({
        id: String(node.id), pos: [...node.pos], title: node.getTitle(), color: node.color, bgcolor: node.bgcolor,
        mode: node.mode, collapsed: Boolean(node.flags.collapsed),
        into: node.outputs.map(output => (output.links ?? []).map(id => {
            const link = graph.getLink(id)
            const { target_id: id_, target_slot: slot } = link
            return [String(id_), id_ < 0 ? slot : graph.getNodeById(id_).inputs[slot].name]
        })),
    })),
    groups: graph.groups.map(group => {
        group.recomputeInsideNodes()
        return [group.title, [...group.children].map(node => String(node.id))]
    }),
}))"""
TITLE_TOP = "app.canvasPosToClientPos(app.graph.groups.find(group => group.title === 'Models').pos)[1]"
CHOICES = "([type, name]) => LiteGraph.createNode(type).widgets.find(w => w.name === name).options.values"
# As ComfyUI-GGUF describes its loaders.
GGUF_PACK = """async ([gguf, encoder]) => {
    const about = { category: 'bootleg', description: '', output_node: false, python_module: 'custom_nodes.ComfyUI-GGUF' }
    for (const [name, kind, required] of [
        ['UnetLoaderGGUF', 'MODEL', { unet_name: [[gguf], {}] }],
        ['CLIPLoaderGGUF', 'CLIP', { clip_name: [[encoder], {}], type: [['wan', 'flux2'], {}] }],
    ]) {
        const out = { output: [kind], output_name: [kind], output_is_list: [false], output_tooltips: [] }
        await app.registerNodeDef(name, { name, display_name: name, input: { required }, ...out, ...about })
    }
}"""


def said(front: FrontEnd, kind: str) -> list[str]:
    """The lines of the one toast."""
    toast = toasts(front)
    expect(toast).to_have_count(1)
    assert is_kind(toast, kind)
    lines = sentence(toast).inner_text().splitlines()
    close(toast)
    return lines


def swapped(count: int, command: str) -> str:
    """What is said of so many."""
    loaders = "1 loader is" if count == 1 else f"{count} loaders are"
    return f"{loaders} {SWAPPED[command]} Undo (Ctrl+Z) takes it back."


def loaders(front: FrontEnd) -> dict[str, dict[str, Any]]:
    """Type and values by name of every loader, by id."""
    found: dict[str, dict[str, Any]] = front.page.evaluate(
        """() => Object.fromEntries([app.rootGraph, ...app.rootGraph.subgraphs.values()].flatMap(graph => graph.nodes)
            .filter(node => node.type.includes('Loader'))
            .map(node => [node.type, Object.fromEntries(node.widgets.map(w => [w.name, w.value]))]))"""
    )
    return found


@pytest.fixture(params=RENDERERS, ids=RENDERERS.get)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"Comfy.VueNodes.Enabled": request.param}


@pytest.fixture
def gguf(server: Server) -> Iterator[str]:
    """The name of a GGUF file in the folder of diffusion models. It is listed, and never read."""
    path = server.base / "models" / "diffusion_models" / GGUF_FILE
    path.write_bytes(b"GGUF")
    yield path.name
    path.unlink()


@pytest.fixture
def scene(front: FrontEnd) -> None:
    front.page.evaluate(ADD)
    front.page.evaluate(SCENE, [UNET_FILE, CLIP_FILE, VAE_FILE])


def comes_back(front: FrontEnd, before: Any, seconds: float = 5.0) -> None:
    """What is told of all nodes is this again, when elements have found their places."""
    deadline = time.monotonic() + seconds
    while (now := front.page.evaluate(TOLD)) != before and time.monotonic() < deadline:
        front.page.wait_for_timeout(50)
    assert now == before


@pytest.mark.deep
def test_all_of_a_node_stays_and_one_undo_takes_it_back(front: FrontEnd, scene: None) -> None:
    before, stock = front.page.evaluate(TOLD), loaders(front)
    assert stock["UNETLoader"]["unet_name"] == UNET_FILE and before[0]["groups"] == [["Decoding", ["3"]]]
    front.choose_in_menu(OURS)
    assert said(front, "success") == [swapped(3, OURS)]
    defaults = {"kernels": "auto", "precision": "precise", "quality": "auto"}
    others = dict.fromkeys(("second_file", "third_file", "fourth_file"), "none")
    ours = {
        MODEL: {"model_name": UNET_FILE, **defaults, "vram_budget": -1},
        TEXT: {"text_encoder_name": CLIP_FILE, **defaults, "vram_budget": -1, "type": "wan", **others},
        VAE: {"vae_name": VAE_FILE, **defaults},
    }
    assert loaders(front) == ours
    assert front.page.evaluate(TOLD) == in_ours(before)
    sizes = (
        "app.rootGraph.serialize().definitions.subgraphs[0].nodes.filter(node => node.id === 1).map(node => node.size)"
    )
    assert front.page.evaluate(sizes) == [[420, 170]]
    host = "app.graph.nodes.find(n => n.subgraph).widgets.find(w => w.name === 'unet_name')"
    assert front.page.evaluate(f"{host}.value") == UNET_FILE
    assert front.page.evaluate(f"{host}.options.values") == front.page.evaluate(CHOICES, [MODEL, "model_name"])

    front.page.mouse.click(640, 400)  # the front end looks for changes at every click
    front.page.keyboard.press("ControlOrMeta+z")
    front.page.wait_for_function("[...app.rootGraph.subgraphs.values()][0].nodes.some(n => n.type === 'UNETLoader')")
    comes_back(front, before)
    assert loaders(front) == stock
    # Not by a redo: where nodes are elements, the front end may take how they lie after an undo for a change, and forget it.
    front.choose_in_menu(OURS)
    assert said(front, "success") == [swapped(3, OURS)]
    assert loaders(front) == ours
    front.choose_in_menu(THEIRS)
    assert said(front, "success") == [swapped(3, THEIRS)]
    comes_back(front, before)
    assert loaders(front) == stock


@pytest.mark.deep
def test_what_cannot_be_swapped_stays_and_is_named(front: FrontEnd) -> None:
    front.page.evaluate(ADD)
    front.page.evaluate(
        """([unet_name, clip_name]) => {
            app.graph.clear()
            add('UNETLoader', [0, 0], { unet_name }).title = 'Swapped'
            add('UNETLoader', [0, 300], { unet_name, weight_dtype: 'fp8_e4m3fn_fast' }).title = 'In 8 bits'
            const linked = add('UNETLoader', [0, 600], { unet_name }), dtype = add('PrimitiveNode', [-300, 600])
            linked.title = 'Linked'
            dtype.connect(0, linked, linked.inputs.findIndex(input => input.name === 'weight_dtype'))
            add('CLIPLoader', [400, 0], { clip_name, device: 'cpu' })
            add('DualCLIPLoader', [400, 300], { device: 'cpu' })
            add('ImageOnlyCheckpointLoader', [400, 600]).title = 'All in one'
            add('VAELoader', [400, 900], { vae_name: 'pixel_space' })
            add('LoraLoaderModelOnly', [800, 0])
            const inner = add('UNETLoader', [800, 300], { unet_name })
            inner.connect(0, add('ModelSamplingSD3', [1200, 300]), 'model')
            app.graph.convertToSubgraph(new Set([inner])) // which gives a model, and is no loader
        }""",
        [UNET_FILE, CLIP_FILE],
    )
    before = [(node["title"], node["type"]) for node in front.nodes()]
    front.choose_in_menu(OURS)
    assert said(front, "warn") == [
        swapped(2, OURS),
        f"In 8 bits stays: {NAMES['Load Diffusion Model']} has no choice like its weight_dtype, fp8_e4m3fn_fast.",
        f"Linked stays: its weight_dtype comes by a link, and {NAMES['Load Diffusion Model']} has no such input.",
        f"Load CLIP stays: {NAMES['Load CLIP']} has no choice like its device, cpu.",
        f"Load CLIP (Dual) stays: {NAMES['Load CLIP']} has no choice like its device, cpu.",
        "All in one stays: FuseStream has no loader in its place.",
        f"Load VAE stays: {NAMES['Load VAE']} has no choice like its vae_name, pixel_space.",
    ]
    after = [(node["title"], node["type"]) for node in front.nodes()]
    assert after == [("Swapped", MODEL), *before[1:]]
    # The way back: a type that only ours has.
    front.page.evaluate("type => { app.graph.clear(); add(type, [0, 0]); add('UNETLoader', [0, 400]) }", TEXT)
    front.choose_in_menu(THEIRS)
    assert said(front, "warn") == [f"{NAMES['Load CLIP']} stays: Load CLIP has no choice like its type, auto."]


@pytest.mark.deep
def test_a_text_encoder_of_several_files_keeps_them_all(front: FrontEnd) -> None:
    """A file that is missing is in neither's list."""
    front.page.evaluate(ADD)
    front.page.evaluate(
        """() => {
            app.graph.clear()
            const dual = add('DualCLIPLoader', [0, 0], { clip_name1: 'a.st', clip_name2: 'b.st', type: 'flux' })
            dual.connect(0, add('CLIPTextEncode', [400, 0]), 'clip')
            add('TripleCLIPLoader', [0, 300], { clip_name1: 'a.st', clip_name2: 'b.st', clip_name3: 'c.st' })
            const files = { clip_name1: 'a.st', clip_name2: 'b.st', clip_name3: 'c.st', clip_name4: 'd.st' }
            add('QuadrupleCLIPLoader', [0, 600], files)
            add('CLIPLoader', [0, 900], { clip_name: 'a.st', type: 'wan' })
        }"""
    )
    told = """() => app.graph.nodes.filter(node => node.type !== 'CLIPTextEncode').map(node => [node.type, Object.fromEntries(
        node.widgets.filter(widget => /file|name|type/.test(widget.name)).map(widget => [widget.name, widget.value]))])"""
    before = front.page.evaluate(told)
    front.choose_in_menu(OURS)
    assert said(front, "success") == [swapped(4, OURS)]
    names = ("text_encoder_name", "second_file", "third_file", "fourth_file", "type")
    wanted = [
        ("a.st", "b.st", "none", "none", "flux"),
        ("a.st", "b.st", "c.st", "none", "auto"),
        ("a.st", "b.st", "c.st", "d.st", "auto"),
        ("a.st", "none", "none", "none", "wan"),
    ]
    assert front.page.evaluate(told) == [[TEXT, dict(zip(names, values, strict=True))] for values in wanted]
    assert front.page.evaluate("() => app.graph.links.size ?? Object.keys(app.graph.links).length") == 1
    front.choose_in_menu(THEIRS)
    assert said(front, "success") == [swapped(4, THEIRS)]
    assert front.page.evaluate(told) == before


@pytest.mark.deep
def test_all_three_links_of_a_checkpoint_stay(front: FrontEnd) -> None:
    front.page.evaluate(ADD)
    front.page.evaluate(
        """() => {
            app.graph.clear()
            const whole = add('CheckpointLoaderSimple', [0, 0], { ckpt_name: 'a checkpoint.safetensors' })
            whole.connect(0, add('ModelSamplingSD3', [400, 0]), 'model')
            whole.connect(1, add('CLIPTextEncode', [400, 200]), 'clip')
            whole.connect(2, add('VAEDecode', [400, 500]), 'vae')
            whole.connect(2, add('VAEEncode', [400, 700]), 'vae')
        }"""
    )
    told = """() => [app.graph.nodes[0].widgets[0].value, [...app.graph.links.values()].map(
        link => [link.origin_id, link.origin_slot, link.target_id, link.target_slot, link.type])]"""
    before = front.page.evaluate(told)
    assert len(before[1]) == 4
    for command, now in ((OURS, "FuseStreamCheckpointLoader"), (THEIRS, "CheckpointLoaderSimple")):
        front.choose_in_menu(command)
        assert said(front, "success") == [swapped(1, command)]
        assert front.nodes()[0]["type"] == now and front.page.evaluate(told) == before


@pytest.mark.deep
def test_gguf_loaders_too_and_whether_their_pack_is_installed_or_not(gguf: str, front: FrontEnd) -> None:
    def node(id_: int, type_: str, kind: str, values: list[str]) -> dict[str, Any]:
        slot = {"name": kind, "type": kind, "links": None}
        place = {"pos": [400 * id_, 200], "size": [300, 100], "flags": {}, "order": id_, "mode": 0}
        return {"id": id_, "type": type_, "outputs": [slot], "properties": {}, "widgets_values": values, **place}

    nodes = [node(1, "UnetLoaderGGUF", "MODEL", [gguf]), node(2, "CLIPLoaderGGUF", "CLIP", [CLIP_FILE, "wan"])]
    workflow = {"nodes": nodes, "links": [], "groups": [], "config": {}, "extra": {}, "version": 0.4}
    types = "app.graph.nodes.map(node => node.type)"
    for installed in (False, True):
        if installed:
            front.page.evaluate(GGUF_PACK, [gguf, CLIP_FILE])
        front.page.evaluate("workflow => app.loadGraphData(workflow)", workflow)
        front.choose_in_menu(OURS)
        assert said(front, "success") == [swapped(2, OURS)]
        assert front.page.evaluate(types) == [MODEL, TEXT]
        found = loaders(front)
        assert found[MODEL]["model_name"] == gguf
        assert (found[TEXT]["text_encoder_name"], found[TEXT]["type"]) == (CLIP_FILE, "wan")
        front.choose_in_menu(THEIRS)
        if installed:
            assert said(front, "success") == [swapped(2, THEIRS)]
            assert front.page.evaluate(types) == ["UnetLoaderGGUF", "CLIPLoader"]
        else:
            ours = NAMES["Load Diffusion Model"]
            stays = f"{ours} stays: Load Diffusion Model has no choice like its model_name, {gguf}."
            assert said(front, "warn") == [swapped(1, THEIRS), stays]
            assert front.page.evaluate(types) == [MODEL, "CLIPLoader"]


@pytest.mark.deep
def test_what_would_be_covered_makes_room(front: FrontEnd) -> None:
    front.page.evaluate(ADD)
    front.page.evaluate(
        """() => {
            app.graph.clear()
            app.canvas.ds.scale = 0.5
            app.canvas.ds.offset = [300, 250]
            const names = ['UNETLoader', 'CLIPLoader', 'VAELoader', 'EmptyLatentImage']
            names.forEach((name, i) => add(name, [0, 160 * i]).setSize([300, 110]))
            add('EmptyLatentImage', [600, 200]) // beside them
            for (const [title, y, height] of [['Models', -70, 510], ['Size', 446, 160]]) {
                const group = new LiteGraph.LGraphGroup(title)
                app.graph.add(group)
                group.pos = [-20, y]
                group.size = [340, height]
            }
            noted()
        }"""
    )
    front.page.wait_for_timeout(500)  # on the canvas, nodes and groups have their places when they are drawn
    before = front.page.evaluate(TOLD)[0]
    assert before["groups"] == [["Models", ["1", "2", "3"]], ["Size", ["4"]]]
    front.choose_in_menu(OURS)
    said(front, "success")
    front.page.wait_for_timeout(500)
    after = front.page.evaluate(TOLD)[0]
    assert after["groups"] == before["groups"] and after["nodes"][-1]["pos"] == before["nodes"][-1]["pos"]
    boxes = [front.page.evaluate(BOX, node["id"]) for node in after["nodes"]]
    assert not any(overlap(one, other) for one, other in itertools.combinations(boxes, 2))
    # There is no room below the first one, and above it is the title of its group.
    shown = hear(front, "1", READING).bounding_box()
    assert shown and shown["y"] + shown["height"] < front.page.evaluate(TITLE_TOP)
    front.page.evaluate("app.graph.nodes.forEach(node => node.graph.remove(node))")
    (models, size) = front.page.evaluate("app.graph.groups.map(group => [...group.pos, ...group.size])")
    assert models[1] == -70 and models[1] + models[3] < size[1] and size[3] == 160


@pytest.mark.deep
@pytest.mark.parametrize("settings", [{}])
def test_the_app_mode_and_the_open_subgraph_stay(front: FrontEnd, scene: None) -> None:
    inputs = front.page.evaluate(
        """unet_name => {
            const unet = add('UNETLoader', [900, 100], { unet_name })
            const inputs = [[`${app.rootGraph.id}:${unet.id}:unet_name`, 'unet_name', { height: 40 }], [unet.id, 'unet_name']]
            app.rootGraph.extra.linearData = { inputs, outputs: [] }
            const outer = app.graph.nodes.find(node => node.subgraph)
            app.canvas.openSubgraph(outer.subgraph, outer)
            return structuredClone(inputs)
        }""",
        UNET_FILE,
    )
    opened = front.page.evaluate("app.canvas.graph.id")
    front.choose_in_menu(OURS)
    assert said(front, "success") == [swapped(4, OURS)]
    assert front.page.evaluate("app.canvas.graph.id") == opened != front.page.evaluate("app.rootGraph.id")
    renamed = json.loads(json.dumps(inputs).replace("unet_name", "model_name"))
    assert front.page.evaluate("app.rootGraph.extra.linearData.inputs") == renamed


@pytest.mark.deep
@pytest.mark.parametrize(
    "settings", [{"Comfy.Locale": one} for one in (("en", "ja", "zh") if is_thorough() else ("ja",))]
)
def test_nothing_to_swap_is_said_in_the_users_language(front: FrontEnd, settings: dict[str, Any]) -> None:
    language = settings["Comfy.Locale"]
    labels, words = (
        {},
        dict(re.findall(r'^    (\w+): "(.+)",$', (JS / "words.js").read_text(encoding="utf-8"), re.MULTILINE)),
    )
    if language != "en":
        found = json.loads((ROOT / "locales" / language / "main.json").read_text(encoding="utf-8"))
        labels, words = found["menuLabels"], found["fuseStream"]
    front.page.evaluate("app.graph.clear()")
    for label, key in ((OURS, "noneOfTheirs"), (THEIRS, "noneOfOurs")):
        front.choose_in_menu(labels.get(label, label))
        assert said(front, "info") == [words[key]]


def in_ours(told: Any) -> Any:
    """The same with the names that titles and inputs have in ours."""
    text = json.dumps(told)
    for theirs, ours in {**NAMES, "unet_name": "model_name", "clip_name": "text_encoder_name"}.items():
        text = text.replace(f'"{theirs}"', f'"{ours}"')
    return json.loads(text)
