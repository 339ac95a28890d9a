"""A new user's way: the template as it is with an INT8 file in its loader, from the estimate to the report."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import expect

from browser.conftest import INT8_FILE
from browser.front_end import FrontEnd
from browser.test_panel import open_panel
from browser.widgets import Canvas, Elements

LOADER = "FuseStream Diffusion Model Loader"
AS_STORED = "auto: as stored, INT8 products, FP32 sums in attention"


@pytest.fixture(params=[Elements, Canvas], ids=lambda one: one.__name__.lower())
def drawn_by(request: pytest.FixtureRequest) -> type[Canvas | Elements]:
    kind: type[Canvas | Elements] = request.param
    return kind


@pytest.fixture
def settings(drawn_by: type[Canvas | Elements]) -> dict[str, Any]:
    return drawn_by.SETTINGS


@pytest.mark.deep
def test_an_int8_file_is_computed_as_it_is_stored_and_that_is_said(
    front: FrontEnd, drawn_by: type[Canvas | Elements]
) -> None:
    front.page.set_viewport_size({"width": 1440, "height": 900})
    front.open_template("wan2.1_t2v_1.3B")
    loader, size = front.node(LOADER), front.node("Size and length")
    widgets = drawn_by(front.page)
    for name, value in (("width", 64), ("height", 64), ("length", 5)):
        widgets.number(size, name, value)
    widgets.number(front.node("KSampler"), "steps", 2)
    widgets.choose(loader, "model_name", INT8_FILE)
    estimate = front.page.locator(f'[data-fusestream-estimate="{loader}"]')
    expect(estimate).to_contain_text(AS_STORED)
    front.look(f"first-contact-{drawn_by.__name__}", "light", "dark")

    front.run()
    expect(front.error).to_be_hidden()
    panel = open_panel(front)
    run = panel.get_by_role("list").nth(1).get_by_role("listitem").filter(has_text=INT8_FILE)
    expect(run.first).to_be_visible()
    panel.get_by_role("button", name=re.compile("Show side by side")).press("Enter")
    dialog = front.page.get_by_role("dialog")
    told = [text.input_value() for text in dialog.get_by_role("textbox").all()]
    assert any(INT8_FILE in one and f"kernels auto, {AS_STORED}" in one for one in told), told
    front.look(f"first-contact-report-{drawn_by.__name__}", "light", "dark")
    front.page.keyboard.press("Escape")
