"""ComfyUI's templates with our loaders are what the script makes of them: the same graphs, files and notes, our loaders in place of
ComfyUI's, and room for them."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest

from bed.paths import ROOT
from bed.templates import SWAPPED, Swapped
from bed.templates.__main__ import SUBGRAPHS, WORKFLOWS, swapped_texts
from bed.templates.examples.parts import METER
from bed.templates.from_stock.loaders import LOADERS, NotSwappable
from bed.templates.from_stock.note import HEADING, STAYS
from bed.templates.from_stock.stand_ins import named
from bed.templates.from_stock.swap import Json, graphs, nodes, swapped
from bed.templates.inputs import PICTURE
from bed.templates.said import LANGUAGES, translated
from bed.templates.signatures import signature

LARGEST = 1_000_000  # bytes of all that come of ComfyUI's templates
each_template = pytest.mark.parametrize("one", SWAPPED, ids=lambda one: one.name)
same_templates = pytest.mark.skipif(
    not all(one.is_of_these_templates() for one in SWAPPED),
    reason="other templates are installed than they were made of",
)


@same_templates
def test_the_files_are_what_the_script_makes() -> None:
    changed = [path.name for path, text in swapped_texts().items() if path.read_text(encoding="utf-8") != text]
    assert not changed, "call `python3 dev.py workflows` and commit what it writes"


def test_they_are_small() -> None:
    """All users download them."""
    assert sum(path.stat().st_size for one in SWAPPED for path in (one.path, one.path.with_suffix(".jpg"))) < LARGEST


@same_templates
@each_template
def test_all_but_the_loaders_is_as_comfyui_has_it(one: Swapped) -> None:
    ours, stocks = one.shipped(), one.template()
    for mine, theirs in zip(graphs(ours), graphs(stocks), strict=True):
        known = {node["id"]: node for node in theirs["nodes"]}
        added = [node for node in mine["nodes"] if node["id"] not in known]
        assert [node["title"] for node in added] == ([HEADING] if mine is ours else [])
        for node in mine["nodes"]:
            if node not in added:
                before = known.pop(node["id"])
                swap = LOADERS.get(before["type"])
                assert node["type"] == (swap.ours if swap else before["type"])
                if node["type"] == "LoadImage":  # ours comes along
                    before["widgets_values"][0] = PICTURE
                kept = ("widgets_values", "inputs", "size", "mode") if swap is None else ("mode", "outputs")
                assert {name: node.get(name) for name in kept} == {name: before.get(name) for name in kept}
        assert not known
        assert sorted(ends(mine)) == sorted(ends(theirs))
    assert sorted(named(ours)) == sorted(named(stocks))


def ends(graph: Json) -> Iterator[tuple[Any, ...]]:
    """Of each link the nodes, the output, and the input by the name that ours has for it."""
    inside = {node["id"]: node for node in graph["nodes"]}
    for link in graph["links"]:
        _, source, slot, target, place, kind = list(link.values()) if isinstance(link, dict) else link
        name = inside[target]["inputs"][place]["name"] if target in inside else str(place)
        swap = LOADERS.get(inside[target]["type"]) if target in inside else None
        yield source, slot, target, str(swap.widgets[name] if swap else name), kind


@each_template
def test_every_link_of_a_loader_is_told_by_both_its_ends(one: Swapped) -> None:
    for graph in graphs(one.shipped()):
        inside = {node["id"]: node for node in graph["nodes"] if node["type"].startswith("FuseStream")}
        for link in graph["links"]:
            id_, source, slot, target, place, _ = list(link.values()) if isinstance(link, dict) else link
            assert source not in inside or id_ in inside[source]["outputs"][slot]["links"]
            assert target not in inside or inside[target]["inputs"][place]["link"] == id_


@each_template
def test_every_widget_that_a_host_shows_is_there(one: Swapped) -> None:
    workflow = one.shipped()
    defined = {graph["id"]: {node["id"]: node for node in graph["nodes"]} for graph in graphs(workflow)}
    for host in nodes(workflow):
        for id_, widget in host["properties"].get("proxyWidgets", ()):
            inner = defined[host["type"]][int(id_)]
            if inner["type"].startswith("FuseStream"):
                assert widget in signature(inner["type"]).widgets


@each_template
def test_no_loader_lies_on_what_did_not_overlap_before(one: Swapped) -> None:
    """Nor does its meter, which is drawn below it."""
    for graph in graphs(one.shipped()):
        for loader, other in combinations(graph["nodes"], 2):
            ours = [node for node in (loader, other) if node["type"].startswith("FuseStream")]
            if ours:
                assert not overlap(box(loader), box(other)), (loader["type"], other["type"])


def box(node: Json) -> tuple[float, float, float, float]:
    """Left, top, right and bottom, with the title bar."""
    (x, y), (width, height) = node["pos"], node["size"]
    meter = METER if "vram_budget" in _widgets(node) else 0
    return x, y - 30, x + width, y + (0 if node.get("flags", {}).get("collapsed") else height + meter)


def _widgets(node: Json) -> tuple[str, ...]:
    return signature(node["type"]).widgets if node["type"].startswith("FuseStream") else ()


def overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return all(a[i] < b[i + 2] and b[i] < a[i + 2] for i in (0, 1))


@each_template
def test_the_note_names_the_template_and_what_stays(one: Swapped) -> None:
    note, workflow = one.note(), one.shipped()
    assert f"*{one.stocks}*" in note
    for type_, name in STAYS.items():
        assert (f"*{name}*" in note) == (type_ in {node["type"] for node in nodes(workflow)})
    assert not {node["type"] for node in nodes(workflow)} & LOADERS.keys()
    for language in LANGUAGES:
        said = translated(note, language)
        assert f"*{one.stocks}*" in said and said.count("\n") == note.count("\n")
        assert said.count("**") == note.count("**")


@pytest.mark.parametrize(
    ("type_", "values", "fault"),
    [
        ("UNETLoader", ["a.safetensors", "fp8_e4m3fn"], "weight_dtype is 'fp8_e4m3fn'"),
        ("CLIPLoader", ["a.safetensors", "wan", "cpu"], "device is 'cpu'"),
    ],
)
def test_a_loader_with_what_ours_has_not_is_refused(type_: str, values: list[str], fault: str) -> None:
    with pytest.raises(NotSwappable, match=fault):
        swapped(alone(type_, values))


def test_a_loader_whose_lost_input_is_fed_is_refused() -> None:
    template = alone("UNETLoader", ["a.safetensors", "default"])
    fed = {"name": "weight_dtype", "type": "COMBO", "widget": {"name": "weight_dtype"}, "link": 7}
    template["nodes"][0]["inputs"].append(fed)
    template["links"].append([7, 2, 0, 1, 1, "COMBO"])
    with pytest.raises(NotSwappable, match="weight_dtype is fed"):
        swapped(template)


def test_the_template_itself_stays_as_it_is() -> None:
    template = alone("VAELoader", ["a.safetensors"])
    before = copy.deepcopy(template)
    (ours,) = swapped(template)["nodes"]
    assert template == before and ours["type"] == "FuseStreamVAELoader" and ours["widgets_values"][0] == "a.safetensors"


def alone(type_: str, values: list[str]) -> Json:
    """A workflow of this loader."""
    kind = {"UNETLoader": "MODEL", "CLIPLoader": "CLIP", "VAELoader": "VAE"}[type_]
    name = next(iter(LOADERS[type_].widgets))
    node = {
        "id": 1,
        "type": type_,
        "pos": [0, 0],
        "size": [300, 80],
        "inputs": [{"name": name, "type": "COMBO", "widget": {"name": name}, "link": None}],
        "outputs": [{"name": kind, "type": kind, "links": []}],
        "properties": {},
        "widgets_values": values,
    }
    return {"nodes": [node], "links": []}


def test_the_menu_of_the_page_swaps_the_same() -> None:
    text = (ROOT / "nodes" / "web" / "js" / "swap.js").read_text(encoding="utf-8")
    ours = dict(re.findall(r'(\w+) = "(FuseStream\w+)"', text))
    places = {}
    for theirs, to, widgets in re.findall(
        r'theirs: "(\w+)", ours: (\w+),\s+widgets: {(.+?)},?\s+},?\n', text, re.DOTALL
    ):
        pairs = re.findall(r'(\w+): (?:"(\w+)"|{ only: "(\w+)")', widgets)
        places[theirs] = ours[to], {name: (our or None) for name, our, _ in pairs}, {
            name: value for name, _, value in pairs if value
        }  # fmt: skip
    for theirs, swap in LOADERS.items():
        assert places[theirs] == (swap.ours, swap.widgets, swap.asked)


def test_no_workflow_but_these_comes_from_a_template() -> None:
    """Titles are one name each, and no blueprint is among them."""
    assert max(Counter(one.listed.stem for one in SWAPPED).values()) == 1
    assert not {one.listed.stem for one in SWAPPED} & {path.stem for path in SUBGRAPHS.iterdir()}
    assert {one.path.parent for one in SWAPPED} == {WORKFLOWS}
