"""The panel at the side: the models in memory and how one is let go of, the last runs side by side, the doctor; the settings."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from playwright.sync_api import Locator, expect

from bed.paths import ROOT
from bed.server import PACK
from browser.colours import PIXEL, contrast
from browser.front_end import FrontEnd
from browser.overlays import HEAR
from browser.test_report import graph

OF_THE_PANEL = re.compile("/fusestream/models")  # which nobody else asks for
MODEL = "wan2.1_t2v_1.3B_fp16.safetensors"
ENCODER = "umt5_xxl_fp8_e4m3fn_scaled.safetensors"
# A model that the server does not know.
GONE = {
    "id": 4711,
    "name": MODEL,
    "kind": "WAN21",
    "device": "cuda:0",
    "vram": 2**30,
    "streams": False,
    "waiting": False,
}
# Of each text in the panel: its words, its ink and its ground in red, green, blue and opacity.
INKS = """panel => {
    %s
    const ground = one => {
        const found = pixel(getComputedStyle(one).backgroundColor)
        return found[3] ? found : ground(one.parentElement)
    }
    return [...panel.querySelectorAll('*')].filter(one => one.checkVisibility() && [...one.childNodes].some(n => n.nodeType === 3))
        .map(one => [one.textContent, pixel(getComputedStyle(one).color), ground(one)])
}""".replace("%s", PIXEL)
# What is wider than its place.
# The words of a label, and how many lines each is on.
LINES = """label => {
    const text = label.firstChild, words = text.data.trim().split('\\u200b')
    return [words, words.map(word => {
        const range = document.createRange(), from = text.data.indexOf(word)
        range.setStart(text, from)
        range.setEnd(text, from + word.length)
        return new Set([...range.getClientRects()].map(one => one.top)).size
    })]
}"""
CLIPPED = """panel => [panel, ...panel.querySelectorAll('*')]
    .filter(one => one.clientWidth > 0 && one.scrollWidth > one.clientWidth + 1).map(one => one.textContent)"""
ADD = """type => Object.fromEntries(LiteGraph.createNode(type).widgets.map(widget => [widget.name, widget.value]))"""


@pytest.fixture(params=[("dark", False, 1440), ("light", True, 1920)], ids=["dark", "light"])
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    theme, elements, _ = request.param
    return {"Comfy.ColorPalette": theme, "Comfy.VueNodes.Enabled": elements}


def load(front: FrontEnd, steps: int = 2) -> None:
    workflow = graph()
    for node in workflow.values():
        if node["class_type"] == "KSampler":
            node["inputs"]["steps"] = steps
    front.page.evaluate("api => app.loadApiJson(api, 'example')", workflow)


def open_panel(front: FrontEnd) -> Locator:
    """By its button at the side of the page, without a mouse; anew where the last test has left it open."""
    close_panel(front)
    front.page.keyboard.press("Enter")
    panel = front.page.locator(".fusestream-panel")
    expect(panel).to_be_visible()
    return panel


def close_panel(front: FrontEnd) -> None:
    """If it is open; its button is focused then."""
    panel = front.page.locator(".fusestream-panel")
    front.page.get_by_role("button", name=PACK, exact=True).focus()
    if panel.count():
        front.page.keyboard.press("Enter")
        expect(panel).to_have_count(0)


@pytest.mark.parametrize("settings", [{}])
def test_the_name_at_the_side_breaks_between_its_words(front: FrontEnd) -> None:
    front.page.evaluate("app.extensionManager.setting.set('Comfy.Sidebar.Size', 'normal')")
    label = front.page.get_by_role("button", name=PACK, exact=True).locator(".side-bar-button-label")
    words, lines = label.evaluate(LINES)
    front.page.evaluate("app.extensionManager.setting.set('Comfy.Sidebar.Size', 'small')")
    assert words == ["Fuse", "Stream"] and lines == [1, 1]


def item(panel: Locator, name: str) -> Locator:
    return panel.get_by_role("list").first.get_by_role("listitem").filter(has_text=name)


@pytest.mark.deep("light")
def test_models_are_seen_and_let_go_of(front: FrontEnd, settings: dict[str, Any]) -> None:
    front.page.set_viewport_size({"width": 1440 if settings["Comfy.ColorPalette"] == "dark" else 1920, "height": 900})
    load(front)
    panel = open_panel(front)
    front.run()
    expect(item(panel, MODEL)).to_contain_text("Diffusion model (Wan), streams on cpu")
    expect(item(panel, MODEL)).not_to_contain_text("0.0 MiB")
    expect(item(panel, ENCODER)).to_contain_text("Text encoder (T5 or UMT5)")
    runs = panel.get_by_role("list").nth(1).get_by_role("listitem")
    expect(runs.first).to_contain_text(re.compile(r"64x64, 5 frames, 2 steps: .* s, .* s a step"))
    expect(runs.first).to_contain_text(MODEL)

    assert panel.evaluate(CLIPPED) == []
    inks = panel.evaluate(INKS)
    assert len(inks) > 10 and all(contrast(ink, ground) >= 4.5 for _, ink, ground in inks)
    assert (sum(inks[0][2][:3]) < 180) == (settings["Comfy.ColorPalette"] == "dark")

    item(panel, MODEL).get_by_role("button", name=f"Release {MODEL}").focus()
    front.page.keyboard.press("Enter")
    expect(panel.get_by_role("status")).to_have_text(f"{MODEL} was released.")
    expect(item(panel, MODEL)).to_have_count(0)
    expect(item(panel, ENCODER)).to_be_visible()

    dialog = front.page.get_by_role("dialog")
    runs.first.get_by_role("button").press("Enter")
    expect(dialog.get_by_role("textbox")).to_have_value(re.compile(f"FuseStream report: {re.escape(MODEL)}"))
    front.page.keyboard.press("Escape")
    panel.get_by_role("button", name="Show side by side").press("Enter")
    expect(dialog.get_by_role("img").first).to_have_js_property("naturalWidth", 1120)
    count = runs.count()
    assert 2 <= count == dialog.get_by_role("img").count() == dialog.get_by_role("textbox").count()
    reports = [text.input_value() for text in dialog.get_by_role("textbox").all()]
    assert all(one.startswith("FuseStream report: ") for one in reports)
    assert any(one.startswith(f"FuseStream report: {MODEL}") for one in reports)
    assert all(contrast(ink, ground) >= 4.5 for _, ink, ground in dialog.evaluate(INKS))
    front.page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    panel.get_by_role("button", name="Doctor").press("Enter")
    expect(dialog.get_by_role("heading")).to_have_text("FuseStream Doctor")


@pytest.mark.deep
@pytest.mark.parametrize("settings", [{}])
def test_while_a_graph_runs_a_model_waits_for_its_end(front: FrontEnd) -> None:
    load(front, steps=500)
    panel = open_panel(front)
    front.page.get_by_test_id("queue-button").click()
    expect(front.page.locator("[data-fusestream-meter]").first).to_be_visible()  # it samples
    button = item(panel, MODEL).get_by_role("button")
    button.click()
    expect(panel.get_by_role("status")).to_have_text(f"A run is under way: {MODEL} is released when it is done.")
    expect(button).to_have_text("Released after this run")
    expect(button).to_be_disabled()
    front.page.evaluate("app.api.interrupt(null)")
    expect(item(panel, MODEL)).to_have_count(0)
    expect(item(panel, ENCODER)).to_be_visible()


@pytest.mark.parametrize("settings", [{}])
def test_a_button_outlasts_what_is_shown_anew(front: FrontEnd) -> None:
    """While a model streams its figures change every second; a press in which they do is one, and the focus stays."""
    other = {**GONE, "id": 4712, "name": ENCODER}
    served = [GONE]
    front.page.route("**/fusestream/models", lambda route: route.fulfill(json={"models": served}))
    panel = open_panel(front)
    button = item(panel, MODEL).get_by_role("button")
    button.hover()
    front.page.mouse.down()
    served[:] = [{**GONE, "vram": 2 * 2**30}, other]
    front.page.evaluate(HEAR, ["panel", {}])
    expect(item(panel, MODEL)).to_contain_text("Holds 2.00 GiB")
    front.page.mouse.up()
    expect(panel.get_by_role("status")).to_have_text(f"{MODEL} was not in memory any more.")
    expect(item(panel, ENCODER)).to_be_visible()
    last = item(panel, ENCODER).get_by_role("button")
    last.focus()
    served.reverse()
    front.page.evaluate(HEAR, ["panel", {}])
    names = panel.get_by_role("list").first.get_by_role("strong")
    expect(names).to_have_text([ENCODER, MODEL])
    expect(last).to_be_focused()
    served[:] = [{**GONE, "vram": 3 * 2**30}]
    front.page.evaluate(HEAR, ["panel", {}])
    expect(item(panel, MODEL)).to_contain_text("Holds 3.00 GiB")
    expect(names).to_have_text([MODEL])
    front.problems.clear()  # the browser notes the 404


@pytest.mark.deep
@pytest.mark.parametrize("settings", [{}])
def test_a_closed_panel_asks_for_nothing(front: FrontEnd) -> None:
    close_panel(front)  # which the test before may have left open
    asked: list[str] = []
    front.page.on("request", lambda request: asked.append(request.url) if OF_THE_PANEL.search(request.url) else None)
    load(front)
    front.run()
    assert not asked
    panel = open_panel(front)
    expect(item(panel, MODEL)).to_be_visible()
    front.page.wait_for_timeout(1000)
    before = len(asked)
    assert before in (1, 2), "once, and of the prompt's end it may hear behind that"
    front.page.wait_for_timeout(3000)
    assert len(asked) == before, "nothing has happened"
    # Another way to unload models, which tells nobody: it is seen when the panel is looked at.
    front.page.evaluate("app.api.freeMemory({ freeExecutionCache: false })")
    front.page.wait_for_function("fetch('/fusestream/models').then(a => a.json()).then(({ models }) => !models.length)")
    front.page.mouse.move(900, 400)
    panel.hover()
    expect(panel.get_by_text("No model is in memory.")).to_be_visible()
    front.page.get_by_role("button", name=PACK, exact=True).press("Enter")
    expect(panel).to_have_count(0)
    before = len(asked)
    load(front)
    front.run()
    assert len(asked) == before


@pytest.mark.parametrize("settings", [{}])
def test_a_model_that_is_gone_and_a_server_that_does_not_answer_are_said(front: FrontEnd) -> None:
    front.page.route("**/fusestream/models", lambda route: route.fulfill(json={"models": [GONE]}))
    panel = open_panel(front)
    expect(item(panel, MODEL)).to_contain_text("Holds 1.00 GiB")
    item(panel, MODEL).get_by_role("button").click()
    expect(panel.get_by_role("status")).to_have_text(f"{MODEL} was not in memory any more.")
    front.page.route("**/fusestream/models", lambda route: route.fulfill(status=502))
    front.page.mouse.move(900, 400)
    panel.hover()
    expect(panel.get_by_role("status")).to_contain_text("did not answer: 502")
    front.page.unroute("**/fusestream/models")
    front.page.mouse.move(900, 400)
    panel.hover()
    expect(panel.get_by_role("status")).to_have_text("")
    assert all("404" in problem or "502" in problem for problem in front.problems)
    front.problems.clear()  # the browser notes each


@pytest.mark.deep
@pytest.mark.parametrize("settings", [{"Comfy.Locale": language} for language in ("ja", "zh")])
def test_it_speaks_the_users_language(front: FrontEnd, settings: dict[str, Any]) -> None:
    main = ROOT / "locales" / settings["Comfy.Locale"] / "main.json"
    words = json.loads(main.read_text(encoding="utf-8"))
    panel = open_panel(front)
    ours = words["fuseStream"]
    expect(panel.get_by_role("heading", level=3)).to_have_text(
        [ours["inMemory"], ours["lastRuns"], ours["thisMachine"]]
    )
    expect(panel.get_by_role("button", name=words["menuLabels"]["Examine this machine (Doctor)"])).to_be_visible()
    assert panel.evaluate(CLIPPED) == []


@pytest.mark.deep
@pytest.mark.parametrize("settings", [{"FuseStream.Defaults.Quality": "Fastest", "FuseStream.Defaults.Kernels": "on"}])
def test_new_loaders_begin_as_the_settings_say(front: FrontEnd) -> None:
    for name in ("DiffusionModel", "TextEncoder", "VAE"):
        values = front.page.evaluate(ADD, f"FuseStream{name}Loader")
        assert (values["quality"], values["precision"], values["kernels"]) == ("Fastest", "precise", "on")
    front.open_template("wan2.1_t2v_1.3B")
    saved = [node["inputs"] for node in front.prompt().values() if node["class_type"].startswith("FuseStream")]
    assert {(one["precision"], one["kernels"]) for one in saved if "precision" in one} == {("precise", "auto")}
    assert {one["quality"] for one in saved if "quality" in one} == {"auto"}
    front.page.get_by_role("button", name="Settings (Ctrl").click()
    dialog = front.page.get_by_role("dialog")
    dialog.get_by_text(PACK, exact=True).first.click()
    for name in (
        "Quality of new loaders",
        "Kernels of new loaders",
        "Live meter below loaders while a model streams",
        "VRAM left to other programs, GiB (0: automatic)",
        "RAM that streamed models may pin, GiB (0: automatic)",
    ):
        expect(dialog.get_by_text(name)).to_be_visible()
