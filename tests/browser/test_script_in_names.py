"""A name that a page would run if it took it for HTML: wherever the page shows the names of files and nodes, it is only a name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, expect

from bed import tiny
from bed.server import Server
from browser.front_end import FrontEnd
from browser.overlays import HEAR, READING, hear
from browser.test_estimate import ROUTE, shown
from browser.test_panel import item, open_panel
from browser.test_report import MODEL, graph
from browser.test_use_loaders import ADD, OURS
from browser.toasts import sentence, toasts
from hostile import damage

NAME = f"{damage.SCRIPT}.safetensors"
HURT = "() => Boolean(window.hurt) || document.querySelectorAll('img[onerror]').length > 0"

VERDICT = f"FuseStream doctor: amber\nIt works.\n\n{NAME} is slow.\n\nDetails\nDisk: {NAME}\n"
REPORT = f"FuseStream report: {NAME}\nIts blocks stream."
# The nodes that show a text, with this one, as the server tells the page when they have run; and all of them in sight.
TEXTS = """([types, text]) => {
    app.graph.clear()
    for (const [i, type] of types.entries()) {
        const node = LiteGraph.createNode(type)
        app.graph.add(node)
        node.pos = [i * 1200, 0]
        const detail = { node: String(node.id), display_node: String(node.id), output: { text: [text] }, prompt_id: 'one' }
        app.api.dispatchEvent(new CustomEvent('executed', { detail }))
    }
    app.canvas.ds.scale = 0.2
    app.canvas.ds.offset = [200, 600]
    app.canvas.setDirty(true, true)
}"""
SHOWN_TEXTS = "() => [...document.querySelectorAll('.fusestream-text textarea')].map(area => area.value)"

pytestmark = pytest.mark.skipif(os.name == "nt", reason="no file can have such a name")


@pytest.fixture
def settings(server: Server) -> Iterator[dict[str, Any]]:
    """The usual ones; before the page opens, the file is there."""
    path = server.base / "models" / "diffusion_models" / NAME
    damage.write_page(path, Path())
    yield {}
    path.unlink()


def harmless(front: FrontEnd) -> None:
    front.page.wait_for_timeout(300)  # as long as a picture takes to be found missing
    assert not front.page.evaluate(HURT)


def load(front: FrontEnd, title: str = "") -> str:
    """The example on the file with this name; the id of its loader, and a title of its sampler."""
    workflow = graph()
    tiny.node_of(workflow, MODEL)["inputs"]["model_name"] = NAME
    front.page.evaluate("api => app.loadApiJson(api, 'example')", workflow)
    front.page.evaluate(
        "title => app.graph.nodes.forEach(n => { if (n.type === 'KSampler' && title) n.title = title })", title
    )
    return next(node["id"] for node in front.nodes() if node["type"] == MODEL)


def test_a_name_is_only_a_name(front: FrontEnd) -> None:
    loader = load(front)
    with front.page.expect_response("**/api/prompt") as answer:
        front.page.get_by_test_id("queue-button").click()
    assert answer.value.status == 400
    expect(toasts(front)).to_have_count(1)
    expect(sentence(toasts(front))).to_contain_text(f"{NAME} is a web page")
    sampler = next(node["id"] for node in front.nodes() if node["type"] == "KSampler")
    front.page.evaluate(HEAR, ["notice", {"node": sampler, "sentence": f"{NAME} does not use the image"}])
    expect(toasts(front).filter(has_text=f"{NAME} does not use the image")).to_have_count(1)
    failed = {"node_id": loader, "exception_type": "fusestream.WrongFile", "exception_message": f"{NAME} is cut off."}
    front.page.evaluate(
        HEAR.replace("`fusestream.${event}`", "event"), ["execution_error", {**failed, "traceback": [NAME]}]
    )
    expect(toasts(front).filter(has_text=f"{NAME} is cut off.")).to_have_count(1)
    harmless(front)
    assert all("400 POST" in problem or "PromptExecutionError" in problem for problem in front.problems)
    front.problems.clear()  # the browser notes the refusal


def test_at_a_loader(front: FrontEnd) -> None:
    """The estimate of what is there, of what is missing, and of samplers with such titles; the meter."""
    said: list[dict[str, Any]] = [
        {"sampler": "", "unknown": "noFile", "node": "", "values": {"file": NAME, "folder": NAME}},
        {"sampler": "", "unknown": "computed", "node": NAME, "values": {"what": NAME}},
    ]
    loader = load(front, NAME)
    expect(shown(front, loader)).to_contain_text(f"This will not run: {NAME} is a web page")  # as the server tells it
    front.page.route(ROUTE, lambda route: route.fulfill(json={"loaders": {loader: said}}))
    front.page.evaluate("() => { app.graph.nodes.find(n => n.type === 'KSampler').widgets[0].value += 1 }")
    front.page.evaluate("() => app.api.dispatchEvent(new CustomEvent('reconnected'))")
    expect(shown(front, loader)).to_contain_text(f"{NAME} is not there. Put it into {NAME}")
    expect(shown(front, loader)).to_contain_text(f"{NAME} is computed by {NAME} as it runs.")
    expect(hear(front, loader, {**READING, "memory": NAME})).to_contain_text(NAME)
    harmless(front)


def test_in_the_panel_and_its_reports(front: FrontEnd) -> None:
    model = {"id": 1, "name": NAME, "kind": NAME, "device": NAME, "vram": 1, "streams": True, "waiting": False}
    models = {"models": [{**model, "resident": 1, "window": 1, "pinned": 1}]}
    report = {"id": 1, "when": 0, "title": NAME, "policy": NAME, "seconds": 1, "stall": 0, "text": REPORT}
    picture = {"status": 200, "content_type": "image/svg+xml", "body": "<svg xmlns='http://www.w3.org/2000/svg'/>"}
    front.page.route("**/fusestream/models", lambda route: route.fulfill(json=models))
    front.page.route("**/fusestream/reports", lambda route: route.fulfill(json={"reports": [report]}))
    front.page.route("**/fusestream/reports/1/picture*", lambda route: route.fulfill(**picture))
    front.page.route("**/fusestream/models/release", lambda route: route.fulfill(json={"state": "released"}))
    panel = open_panel(front)
    expect(item(panel, NAME)).to_contain_text(f"{NAME}, streams on {NAME}")
    expect(panel.get_by_role("list").nth(1)).to_contain_text(NAME)
    panel.get_by_role("button", name="Release").click()
    expect(panel.get_by_role("status")).to_have_text(f"{NAME} was released.")
    panel.get_by_role("button", name="Show side by side").click()
    expect(dialog(front).get_by_role("textbox")).to_have_value(REPORT)
    expect(dialog(front).get_by_role("heading", name=NAME)).to_be_visible()
    harmless(front)
    front.page.keyboard.press("Escape")
    front.page.unroute_all()


def dialog(front: FrontEnd) -> Locator:
    return front.page.locator(".fusestream-dialog")


def test_in_the_doctors_verdict_and_on_nodes_that_show_a_text(front: FrontEnd) -> None:
    front.page.route(
        "**/fusestream/doctor", lambda route: route.fulfill(status=200, content_type="text/plain", body=VERDICT)
    )
    front.page.evaluate("() => { app.extensionManager.command.execute('FuseStream.Doctor') }")
    expect(dialog(front).get_by_role("textbox")).to_have_value(f"{NAME} is slow.")
    dialog(front).get_by_role("button", name="Details").click()
    expect(dialog(front).get_by_role("textbox")).to_have_value(VERDICT.split("\n\n", 1)[1])
    front.page.keyboard.press("Escape")
    types = ["FuseStreamPlan", "FuseStreamReport", "FuseStreamCompare", "FuseStreamDoctor"]
    front.page.evaluate(TEXTS, [types, REPORT])
    front.page.wait_for_function(f"() => ({SHOWN_TEXTS})().length >= {len(types)}")
    assert [text for text in front.page.evaluate(SHOWN_TEXTS) if text] == [REPORT] * len(types)
    harmless(front)


def test_in_what_is_said_of_swapped_loaders(front: FrontEnd) -> None:
    front.page.evaluate(ADD)
    front.page.evaluate(
        """name => {
            app.graph.clear()
            const node = add('UNETLoader', [100, 100], { unet_name: name, weight_dtype: 'fp8_e4m3fn' })
            node.title = name
            noted()
        }""",
        NAME,
    )
    front.choose_in_menu(OURS)
    expect(sentence(toasts(front).filter(has_text=f"{NAME} stays"))).to_contain_text(
        f"{NAME} stays: FuseStream Diffusion Model Loader"
    )
    front.page.evaluate("name => add('UNETLoader', [600, 100], { unet_name: name }) && noted()", NAME)
    front.choose_in_menu(OURS)
    front.page.wait_for_function(f"() => app.graph.nodes.some(node => node.type === '{MODEL}')")
    assert [node["lost"] for node in front.nodes()] == [[], []], "the file's name came along"
    harmless(front)
