"""The texts of doctor, report and comparison: whole, with their lines, to be copied; and the doctor's without a graph."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Locator, Request, expect

from bed.paths import ROOT
from browser.front_end import RENDERERS, FrontEnd

# The doctor alone, as a user adds it: at the size it comes with.
DOCTOR = """() => {
    app.graph.clear()
    const node = LiteGraph.createNode('FuseStreamDoctor')
    app.graph.add(node)
    node.pos = [0, 0]
    node.widgets.find(w => w.name === 'measure').value = false
    app.canvas.ds.scale = 0.6
    app.canvas.ds.offset = [200, 150]
    app.canvas.setDirty(true, true)
}"""
WITHOUT_CLIPBOARD = "Object.defineProperty(navigator, 'clipboard', { value: undefined })"
PASTE = """() => {
    const box = document.createElement('textarea')
    box.id = 'pasted'
    document.body.append(box)
    box.focus()
}"""
# The height of the text by itself.
TWIN = """area => {
    const twin = area.cloneNode()
    Object.assign(twin.style, { position: 'absolute', height: '0', flex: 'none', width: `${area.offsetWidth}px` })
    twin.value = area.value
    area.parentElement.append(twin)
    const height = twin.scrollHeight
    twin.remove()
    return height
}"""
TO_DO = re.compile(r"^What to do\n(  \S.*\n?)+$")  # and the details are folded
LINES = "area => Math.round((area.scrollHeight - 12) / parseFloat(getComputedStyle(area).lineHeight))"


@pytest.fixture(params=RENDERERS, ids=RENDERERS.get)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"Comfy.VueNodes.Enabled": request.param}


@pytest.fixture
def queued(front: FrontEnd) -> Iterator[list[str]]:
    """The prompts that the page sends."""
    sent: list[str] = []

    def note(request: Request) -> None:
        if request.method == "POST" and request.url.endswith("/prompt"):
            sent.append(request.url)

    front.page.on("request", note)
    front.page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=front.url)
    yield sent
    front.page.context.clear_permissions()


def text_on_node(front: FrontEnd) -> Locator:
    return front.page.locator(".fusestream-text:not(dialog *) textarea")


def verdict(front: FrontEnd) -> Locator:
    return front.page.locator(".fusestream-verdict")


def unfold(front: FrontEnd) -> None:
    front.page.get_by_role("button", name="Details", exact=True).click()
    expect(front.page.get_by_role("button", name="Fewer details")).to_have_attribute("aria-expanded", "true")


def clipboard(front: FrontEnd) -> str:
    text: str = front.page.evaluate("navigator.clipboard.readText()")
    return text.replace("\r\n", "\n")


@pytest.mark.deep
def test_the_doctor_shows_all_of_its_text_and_copies_it(front: FrontEnd, queued: list[str]) -> None:
    front.page.set_viewport_size({"width": 1280, "height": 1600})  # higher than the text
    front.page.evaluate(DOCTOR)
    front.run()
    area = text_on_node(front)
    expect(area).to_have_value(TO_DO)
    expect(verdict(front)).to_have_text(re.compile("^Red: "))  # no card is here
    unfold(front)
    expect(area).to_have_value(lines_of("What to do", "Details", "Other packs"))
    text = area.input_value()
    expect(area).to_be_visible()
    front.page.wait_for_function("area => area.scrollHeight <= area.clientHeight", arg=area.element_handle())
    assert area.evaluate("area => area.clientHeight") < 1.1 * area.evaluate(TWIN), "more room than it takes"
    assert area.evaluate(LINES) >= text.rstrip().count("\n") + 1 > 30, "lines run into each other"
    assert "Doctor" in front.nodes()[0]["title"] and inside(front, area)
    assert len(queued) == 1

    front.page.get_by_role("button", name="Copy", exact=True).click()
    expect(front.page.get_by_role("button", name="Copied")).to_be_visible()
    assert clipboard(front).endswith(text) and clipboard(front).startswith("FuseStream doctor: red\n")
    saved = front.page.evaluate("app.graph.serialize().nodes[0].widgets_values")
    assert saved == [False] and front.prompt()["1"]["inputs"] == {"measure": False}, "the text is no input"


def lines_of(*words: str) -> Any:
    """A text that has these at the beginning of lines, in this order."""
    return re.compile("^" + r"[\s\S]*\n".join(map(re.escape, words)))


def inside(front: FrontEnd, area: Locator) -> bool:
    """Whether the whole box is on its node."""
    box, (x, y, width, height) = area.bounding_box(), front.nodes()[0]["box"]
    left, top = front.page.evaluate("([x, y]) => app.canvasPosToClientPos([x, y])", [x, y])
    scale = front.page.evaluate("app.canvas.ds.scale")
    assert box is not None
    return bool(
        left <= box["x"]
        and top <= box["y"]
        and box["x"] + box["width"] <= left + width * scale + 1
        and box["y"] + box["height"] <= top + height * scale + 1
    )


@pytest.mark.deep
@pytest.mark.parametrize("settings", [{}])
def test_the_doctor_looks_without_running_the_graph(front: FrontEnd, queued: list[str]) -> None:
    front.page.evaluate(DOCTOR)
    front.page.get_by_role("button", name="Look now").click()
    area = text_on_node(front)
    expect(area).to_have_value(TO_DO)
    front.page.wait_for_function(
        "area => area.scrollHeight <= area.clientHeight", arg=area.element_handle(), timeout=5000
    )
    assert not queued


@pytest.mark.deep
@pytest.mark.parametrize("settings", [{"Comfy.VueNodes.Enabled": True}])
def test_a_text_is_shown_again_with_its_workflow(front: FrontEnd, queued: list[str]) -> None:
    front.page.evaluate(DOCTOR)
    front.run()
    expect(text_on_node(front)).to_have_value(TO_DO)
    tabs = front.page.get_by_test_id("topbar-workflow-tabs")
    front.page.get_by_role("button", name="Create a new blank workflow").click()
    expect(text_on_node(front)).to_have_count(0)
    tabs.get_by_text("Unsaved Workflow", exact=True).first.click()
    expect(text_on_node(front)).to_have_value(TO_DO)


@pytest.mark.deep
@pytest.mark.parametrize("settings", [{"Comfy.Locale": "ja"}])
def test_the_menu_has_a_doctor_in_the_users_language(front: FrontEnd) -> None:
    said = json.loads((ROOT / "locales" / "ja" / "main.json").read_text(encoding="utf-8"))
    front.choose_in_menu(said["menuLabels"]["Examine this machine (Doctor)"])
    expect(front.page.get_by_role("dialog").get_by_role("button", name=said["fuseStream"]["copy"])).to_be_visible()
    expect(verdict(front)).to_have_text(said["fuseStream"]["verdict_red"])


@pytest.mark.deep
@pytest.mark.parametrize("settings", [{}])
def test_the_menu_has_a_doctor_that_runs_no_graph(front: FrontEnd, queued: list[str]) -> None:
    front.choose_in_menu("Examine this machine")
    dialog = front.page.get_by_role("dialog")
    area = dialog.get_by_role("textbox")
    expect(area).to_have_value(TO_DO)
    folded = area.input_value()
    unfold(front)
    expect(area).to_have_value(lines_of("What to do", "Details", "Pager and bus"))
    assert area.evaluate(LINES) > 30
    # Over plain http from another machine a page has no clipboard of its own.
    front.page.evaluate(WITHOUT_CLIPBOARD)
    dialog.get_by_role("button", name="Copy").click()
    expect(dialog.get_by_role("button", name="Copied")).to_be_visible()
    text = area.input_value()
    dialog.get_by_role("button", name="Fewer details").click()
    expect(area).to_have_value(folded)
    dialog.get_by_role("button", name=re.compile("^Cop(y|ied)$")).click()
    expect(area).to_have_value(folded)
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).to_have_count(0)
    front.page.evaluate(PASTE)
    front.page.keyboard.press("ControlOrMeta+V")
    expect(front.page.locator("#pasted")).to_have_value(re.compile("^FuseStream doctor: red\n"))
    assert front.page.locator("#pasted").input_value().endswith(text), "all of it, folded or not"
    assert not queued


@pytest.mark.deep
@pytest.mark.parametrize("settings", [{}])
def test_why_the_doctor_says_nothing_can_be_read(front: FrontEnd) -> None:
    show = "() => { app.extensionManager.command.execute('FuseStream.Doctor') }"
    sentence = "The doctor stopped: OSError: the disk is gone."
    answers = [
        (lambda route: route.fulfill(status=500, body=sentence), sentence),
        (lambda route: route.fulfill(status=404, body="no"), "ComfyUI's server did not answer: 404"),
        (lambda route: route.abort("connectionrefused"), "ComfyUI's server did not answer: "),
    ]
    dialog = front.page.get_by_role("dialog")
    for answer, said in answers:
        front.page.route("**/fusestream/doctor", answer)
        front.page.evaluate(show)
        expect(dialog.get_by_role("textbox")).to_have_value(lines_of(said))
        expect(verdict(front)).to_be_hidden()
        front.page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        front.page.unroute("**/fusestream/doctor")
    front.problems[:] = [one for one in front.problems if "/fusestream/doctor" not in one]
