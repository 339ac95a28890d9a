"""A file's name that a page would run if it took it for HTML: in the widget and in toasts it is only a name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from bed import tiny
from bed.server import Server
from browser.front_end import FrontEnd
from browser.overlays import HEAR
from browser.test_report import MODEL, graph
from browser.toasts import sentence, toasts
from hostile import damage

NAME = f"{damage.SCRIPT}.safetensors"
HURT = "() => Boolean(window.hurt) || document.querySelectorAll('img[onerror]').length > 0"

pytestmark = pytest.mark.skipif(os.name == "nt", reason="no file can have such a name")


@pytest.fixture
def settings(server: Server) -> Iterator[dict[str, Any]]:
    """The usual ones; before the page opens, the file is there."""
    path = server.base / "models" / "diffusion_models" / NAME
    damage.write_page(path, Path())
    yield {}
    path.unlink()


def test_a_name_is_only_a_name(front: FrontEnd) -> None:
    workflow = graph()
    tiny.node_of(workflow, MODEL)["inputs"]["model_name"] = NAME
    front.page.evaluate("api => app.loadApiJson(api, 'example')", workflow)
    with front.page.expect_response("**/api/prompt") as answer:
        front.page.get_by_test_id("queue-button").click()
    assert answer.value.status == 400
    expect(toasts(front)).to_have_count(1)
    expect(sentence(toasts(front))).to_contain_text(f"{NAME}: is a web page")
    sampler = next(node["id"] for node in front.nodes() if node["type"] == "KSampler")
    front.page.evaluate(HEAR, ["notice", {"node": sampler, "sentence": f"{NAME} does not use the image"}])
    expect(toasts(front).filter(has_text=f"{NAME} does not use the image")).to_have_count(1)
    front.page.wait_for_timeout(300)  # as long as a picture takes to be found missing
    assert not front.page.evaluate(HURT)
    assert all("400 POST" in problem or "PromptExecutionError" in problem for problem in front.problems)
    front.problems.clear()  # the browser notes the refusal
