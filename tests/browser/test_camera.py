"""A camera as a user has it: asked for by a run or switched on before, seen on the node, made a video of until it is stopped."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Locator, expect

from bed.templates import files
from browser.front_end import RENDERERS, FrontEnd
from browser.toasts import toasts

LIVE = "FuseStreamLiveVideo"
SIDE = 32
# A camera that the browser refuses, as where a user does.
REFUSED = "() => { navigator.mediaDevices.getUserMedia = () => Promise.reject(new Error('Permission denied')) }"
ROOM = """type => {
    const [left, top] = app.graph.nodes.find(node => node.type === type).pos
    app.canvas.ds.scale = 0.7
    app.canvas.ds.offset = [400 - left, 120 - top]
    app.canvas.setDirty(true, true)
}"""


@pytest.fixture(params=RENDERERS, ids=RENDERERS.get)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"Comfy.VueNodes.Enabled": request.param, "Comfy.Minimap.Visible": False}


def graph(steps: int) -> dict[str, Any]:
    """Neither frames nor a video; by the smallest model that is there."""

    def node(class_type: str, **inputs: Any) -> dict[str, Any]:
        return {"class_type": class_type, "inputs": inputs}

    live = {"steps": steps, "cfg": 1.0, "strength": 0.5, "seed": 1, "sampler": "euler", "scheduler": "simple"}
    return {
        "1": node("FuseStreamDiffusionModelLoader", model_name=files.T2V_SMALL.name),
        "2": node("FuseStreamTextEncoderLoader", text_encoder_name=files.UMT5.name, type="wan"),
        "3": node("FuseStreamVAELoader", vae_name=files.VAE21.name),
        "4": node("CLIPTextEncode", clip=["2", 0], text="a mosaic"),
        "5": node(
            LIVE,
            **live,
            **{"model": ["1", 0], "positive": ["4", 0], "negative": ["4", 0], "vae": ["3", 0]},
            **{"width": SIDE, "height": SIDE, "fps": 20.0},
        ),
        "6": node("SaveVideo", video=["5", 1], filename_prefix="live", format="auto", codec="auto"),
    }


def opened(front: FrontEnd) -> Locator:
    """The camera of the node in an open graph, in view."""
    front.page.evaluate("api => app.loadApiJson(api, 'live')", graph(steps=1))
    front.page.evaluate(ROOM, LIVE)
    return front.page.locator(".fusestream-camera")


@pytest.mark.deep
def test_a_run_asks_for_the_camera_and_ends_with_it(front: FrontEnd) -> None:
    camera = opened(front)
    expect(camera.locator("video")).to_be_hidden()
    with front.page.expect_websocket(
        lambda socket: "/fusestream/live/camera?word=" in socket.url, timeout=60_000
    ) as found:
        front.page.get_by_test_id("queue-button").click()
    sent: list[Any] = []

    def note(payload: Any) -> None:
        sent.append(payload)

    found.value.on("framesent", note)
    seen = camera.locator("video")
    expect(seen).to_be_visible()
    expect(seen).not_to_have_js_property("videoWidth", 0)
    text = re.compile(r"\d frames a second, \d+ so far")
    expect(front.page.get_by_text(text).first).to_be_visible(timeout=60_000)
    camera.get_by_role("button", name="Stop the camera").click()
    expect(front.page.get_by_text(re.compile(r"\d+ frames in .* a second")).first).to_be_visible(timeout=60_000)
    expect(seen).to_be_hidden()
    assert found.value.is_closed() and sent[-1] == "stop"
    history = front.page.request.get(f"{front.url}/history?max_items=1").json()
    ((_, run),) = history.items()
    assert run["status"]["status_str"] == "success"
    (video,) = run["outputs"]["6"]["images"]
    assert video["filename"].startswith("live")


@pytest.mark.deep
@pytest.mark.parametrize("settings", [{}])
def test_a_camera_that_is_refused_is_said_on_the_node(front: FrontEnd) -> None:
    camera = opened(front)
    front.page.evaluate(REFUSED)
    camera.get_by_role("button", name="Use the camera").click()
    expect(camera.get_by_role("status")).to_have_text("No camera: Permission denied")
    assert not camera.locator("video").is_visible()
    front.page.get_by_test_id("queue-button").click()  # where a run wants it, that is what ends it
    expect(toasts(front)).to_contain_text("No camera: Permission denied. Or connect", timeout=60_000)
