"""What the front end tells a user about our nodes: how to find one, what an input means, the help page."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import TimeoutError, expect

from bed.paths import ROOT
from bed.server import PACK, Server
from browser.front_end import TITLE_BAR, FrontEnd
from browser.widgets import MIDDLE

DOCS = ROOT / "nodes" / "web" / "docs"
# By name: in front end 1.58 a description is none of the object's own properties, and would be lost.
NODE_DATA = """type => {
    const { description, inputs, outputs } = LiteGraph.registered_node_types[type].nodeData
    return { description, inputs, outputs }
}"""
# Canvas without a node on it, in the workflow that the front end starts with.
EMPTY_SPOT = (300, 730)
# One node, in plain view, and nothing else.
ALONE = """type => {
    const node = LiteGraph.createNode(type)
    app.graph.clear()
    app.graph.add(node)
    node.pos = app.canvas.ds.convertCanvasToOffset([300, 300])
}"""
# A loader with these values, as a workflow saves it: what is seen of its widgets, and its height now, saved, and at least.
SEEN = """([type, values]) => {
    const named = values => node => Object.entries(values).forEach(([name, value]) => {
        node.widgets.find(widget => widget.name === name).value = value
    })
    app.graph.clear()
    const made = LiteGraph.createNode(type)
    named(values)(made)
    const saved = made.serialize(), node = LiteGraph.createNode(type)
    app.graph.add(node)
    node.configure(saved)
    node.pos = app.canvas.ds.convertCanvasToOffset([300, 300])
    app.canvas.draw(true, true)
    window.look = () => {
        app.canvas.draw(true, true)
        const shown = node.widgets.filter(widget => node.isWidgetVisible(widget)).map(widget => widget.name)
        return [shown, node.size[1], node.serialize().size[1], node.computeSize()[1]]
    }
    return window.look()
}"""
# The input at the middle of each visible widget's own input.
INPUTS = """() => {
    const [node] = app.graph.nodes
    return node.widgets.filter(widget => node.isWidgetVisible(widget)).map(({ name }) => {
        const at = node.getInputPos(node.inputs.findIndex(input => input.widget?.name === name))
        return [name, node.getInputOnPos(at)?.name]
    })
}"""
FIRST = {
    "FuseStreamDiffusionModelLoader": ["model_name", "vram_budget", "quality"],
    "FuseStreamTextEncoderLoader": ["text_encoder_name", "vram_budget", "type", "quality", "second_file"],
    "FuseStreamVAELoader": ["vae_name", "quality"],
    "FuseStreamCheckpointLoader": ["ckpt_name", "vram_budget", "quality"],
}
ROW = 24  # the height of a widget on the canvas
# What words on a node make of its height: before them, with them, as saved, and loaded from that.
SAY = """async ([words, height]) => {
    const node = LiteGraph.createNode('FuseStreamDiffusionModelLoader'), nodeId = () => String(node.id)
    const frame = () => new Promise(requestAnimationFrame)
    const element = () => document.querySelector(`[data-node-id="${app.graph.nodes[0].id}"]`)
    const isMeasured = () => element()?.offsetHeight === app.graph.nodes[0].size[1] + LiteGraph.NODE_TITLE_HEIGHT
    const drawn = async () => {
        for (let i = 0; i < 10 || (i < 100 && LiteGraph.vueNodesMode && !isMeasured()); i++) await frame()
        app.canvas.draw(true, true)
    }
    app.graph.clear()
    app.graph.add(node)
    node.pos = app.canvas.ds.convertCanvasToOffset([300, 300])
    node.setSize([340, height])
    await drawn()
    const before = node.size[1], saved = node.serialize().size[1]
    app.api.dispatchEvent(new CustomEvent('fusestream.words', { detail: { node: nodeId(), words } }))
    app.api.dispatchCustomEvent('progress_text', { nodeId: nodeId(), text: words })
    await drawn()
    const spoken = LiteGraph.vueNodesMode ? element().offsetHeight - LiteGraph.NODE_TITLE_HEIGHT : node.size[1]
    const workflow = JSON.parse(JSON.stringify(app.graph.serialize()))
    await app.loadGraphData(workflow)
    await drawn()
    return [before, spoken, saved, workflow.nodes[0].size[1], app.graph.nodes[0].size[1]]
}"""
SET = "([id, value]) => app.extensionManager.setting.set(id, value)"
NODES = sorted(path.stem for path in DOCS.glob("*.md"))
# What the button for help is called, the colours, and how wide the page is. The panel is the same with nodes of either kind.
LANGUAGES = {"ja": ("ノード情報", "light", 1920), "zh": ("节点信息", "dark", 1440)}
SHOTS = ROOT / "output" / "help"


@pytest.fixture
def language(request: pytest.FixtureRequest) -> str:
    """English where a test asks for no other."""
    found: str = getattr(request, "param", "en")
    return found


@pytest.fixture
def settings(language: str) -> dict[str, Any]:
    return {"Comfy.Locale": language, "Comfy.ColorPalette": LANGUAGES[language][1]} if language in LANGUAGES else {}


@pytest.fixture
def ours(server: Server) -> dict[str, dict[str, Any]]:
    """Our nodes as the server describes them, by id."""
    nodes: Any = server.get("/object_info")
    return {name: node for name, node in nodes.items() if node["python_module"] == f"custom_nodes.{PACK}"}


def test_every_node_has_a_help_page(ours: dict[str, dict[str, Any]]) -> None:
    assert sorted(ours) == NODES


@pytest.mark.deep
def test_help_page_opens_from_the_node(front: FrontEnd) -> None:
    for node in NODES:
        front.page.evaluate(ALONE, node)
        assert_help(front, (DOCS / f"{node}.md").read_text(encoding="utf-8"), "Node Info")


@pytest.mark.deep
@pytest.mark.parametrize("language", ["ja", "zh"], indirect=True)
def test_help_page_speaks_the_users_language(front: FrontEnd, language: str) -> None:
    button, _, width = LANGUAGES[language]
    front.page.set_viewport_size({"width": width, "height": 900})
    for node in NODES:
        front.page.evaluate(ALONE, node)
        assert_help(front, (DOCS / node / f"{language}.md").read_text(encoding="utf-8"), button)
        SHOTS.mkdir(parents=True, exist_ok=True)
        front.page.screenshot(path=SHOTS / f"{node}-{language}.png")


def assert_help(front: FrontEnd, source: str, button: str) -> None:
    """The only node's page, opened by its button, has this Markdown and its pictures."""
    opens = front.page.locator(".selection-toolbox").get_by_role("button", name=button)
    front.select(front.nodes()[0]["id"])
    try:
        opens.click(timeout=5000)
    except (
        TimeoutError
    ):  # the last node was at this place, and its click and this one made a double click: a title is edited
        front.page.keyboard.press("Escape")
        front.page.wait_for_timeout(1000)
        front.select(front.nodes()[0]["id"])
        opens.click()
    help_ = front.page.get_by_test_id("properties-panel").locator(".node-help-content")
    expect(help_.get_by_role("heading", level=1)).to_have_text(source.splitlines()[0].removeprefix("# "))
    assert letters(help_.inner_text()) == letters(source), "the page is not the file's text"
    for picture in help_.get_by_role("img").all():
        expect(picture).not_to_have_js_property("naturalWidth", 0)
    in_code = sum(code.count("*") for code in re.findall("`[^`]+`", source))
    assert help_.inner_text().count("*") == in_code, "marks of emphasis that emphasise nothing"


def test_loaders_on_the_canvas_show_what_counts(front: FrontEnd) -> None:
    for type_, first in FIRST.items():
        shown, height, saved, least = front.page.evaluate(SEEN, [type_, {}])
        hidden = 4 if "TextEncoder" in type_ else 2
        assert shown == first and height == least and saved == height + hidden * ROW
        assert front.page.evaluate(INPUTS) == [[name, name] for name in first]
    # What is not as usual stays, and the precision where the quality leaves it to that.
    values: list[tuple[dict[str, str], set[str]]] = [
        ({"kernels": "off"}, {"kernels"}),
        ({"precision": "turbo"}, {"precision"}),
        ({"quality": "by precision"}, {"precision"}),
    ]
    loader, first = next(iter(FIRST.items()))
    for given, stays in values:
        shown, height, _, least = front.page.evaluate(SEEN, [loader, given])
        assert set(shown) == {*first, *stays} and height == least
    # By the front end's own entry in the node's menu all of them are seen, and go again.
    before = front.page.evaluate(SEEN, [loader, {}])
    for entry, more in (("Show Advanced", 2), ("Hide Advanced", 0)):
        x, y = front.page.evaluate(TITLE_BAR, front.nodes()[0]["id"])
        front.page.mouse.click(x, y, button="right")
        front.page.get_by_text(entry, exact=True).click()
        shown, height, saved, _ = front.page.evaluate("window.look()")
        assert (len(shown), height, saved) == (len(first) + more, before[1] + more * ROW, before[2])


def test_words_on_a_loader_leave_no_gap(front: FrontEnd) -> None:
    for elements, height in ((False, 112), (True, 180)):  # a little higher than it has to be
        front.page.evaluate(SET, ["Comfy.VueNodes.Enabled", elements])
        before, spoken, saved, with_words, loaded = front.page.evaluate(SAY, ["3.1 GB streamed, 12.0 s a step", height])
        assert spoken > before == loaded == height and with_words == saved, elements
    front.page.evaluate(SET, ["Comfy.VueNodes.Enabled", False])


def test_a_new_picture_has_the_colours_of_the_page(front: FrontEnd) -> None:
    made = """() => Object.keys(LiteGraph.registered_node_types).filter(type => type.startsWith('FuseStream')).flatMap(type => {
        const node = LiteGraph.createNode(type), theme = node.widgets?.find(widget => widget.name === 'theme')
        return theme ? [[node, theme]] : []
    })"""
    front.page.evaluate(f"window.themed = {made}")
    themes = f"({made})().map(([, theme]) => theme.value)"
    assert front.page.evaluate(themes) == ["dark"] * 3
    front.page.evaluate("window.saved = themed().map(([node]) => node.serialize())")
    front.page.evaluate(SET, ["Comfy.ColorPalette", "light"])
    try:
        assert front.page.evaluate(themes) == ["light"] * 3
        loaded = "themed().map(([node, theme], i) => { node.configure(saved[i]); return theme.value })"
        assert front.page.evaluate(loaded) == ["dark"] * 3
    finally:
        front.page.evaluate(SET, ["Comfy.ColorPalette", "dark"])


@pytest.mark.deep
def test_search_finds_every_node_by_name_and_alias(front: FrontEnd, ours: dict[str, dict[str, Any]]) -> None:
    before = len(front.nodes())
    search = front.open_search(EMPTY_SPOT)
    results = search.get_by_test_id("result-item")
    for node in ours.values():
        for words in (*node["search_aliases"], node["display_name"]):
            search.get_by_role("combobox").fill(words)
            expect(results.filter(has_text=node["display_name"])).to_be_visible()
    # The last one searched for is at the top; Enter takes it, and it hangs at the pointer until it is put down.
    expect(results.first).to_contain_text(node["display_name"])
    front.page.keyboard.press("Enter")
    expect(search).to_be_hidden()
    front.page.mouse.click(*EMPTY_SPOT)
    assert [new["type"] for new in front.nodes()[before:]] == [node["name"]]


@pytest.mark.deep
def test_every_input_and_output_has_a_tooltip(front: FrontEnd, ours: dict[str, dict[str, Any]]) -> None:
    for name in ours:
        loaded = front.page.evaluate(NODE_DATA, name)
        assert loaded["description"]
        assert loaded["inputs"] and all(one.get("tooltip") for one in loaded["inputs"].values())
        assert loaded["outputs"] and all(one.get("tooltip") for one in loaded["outputs"])
    front.open_template("wan2.1_t2v_1.3B")
    _, options = ours["FuseStreamVAELoader"]["input"]["required"]["vae_name"]
    front.page.mouse.move(*front.page.evaluate(MIDDLE, [front.node("FuseStream VAE Loader"), "vae_name"]))
    expect(front.page.locator(".node-tooltip")).to_have_text(options["tooltip"])


def letters(text: str) -> str:
    """The text without markup: what Markdown and its rendering have in common."""
    text = re.sub(r"<!--.*?-->", "", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[*`#|\s-]", "", text)
