"""The example workflows as a user finds them: in the template browser, whole, readable, and what their twins say.

One page for all of them: a page takes longer to open than a template.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import expect

from bed.depth import is_thorough
from bed.paths import ROOT
from bed.templates import EXAMPLES, STEMS, TITLES
from browser.front_end import FrontEnd

WORKFLOWS = ROOT / "workflows"
NAMES = [example.name for example in EXAMPLES]
# At a smaller scale the front end draws nodes without their text (8 pixels of a font of 14).
READABLE = 8 / 14
SHOTS = ROOT / "output" / "templates"


@pytest.mark.deep
def test_every_template_has_its_picture(front: FrontEnd) -> None:
    dialog = front.browse_templates()
    front.load_cards(dialog, len(TITLES))
    for name, stem in STEMS.items():
        card = dialog.get_by_test_id(f"template-workflow-{stem}")
        expect(card).to_contain_text(TITLES[name])
        with Image.open(WORKFLOWS / f"{stem}.jpg") as picture:
            width, height = picture.size
        # The front end puts a picture of its own where it finds none; only the size tells that this one is ours.
        card.scroll_into_view_if_needed()
        shown = card.get_by_role("img")
        expect(shown).to_have_js_property("naturalWidth", width)
        expect(shown).to_have_js_property("naturalHeight", height)


@pytest.mark.deep
def test_every_template_opens_whole_and_readable(front: FrontEnd) -> None:
    faults = {}
    for name in NAMES if is_thorough() else NAMES[::2]:  # the other kind of nodes sees all of them
        front.open_template(name)
        expect(front.page.get_by_role("dialog")).to_be_hidden()
        expect(front.error).to_be_hidden()
        expect(front.page.get_by_test_id("subgraph-breadcrumb-missing-nodes-icon")).to_be_hidden()
        SHOTS.mkdir(parents=True, exist_ok=True)
        front.page.screenshot(path=SHOTS / f"{name}.png")
        if found := [*wrong(front, name), *unreadable(front, name), *unlike_its_twin(front, name)]:
            faults[name] = found
    assert not faults


def wrong(front: FrontEnd, name: str) -> list[str]:
    """Nodes, values and inputs that the front end does not know."""
    nodes = front.nodes()
    in_file = json.loads((WORKFLOWS / f"{STEMS[name]}.json").read_text(encoding="utf-8"))["nodes"]
    out = [f"{node['type']} has no such value: {node['lost']}" for node in nodes if node["lost"]]
    out += [f"{node['type']} is unknown" for node in nodes if not node["known"]]
    out += [f"{node['type']} is marked as faulty" for node in nodes if node["error"]]
    if {node["id"]: node["type"] for node in nodes} != {str(node["id"]): node["type"] for node in in_file}:
        out.append("other nodes than in the file")
    return out


def unreadable(front: FrontEnd, name: str) -> list[str]:
    """The front end fits the graph to the window; drawn too small, it leaves out every text. Of a text that another node writes
    there is no box to see before front end 1.58."""
    scale: float = front.page.evaluate("app.canvas.ds.scale")
    out = [f"drawn at a scale of {scale:.2f}"] if scale < READABLE else []
    boxes = front.page.get_by_test_id("dom-widget-textarea").all()
    hidden = [index for index, box in enumerate(boxes) if not box.is_visible()]
    out += [f"text boxes {hidden} are not in sight"] if len(hidden) not in (0, fed_texts(name)) else []
    for one, other in combinations(front.nodes(), 2):
        if overlap(one["box"], other["box"]):
            out.append(f"{one['title']} and {other['title']} overlap")
    return out


def fed_texts(name: str) -> int:
    nodes = json.loads((WORKFLOWS / f"{STEMS[name]}.json").read_text(encoding="utf-8"))["nodes"]
    inputs = (one for node in nodes for one in node["inputs"])
    return sum(one["type"] == "STRING" and "widget" in one and one["link"] is not None for one in inputs)


def unlike_its_twin(front: FrontEnd, name: str) -> list[str]:
    """The API file beside each template is what the front end makes of it. A title is there where a user set one."""
    twin: dict[str, Any] = json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))
    queued = front.prompt()
    for id_, node in queued.items():
        if "_meta" not in twin.get(id_, {}):
            del node["_meta"]
    return [
        f"queues {queued.get(id_)} where the twin has {twin.get(id_)}"
        for id_ in sorted({*queued, *twin}, key=int)
        if queued.get(id_) != twin.get(id_)
    ]


def test_no_template_lacks_its_picture_or_twin() -> None:
    assert names(WORKFLOWS, ".jpg") == names(WORKFLOWS, ".json") == sorted(STEMS.values())
    assert names(WORKFLOWS / "api", ".json") == sorted(NAMES)


def names(folder: Path, suffix: str) -> list[str]:
    return sorted(path.stem for path in folder.glob(f"*{suffix}"))


def overlap(a: list[float], b: list[float]) -> bool:
    return all(a[i] < b[i] + b[i + 2] and b[i] < a[i] + a[i + 2] for i in (0, 1))
