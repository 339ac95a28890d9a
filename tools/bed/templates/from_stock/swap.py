"""A template of ComfyUI's with our loaders: the same graph, subgraphs, notes and downloads.

loader     becomes ours where `LOADERS` has it, with its links and its files' addresses
host       the node that stands for a subgraph; it names the widgets inside that it shows
room       our loaders have more widgets, and a meter below: what lies below them moves down
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from ..examples.parts import METER
from ..graph import BADGE, ELEMENT, MARGIN, SOCKET
from ..inputs import PICTURE
from ..signatures import signature
from .loaders import LOADERS, NotSwappable, Swap

Json = dict[str, Any]


def swapped(template: Json) -> Json:
    """The workflow with our loaders; the one that is given stays as it is. Raises NotSwappable."""
    workflow = copy.deepcopy(template)
    renamed: dict[str, dict[str, dict[str, str]]] = {}  # by subgraph and node: ComfyUI's name of a widget, and ours
    for graph in graphs(workflow):
        taller = {node["id"]: node["type"] for node in graph["nodes"] if node["type"] in LOADERS}
        for node in sorted(graph["nodes"], key=lambda one: float(one["pos"][1])):
            if node["id"] in taller:
                _swap(graph, node, LOADERS[node["type"]])
        told = {str(id_): _names(LOADERS[type_]) for id_, type_ in taller.items()}
        renamed[graph.get("id", "")] = told
    for graph in graphs(workflow):
        for node in graph["nodes"]:
            for shown in node["properties"].get("proxyWidgets", ()):
                shown[1] = renamed.get(node["type"], {}).get(str(shown[0]), {}).get(shown[1], shown[1])
    return workflow


def load_ours(workflow: Json) -> None:
    """In place: ComfyUI's picture is not everywhere, ours comes along."""
    for node in nodes(workflow):
        if node["type"] == "LoadImage":
            node["widgets_values"][0] = PICTURE


def graphs(workflow: Json) -> Iterator[Json]:
    """The workflow itself, and each subgraph that it defines."""
    yield workflow
    yield from workflow.get("definitions", {}).get("subgraphs", ())


def nodes(workflow: Json) -> Iterator[Json]:
    """Of the workflow and of its subgraphs."""
    for graph in graphs(workflow):
        yield from graph["nodes"]


def _names(swap: Swap) -> dict[str, str]:
    return {stocks: ours for stocks, ours in swap.widgets.items() if ours is not None}


def _swap(graph: Json, node: Json, swap: Swap) -> None:
    """In place."""
    values, names = swap.values(node), _names(swap)
    inputs = []
    for one in node["inputs"]:
        name = names.get(one["name"])
        if name is not None:
            inputs.append({"name": name, "type": one["type"], "widget": {"name": name}, "link": one["link"]})
        elif one["link"] is not None:
            raise NotSwappable(f"{node['type']}, node {node['id']}: {one['name']} is fed")
    if [one["type"] for one in node["outputs"]] != [kind for _, kind in signature(swap.ours).outputs]:
        raise NotSwappable(f"{node['type']}, node {node['id']}: has other outputs")
    _move_ends(graph, node["id"], inputs)
    below = node["pos"][1] + node["size"][1]
    rows = max(len(inputs), len(node["outputs"]))
    high = max(node["size"][1], SOCKET * rows + ELEMENT * len(values) + MARGIN + BADGE)
    meter = METER if "vram_budget" in signature(swap.ours).widgets else 0
    make_room(graph, node, below, high - node["size"][1] + meter)
    models = {model["name"]: model for model in node["properties"].get("models", ())}  # some name a file twice
    node.update(
        type=swap.ours,
        size=[node["size"][0], high],
        inputs=inputs,
        properties={"Node name for S&R": swap.ours, "models": list(models.values())},
        widgets_values=values,
    )


def _move_ends(graph: Json, node: int, inputs: list[Json]) -> None:
    """The links to this node end at the places of its new inputs."""
    places = {one["link"]: place for place, one in enumerate(inputs)}
    for link in graph["links"]:
        if isinstance(link, dict):
            if link["target_id"] == node:
                link["target_slot"] = places[link["id"]]
        elif link[3] == node:
            link[4] = places[link[0]]


def make_room(graph: Json, above: Json, line: float, more: float) -> None:
    """All that begins below the line moves down by so much, and groups that reach across it grow; what is beside stays beside."""
    for node in graph["nodes"]:
        if node is not above and node["pos"][1] >= line:
            node["pos"] = [node["pos"][0], node["pos"][1] + more]
    for group in graph.get("groups", ()):
        x, y, width, height = group["bounding"]
        if y >= line:
            group["bounding"] = [x, y + more, width, height]
        elif y + height >= line:
            group["bounding"] = [x, y, width, height + more]
