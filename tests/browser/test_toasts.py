"""What goes wrong with our nodes is read in full without a click, and what is only worth knowing, too."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect

from browser.front_end import FrontEnd
from browser.overlays import HEAR
from browser.test_report import graph
from browser.toasts import check, sentence, toasts

LOADER, TITLE = "FuseStreamDiffusionModelLoader", "FuseStream Diffusion Model Loader"
# A long name without a space, and a sentence with its remedy.
SENTENCE = (
    "wan2.1_i2v_480p_14B_a_long_name_of_a_finetune_that_somebody_made_fp8_e4m3fn_scaled.safetensors is cut short: its header "
    "promises 16.4 GB, the file has 3.2 GB. Download it again."
)


@pytest.fixture(params=["dark", "light"])
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"Comfy.ColorPalette": request.param, "Comfy.VueNodes.Enabled": request.param == "dark"}


def load(front: FrontEnd, steps: int) -> None:
    workflow = graph()
    for node in workflow.values():
        if node["class_type"] == "KSampler":
            node["inputs"]["steps"] = steps
    front.page.evaluate("api => app.loadApiJson(api, 'example')", workflow)


def refused(node: str, *errors: dict[str, Any], class_type: str = LOADER) -> dict[str, Any]:
    """The server's answer to a prompt that it does not queue."""
    return {
        "error": {"type": "prompt_outputs_failed_validation", "message": "", "details": "", "extra_info": {}},
        "node_errors": {node: {"class_type": class_type, "dependent_outputs": [], "errors": list(errors)}},
    }


def of_input(name: str, said: str, type_: str = "custom_validation_failed") -> dict[str, Any]:
    details = f"{name} - {said}" if said else name
    return {
        "type": type_,
        "message": "Custom validation failed",
        "details": details,
        "extra_info": {"input_name": name},
    }


@pytest.mark.deep("light")
def test_an_error_says_its_sentence(front: FrontEnd) -> None:
    load(front, steps=1)
    loader = front.node(TITLE)
    # Far less than one block: a real error of a run, with ComfyUI's general advice below it.
    budget = "id => { app.graph.getNodeById(id).widgets.find(w => w.name === 'vram_budget').value = 0.0001 }"
    front.page.evaluate(budget, loader)
    front.run()
    expect(toasts(front)).to_have_count(1)
    said = sentence(toasts(front)).inner_text()
    assert "vram_budget" in said and "TIPS" not in said and "you ran out of memory" not in said
    check(front, "error", TITLE, said)
    # The front end's own box in the same corner can still be used.
    front.error.get_by_role("button", name="View details").click()
    panel = front.page.get_by_test_id("properties-panel")
    expect(panel).to_contain_text("vram_budget")
    expect(panel).not_to_contain_text("ran out of memory")
    # Another pack's error is none of ours.
    other = {
        "node_id": loader,
        "exception_type": "ValueError",
        "exception_message": "of another pack",
        "traceback": [],
        "prompt_id": "x",
    }
    front.page.evaluate("told => app.api.dispatchEvent(new CustomEvent('execution_error', { detail: told }))", other)
    expect(toasts(front)).to_have_count(1)


@pytest.mark.deep
@pytest.mark.parametrize("settings", [{}])
def test_what_the_server_refuses_is_said(front: FrontEnd) -> None:
    load(front, steps=1)
    loader = front.node(TITLE)
    several = [of_input("model_name", SENTENCE), of_input("vram_budget", SENTENCE), of_input("kernels", "")]
    answers = [
        refused(loader, *several),
        refused(loader, *several),
        refused(loader, of_input("model_name", "not in the list", "value_not_in_list")),
        refused(loader, of_input("image", "no such image"), class_type="LoadImage"),
    ]
    front.page.route("**/api/prompt", lambda route: route.fulfill(status=400, json=answers.pop(0)))
    for count in (1, 1, 0, 0):  # once, however often it is tried; and what others say is theirs to show
        with front.page.expect_response("**/api/prompt"):
            front.page.get_by_test_id("queue-button").click()
        expect(toasts(front)).to_have_count(count)
        if count:
            check(front, "error", TITLE, SENTENCE)
    front.page.unroute("**/api/prompt")
    assert all("400 POST" in problem or "PromptExecutionError" in problem for problem in front.problems)
    front.problems.clear()  # the browser notes each refusal


@pytest.mark.deep
@pytest.mark.parametrize("settings", [{}])
def test_a_notice_stays_until_the_next_run_and_an_interrupt_says_nothing(front: FrontEnd) -> None:
    load(front, steps=500)
    sampler = next(node["id"] for node in front.nodes() if node["type"] == "KSampler")
    told = {"node": sampler, "sentence": SENTENCE}
    front.page.evaluate(HEAR, ["notice", told])
    front.page.evaluate(HEAR, ["notice", told])
    check(front, "warn", "KSampler", SENTENCE)
    front.page.get_by_test_id("queue-button").click()
    expect(toasts(front)).to_have_count(0)
    expect(front.page.locator("[data-fusestream-meter]")).to_be_visible()  # it samples
    front.page.evaluate("""() => {
        window.interrupted = 0
        app.api.addEventListener('execution_interrupted', () => window.interrupted++)
        return app.api.interrupt(null)
    }""")
    front.page.wait_for_function("window.interrupted > 0")
    front.page.wait_for_timeout(500)
    expect(toasts(front)).to_have_count(0)
