"""App mode, the front end's view of a workflow without its graph: it asks in words, and nothing of the canvas lies over it."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from bed.templates import EXAMPLES
from browser.front_end import FrontEnd

SIZES = ("width", "height", "length")
TOGGLE = "app.extensionManager.command.execute('Comfy.ToggleLinear')"


@pytest.mark.deep
def test_it_asks_in_words_and_shows_no_estimate(front: FrontEnd) -> None:
    for example in EXAMPLES[:3]:
        front.open_template(example.name)
        estimate = front.page.locator("[data-fusestream-estimate]").first
        expect(estimate).to_be_visible()
        front.page.evaluate(TOGGLE)
        labels = front.page.get_by_test_id("builder-widget-label")
        expect(labels).to_have_text(["What to show", *(("Width", "Height") if example.is_picture else SIZES)])
        expect(estimate).to_be_hidden()
        front.page.evaluate(TOGGLE)
        expect(estimate).to_be_visible()
