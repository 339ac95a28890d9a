"""The time that is left, in the tab's title and the panel; and a finished run's comparison with the last one."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect

from bed.paths import ROOT
from browser.front_end import RENDERERS, FrontEnd
from browser.overlays import CLIPPED, HEAR
from browser.test_panel import open_panel

OWN_PAGE = True  # what other tests have run in theirs has been heard there
LOADER = "FuseStreamDiffusionModelLoader"
ENDS = "kind => app.api.dispatchEvent(new CustomEvent(kind, { detail: {} }))"
ONE = """async type => {
    app.graph.clear()
    const node = LiteGraph.createNode(type)
    app.graph.add(node)
    node.pos = [0, 0]
    app.canvas.ds.scale = 0.8
    app.canvas.ds.offset = [450, 200]
    app.canvas.setDirty(true, true)
    return String(node.id)
}"""
PICTURE = next((ROOT / "workflows").glob("*.jpg"))
# Reports as the server keeps them, the newest first.
REPORTS = [
    {
        "id": number, "when": 1000 * number, "title": f"{name}.safetensors", "policy": "kernels on", "seconds": 1.25, "stall": 0,
        "text": name, "run": {"frames": 81, "size": "832x480", "steps": 30, "all": took, "step": "0.8 s"},
    }
    for number, name, took in ((3, "wan", "24 s"), (2, "other", "9 s"), (1, "wan", "30 s"))
]  # fmt: skip


@pytest.fixture(params=RENDERERS, ids=RENDERERS.get)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"Comfy.VueNodes.Enabled": request.param, "Comfy.Minimap.Visible": False}


@pytest.mark.every_other
def test_what_is_left_stands_in_the_title_and_the_panel(front: FrontEnd) -> None:
    front.page.evaluate("document.title = '[40%] mine'")
    panel = open_panel(front)
    for seconds, said in ((4, None), (7000, "1 h 57 min left"), (125, "2 min left"), (31, "31 s left")):
        front.page.evaluate(HEAR, ["left", {"node": "1", "seconds": seconds}])
        wanted = "[40%] mine" if said is None else f"{said} · [40%] mine"
        assert front.page.title() == wanted
        if said:
            expect(panel).to_contain_text(said)
    front.page.evaluate("document.title = '[50%] mine'")  # the front end goes on
    front.page.wait_for_function("document.title.endsWith('left · [50%] mine')")
    front.page.wait_for_function("/^(29|28) s left/.test(document.title)")  # it is counted down
    front.page.evaluate(ENDS, "execution_success")
    assert front.page.title() == "[50%] mine"
    expect(panel).not_to_contain_text("left")
    with front.page.expect_response("**/fusestream/reports"):  # as after each prompt; there are none
        front.page.evaluate(HEAR, ["panel", {}])


def test_a_finished_run_is_compared_with_the_last(front: FrontEnd) -> None:
    front.page.route("**/fusestream/reports", lambda route: route.fulfill(json={"reports": REPORTS}))
    front.page.route("**/fusestream/reports/1/3", lambda route: route.fulfill(json={"text": "what differs"}))
    front.page.route("**/fusestream/reports/1/3/picture*", lambda route: route.fulfill(path=PICTURE))
    node = front.page.evaluate(ONE, LOADER)
    offer = front.page.locator(f'[data-fusestream-finished="{node}"]')
    front.page.evaluate(HEAR, ["panel", {}])  # another page's run
    front.page.wait_for_timeout(200)
    expect(offer).to_have_count(0)
    front.page.evaluate(HEAR, ["left", {"node": node, "seconds": 1}])
    front.page.evaluate(ENDS, "execution_start")  # that one was interrupted
    front.page.evaluate(HEAR, ["panel", {}])
    front.page.wait_for_timeout(200)
    expect(offer).to_have_count(0)
    front.page.evaluate(HEAR, ["left", {"node": node, "seconds": 1}])
    front.page.evaluate(HEAR, ["panel", {}])
    expect(offer).to_be_visible()
    expect(offer).to_contain_text("Sampled in 24 s")
    expect(offer).to_contain_text("last time 30 s")
    assert offer.evaluate(CLIPPED) == []
    offer.get_by_role("button", name="Compare with last").click()
    dialog = front.page.get_by_role("dialog")
    expect(dialog.locator("textarea")).to_have_value("what differs")
    expect(dialog.locator("h3")).to_contain_text("wan.safetensors: A ")
    expect(dialog.locator("img")).to_be_visible()
    dialog.get_by_role("button", name="Close").click()
    offer.get_by_role("button", name="Close").click()
    expect(offer).to_have_count(0)
    front.page.evaluate(HEAR, ["left", {"node": node, "seconds": 1}])
    front.page.evaluate(HEAR, ["panel", {}])  # no new report: the model was in ComfyUI's cache
    front.page.wait_for_timeout(200)
    expect(offer).to_have_count(0)
