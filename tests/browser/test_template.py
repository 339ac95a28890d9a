"""The example workflows as a user finds them: in the template browser, whole, readable, and what their twins say."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import expect

from bed.paths import ROOT
from browser.front_end import FrontEnd

WORKFLOWS = ROOT / "workflows"
NAMES = sorted(path.stem for path in WORKFLOWS.glob("*.json"))
each_template = pytest.mark.parametrize("name", NAMES)


@each_template
def test_template_has_its_picture(front: FrontEnd, name: str) -> None:
    card = front.browse_templates().get_by_test_id(f"template-workflow-{name}")
    expect(card).to_contain_text(name)
    with Image.open(WORKFLOWS / f"{name}.jpg") as picture:
        width, height = picture.size
    # The front end puts a picture of its own where it finds none; only the size tells that this one is ours.
    shown = card.get_by_role("img")
    expect(shown).to_have_js_property("naturalWidth", width)
    expect(shown).to_have_js_property("naturalHeight", height)


@each_template
def test_template_opens_whole(front: FrontEnd, name: str) -> None:
    front.open_template(name)
    nodes = front.nodes()
    in_file = json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))["nodes"]
    assert {node["id"]: node["type"] for node in nodes} == {str(node["id"]): node["type"] for node in in_file}
    assert not [node["type"] for node in nodes if not node["known"]], "types that the front end does not know"
    assert not {node["type"]: node["lost"] for node in nodes if node["lost"]}, "values that the lists do not offer"
    assert not [node["type"] for node in nodes if node["error"]], "nodes marked as faulty"
    expect(front.error).to_be_hidden()
    expect(front.page.get_by_test_id("subgraph-breadcrumb-missing-nodes-icon")).to_be_hidden()
    expect(front.page.get_by_role("dialog")).to_be_hidden()


@each_template
def test_template_is_readable_as_it_opens(front: FrontEnd, name: str) -> None:
    """The front end fits the graph to the window; drawn too small, it leaves out every text."""
    front.open_template(name)
    for box in front.page.get_by_test_id("dom-widget-textarea").all():
        expect(box).to_be_visible()
    overlapping = [(a["type"], b["type"]) for a, b in combinations(front.nodes(), 2) if overlap(a["box"], b["box"])]
    assert not overlapping


@each_template
def test_front_end_queues_what_the_twin_says(front: FrontEnd, name: str) -> None:
    """The API file beside each template is what the front end makes of it. A title is there where a user set one."""
    front.open_template(name)
    twin: dict[str, Any] = json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))
    queued = front.prompt()
    for id_, node in queued.items():
        if "_meta" not in twin.get(id_, {}):
            del node["_meta"]
    assert queued == twin


def test_no_template_lacks_its_picture_or_twin() -> None:
    assert NAMES
    for folder, suffix in ((WORKFLOWS, ".jpg"), (WORKFLOWS / "api", ".json")):
        assert sorted(path.stem for path in folder.glob(f"*{suffix}")) == NAMES


def overlap(a: list[float], b: list[float]) -> bool:
    return all(a[i] < b[i] + b[i + 2] and b[i] < a[i] + a[i + 2] for i in (0, 1))
