"""What the front end tells a user about our nodes: how to find one, what an input means, the help page."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import TimeoutError, expect

from bed.paths import ROOT
from bed.server import PACK, Server
from browser.front_end import FrontEnd
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
