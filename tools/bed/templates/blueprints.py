"""Blueprints: one node each for a whole task, as ComfyUI's own, made of the example graphs.

A blueprint is a workflow of one node that stands for a subgraph. Its inputs are what somebody changes from video to video, then the
files; pictures to begin with come from outside, and the frames leave as a VIDEO.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .examples import wan
from .graph import NAMESPACE, Graph
from .signatures import signature

INPUT, OUTPUT = -10, -20  # ids of a subgraph's own ends
LEFT_OUT = ("MarkdownNote", "SaveVideo", "LoadImage")
SAMPLERS = {"KSampler": "seed", "KSamplerAdvanced": "noise_seed"}
FILES = {
    "FuseStreamDiffusionModelLoader": "model_name",
    "LoraLoaderModelOnly": "lora_name",
    "FuseStreamTextEncoderLoader": "text_encoder_name",
    "FuseStreamVAELoader": "vae_name",
    "CLIPVisionLoader": "clip_name",
}
SIZES = ("width", "height", "length")
CATEGORY = "Video generation and editing"


@dataclass(frozen=True)
class Blueprint:
    """A task by the name of its node, and the graph that does it."""

    name: str
    category: str
    description: str
    build: Callable[[Graph], None]

    def graph(self) -> Graph:
        graph = Graph(self.name)
        self.build(graph)
        return graph


@dataclass(frozen=True)
class Exposed:
    """An input of the subgraph: of these nodes' inputs of this name, by number. widget: whether it is one."""

    name: str
    type: str
    label: str
    at: tuple[tuple[int, str], ...]
    widget: bool = True
    value: Any = None


def blueprint(task: Blueprint) -> dict[str, Any]:
    """The file."""
    ui = task.graph().ui()
    nodes = {node["id"]: node for node in ui["nodes"] if node["type"] not in LEFT_OUT}
    gone = {node["id"] for node in ui["nodes"]} - nodes.keys()
    links = [_link(*link) for link in ui["links"] if link[1] not in gone and link[3] not in gone]
    exposed = list(_exposed(ui, nodes))
    seeds = [(node["id"], SAMPLERS[node["type"]]) for node in nodes.values() if node["type"] in SAMPLERS][:1]
    last = max(link[0] for link in ui["links"])
    inputs = []
    for place, one in enumerate(exposed):
        ids = []
        for node, socket in one.at:
            last += 1
            ids.append(last)
            links.append(_link(last, INPUT, place, node, _socket(nodes[node], socket, one), one.type))
            nodes[node]["inputs"][links[-1]["target_slot"]]["link"] = last
        inputs.append({**_named(task, one), "linkIds": ids, "pos": [-140, 100 + 20 * place]})
    (video,) = (node for node in nodes.values() if node["type"] == "CreateVideo")
    last += 1
    links.append(_link(last, video["id"], 0, OUTPUT, 0, "VIDEO"))
    _tidy(nodes, links)
    own = str(uuid.uuid5(NAMESPACE, f"{task.name}: subgraph"))
    right = max(node["pos"][0] + node["size"][0] for node in nodes.values())
    subgraph = {
        "id": own,
        "version": 1,
        "state": {"lastGroupId": 0, "lastNodeId": max(nodes), "lastLinkId": last, "lastRerouteId": 0},
        "revision": 0,
        "config": {},
        "name": task.name,
        "inputNode": {"id": INPUT, "bounding": [-270, 80, 150, 40 + 20 * len(inputs)]},
        "outputNode": {"id": OUTPUT, "bounding": [right + 60, 80, 120, 60]},
        "inputs": inputs,
        "outputs": [
            {
                "id": str(uuid.uuid5(NAMESPACE, f"{task.name}: VIDEO")),
                "name": "VIDEO",
                "type": "VIDEO",
                "linkIds": [last],
                "pos": [right + 80, 100],
            }
        ],
        "widgets": [],
        "nodes": list(nodes.values()),
        "groups": [],
        "links": links,
        "extra": {"workflowRendererVersion": "LG"},
        "category": task.category,
        "description": task.description,
    }
    widgets = [one for one in exposed if one.widget]
    proxies = [["-1", one.name] for one in widgets]
    for node, widget in seeds:  # at the end, where they need no values here: front end 1.58 would take null for one
        proxies += [[str(node), widget], [str(node), "control_after_generate"]]
    host = {
        "id": max(nodes) + 1,
        "type": own,
        "pos": [0, 0],
        "size": [420, 80 + 26 * len(proxies) + 60],
        "flags": {},
        "order": 0,
        "mode": 0,
        "inputs": [_host_input(one) for one in exposed],
        "outputs": [{"name": "VIDEO", "type": "VIDEO", "links": None}],
        "properties": {"proxyWidgets": proxies},
        "widgets_values": [one.value for one in widgets],
    }
    return {
        "id": str(uuid.uuid5(NAMESPACE, f"{task.name}: blueprint")),
        "revision": 0,
        "last_node_id": host["id"],
        "last_link_id": 0,
        "nodes": [host],
        "links": [],
        "groups": [],
        "definitions": {"subgraphs": [subgraph]},
        "config": {},
        "extra": {},
        "version": 0.4,
    }


def _exposed(ui: dict[str, Any], nodes: dict[int, Any]) -> Iterator[Exposed]:
    """In the order in which they stand on the node."""
    for picture in (node for node in ui["nodes"] if node["type"] == "LoadImage"):
        taken = [link for link in ui["links"] if link[1] == picture["id"]]
        at = tuple((link[3], nodes[link[3]]["inputs"][link[4]]["name"]) for link in taken)
        name = picture["title"].lower()
        yield Exposed(name.replace(" ", "_"), "IMAGE", name, at, widget=False)
    guided = any(_value(node, "cfg") not in (None, 1.0) for node in nodes.values())
    for title, name, label in (("What to show", "text", "prompt"), ("What to avoid", "negative", "what to avoid")):
        (prompt,) = (node for node in nodes.values() if node.get("title") == title)
        if name == "text" or guided:
            yield Exposed(name, "STRING", label, ((prompt["id"], "text"),), value=_value(prompt, "text"))
    (size,) = (node for node in nodes.values() if node.get("title") == "Size and length")
    for name in SIZES:
        yield Exposed(name, "INT", name, ((size["id"], name),), value=_value(size, name))
    seen: dict[str, int] = {}
    for node in nodes.values():
        widget = FILES.get(node["type"])
        if widget is not None:
            seen[widget] = seen.get(widget, 0) + 1
            name = widget if seen[widget] == 1 else f"{widget}_{seen[widget]}"
            label = f"{widget}: {node['title'].split(':')[-1].strip()}" if "title" in node else name
            yield Exposed(name, "COMBO", label, ((node["id"], widget),), value=_value(node, widget))


def _value(node: dict[str, Any], widget: str) -> Any:
    names = signature(node["type"]).widgets
    return node["widgets_values"][names.index(widget)] if widget in names else None


def _socket(node: dict[str, Any], name: str, one: Exposed) -> int:
    """The place of this input, which a widget gets only when something feeds it."""
    names = [each["name"] for each in node["inputs"]]
    if name not in names:
        node["inputs"].append({"name": name, "type": one.type, "widget": {"name": name}, "link": None})
        names.append(name)
    return names.index(name)


def _link(id_: int, source: int, slot: int, target: int, socket: int, type_: str) -> dict[str, Any]:
    return {
        "id": id_,
        "origin_id": source,
        "origin_slot": slot,
        "target_id": target,
        "target_slot": socket,
        "type": type_,
    }


def _named(task: Blueprint, one: Exposed) -> dict[str, Any]:
    id_ = str(uuid.uuid5(NAMESPACE, f"{task.name}: {one.name}"))
    return {"id": id_, "name": one.name, "type": one.type, "label": one.label}


def _host_input(one: Exposed) -> dict[str, Any]:
    found: dict[str, Any] = {"label": one.label, "name": one.name, "type": one.type, "link": None}
    return {**found, "widget": {"name": one.name}} if one.widget else found


def _tidy(nodes: dict[int, Any], links: list[dict[str, Any]]) -> None:
    """Both ends of each node's links, without those that are gone."""
    there = {link["id"] for link in links}
    for node in nodes.values():
        for each in node["inputs"]:
            each["link"] = each["link"] if each["link"] in there else None
        for slot, each in enumerate(node["outputs"]):
            each["links"] = [
                link["id"] for link in links if (link["origin_id"], link["origin_slot"]) == (node["id"], slot)
            ]


BLUEPRINTS = (
    Blueprint(
        "FuseStream Text to Video (Wan 2.1 1.3B)",
        f"{CATEGORY}/Text to video",
        "Text to video with the small Wan 2.1, whose weights stream.",
        wan.text_to_video_small,
    ),
    Blueprint(
        "FuseStream Text to Video in 4 Steps (Wan 2.1 14B)",
        f"{CATEGORY}/Text to video",
        "Text to video with Wan 2.1 14B and a LoRA for 4 steps; weights stream.",
        wan.four_steps,
    ),
    Blueprint(
        "FuseStream Image to Video (Wan 2.1 14B)",
        f"{CATEGORY}/Image to video",
        "A picture becomes the first frame of a video, with Wan 2.1 14B, whose weights stream.",
        wan.image_to_video,
    ),
    Blueprint(
        "FuseStream Image to Video in 4 Steps (Wan 2.2 14B)",
        f"{CATEGORY}/Image to video",
        "A picture becomes the first frame of a video, with the pair of Wan 2.2 and a LoRA for 4 steps for each; weights stream.",
        wan.image_to_video_pair,
    ),
)
