"""A user switches kernels in the comparison, and the reports say what ran; a choice that cannot be met says what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import expect

from browser.front_end import FrontEnd
from browser.widgets import Canvas

EXAMPLE, KERNELS, BOTH = "with_and_without", "B: kernels off", "A and B"
SMALL = {"Size and length": {"width": 64, "height": 64, "length": 5}, "A": {"steps": 2}, "B": {"steps": 2}}
LOADER = "FuseStream Diffusion Model Loader"
SET = "([id, name, value]) => { app.graph.getNodeById(id).widgets.find(w => w.name === name).value = value }"
# The text on a node, whole: a long one is scrolled.
TEXT = "id => app.graph.getNodeById(id).widgets.map(w => w.element?.querySelector('textarea')?.value ?? '').join('\\n')"


@pytest.fixture
def widgets(front: FrontEnd) -> Canvas:
    """The comparison, made small."""
    front.open_template(EXAMPLE)
    for title, sizes in SMALL.items():
        for name, value in sizes.items():
            front.page.evaluate(SET, [front.node(title), name, value])
    return Canvas(front.page)


def says(front: FrontEnd) -> str:
    text: str = front.page.evaluate(TEXT, front.node(BOTH))
    return text


@pytest.mark.deep
def test_toggles_change_what_the_reports_say_ran(front: FrontEnd, widgets: Canvas) -> None:
    front.run()
    expect(front.error).to_be_hidden()
    assert "| kernels auto, auto: " in says(front) and "| kernels off, auto\n" in says(front)
    widgets.choose(front.node(KERNELS), "norms", "auto")
    front.run()
    expect(front.error).to_be_hidden()
    assert re.search(r"\| kernels off, auto\b.*\bnorm_modulate auto\b", says(front))


@pytest.mark.deep
def test_choices_that_cannot_be_met_say_what_to_do(front: FrontEnd, widgets: Canvas) -> None:
    """A kernel that is insisted on without a card; less VRAM than the weights can pass through."""
    widgets.choose(front.node(KERNELS), "kernels", "on")
    assert "Choose 'auto'" in message(front)
    widgets.choose(front.node(KERNELS), "kernels", "off")
    front.page.evaluate(SET, [front.node(LOADER), "vram_budget", 0.001])
    said = message(front)
    assert "The weights need at least" in said and f"Raise vram_budget in the {LOADER}" in said
    front.page.evaluate(SET, [front.node(LOADER), "vram_budget", -1])
    front.run()
    expect(front.error).to_be_hidden()


def message(front: FrontEnd) -> Any:
    """Of the error that a run ends with."""
    front.run()
    expect(front.error).to_be_visible()
    front.error.get_by_role("button", name="View details").click()
    panel = front.page.get_by_test_id("properties-panel")
    expect(panel).to_contain_text("Exception Message")
    found = next(line for line in panel.inner_text().splitlines() if "Exception Message" in line)
    panel.get_by_role("button", name="Toggle properties panel").click()
    return found
