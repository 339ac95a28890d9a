"""A user changes the example, runs it and sees the video; or chooses a bad file, reads why, and goes on."""

from __future__ import annotations

import io
import re
import uuid
from typing import Any

import av
import pytest
from playwright.sync_api import Locator, expect

from bed.depth import is_thorough
from browser.conftest import BAD_FILE
from browser.front_end import FrontEnd
from browser.toasts import toasts
from browser.widgets import Canvas, Elements

TEMPLATE = "wan2.1_t2v_1.3B"
SIZE = {"width": 64, "height": 64, "length": 5}
STEPS = 2


@pytest.fixture(params=[Elements, Canvas] if is_thorough() else [Elements])
def drawn_by(request: pytest.FixtureRequest) -> type[Canvas | Elements]:
    """Which of the front end's two kinds of nodes is in use."""
    kind: type[Canvas | Elements] = request.param
    return kind


@pytest.fixture
def settings(drawn_by: type[Canvas | Elements]) -> dict[str, Any]:
    return {"Comfy.VueNodes.Enabled": drawn_by is Elements}


@pytest.fixture
def widgets(front: FrontEnd, drawn_by: type[Canvas | Elements]) -> Canvas | Elements:
    """The example, made small by hand."""
    front.open_template(TEMPLATE)
    widgets = drawn_by(front.page)
    for name, value in SIZE.items():
        widgets.number(front.node("Size and length"), name, value)
    widgets.number(front.node("KSampler"), "steps", STEPS)
    return widgets


def test_changed_workflow_runs_and_shows_its_video(front: FrontEnd, widgets: Canvas | Elements) -> None:
    # New every time: the server would skip what it has done before.
    text = f"an owl on a fence, {uuid.uuid4()}"
    widgets.text(front.node("What to show"), "text", text)
    with front.page.expect_request("**/api/prompt") as sent:
        front.run()
    body: Any = sent.value.post_data_json
    queued = body["prompt"]
    assert queued[front.node("What to show")]["inputs"]["text"] == text
    assert queued[front.node("Size and length")]["inputs"] == {**SIZE, "batch_size": 1}

    expect(front.error).to_be_hidden()
    # The tab tells how far all is, then how far this node is, then which node it is.
    titles = front.titles()
    assert any(re.fullmatch(r"\[\d+%\]\[(50|100)%\] KSampler", title) for title in titles), titles
    check_video(front, widgets.video(front.node("Save Video")))


@pytest.mark.deep
def test_bad_file_is_explained_and_the_next_prompt_works(front: FrontEnd, widgets: Canvas | Elements) -> None:
    loader = front.node("FuseStream Diffusion Model Loader")
    good = front.prompt()[loader]["inputs"]["model_name"]
    widgets.choose(loader, "model_name", BAD_FILE)
    with front.page.expect_response("**/api/prompt") as answered:
        front.page.get_by_test_id("queue-button").click()
    assert answered.value.status == 400, "it is refused before it is queued"
    toast = toasts(front)
    expect(toast).to_contain_text(f"{BAD_FILE} is a web page, not a model")
    assert all("400 POST" in problem or "PromptExecutionError" in problem for problem in front.problems)
    front.problems.clear()  # the browser notes the refusal

    widgets.choose(loader, "model_name", good)
    front.run()
    expect(front.error).to_be_hidden()
    expect(toast).to_have_count(0)
    check_video(front, widgets.video(front.node("Save Video")))


def check_video(front: FrontEnd, video: Locator) -> None:
    """It is on screen, the browser plays it, and its file has the frames that were asked for."""
    expect(video).to_be_visible()
    expect(video).to_have_js_property("videoWidth", SIZE["width"])
    expect(video).to_have_js_property("videoHeight", SIZE["height"])
    answer = front.page.request.get(video.evaluate("video => video.currentSrc"))
    assert answer.status == 200 and answer.headers["content-type"].startswith("video/")
    with av.open(io.BytesIO(answer.body())) as container:
        assert sum(1 for _ in container.decode(video=0)) == SIZE["length"]
