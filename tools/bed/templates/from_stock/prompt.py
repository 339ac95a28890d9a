"""A workflow file with subgraphs as the prompt that the front end queues: nodes inside have their hosts' ids before theirs.

What a node's widgets are called, a server says (`/object_info`). Read is what ComfyUI's templates have: no node in them is muted
or bypassed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .swap import Json, graphs

NOTES = ("MarkdownNote", "Note")
REROUTE = "Reroute"
INSIDE = -10  # the id of a subgraph's inputs as a node within it
PLAIN = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
CHOICE = "COMFY_DYNAMICCOMBO_V3"  # a list, each entry of which has inputs of its own
SEEDS = ("seed", "noise_seed")  # the front end puts a widget of its own behind them


class NotReadable(ValueError):
    """A workflow has what this does not read."""


@dataclass(frozen=True)
class Value:
    """What a widget has, as opposed to a link."""

    value: Any


@dataclass(frozen=True)
class Scope:
    """A graph where it stands: the workflow, or a subgraph in the place of its host."""

    graph: Json
    defined: Mapping[str, Json]
    prefix: str = ""
    outer: Scope | None = None
    host: Json | None = None

    @cached_property
    def nodes(self) -> dict[int, Json]:
        return {node["id"]: node for node in self.graph["nodes"]}

    @cached_property
    def origins(self) -> dict[int, tuple[int, int]]:
        """By link the node and the output that it comes from."""
        return {
            link["id"] if isinstance(link, dict) else link[0]: (link["origin_id"], link["origin_slot"])
            if isinstance(link, dict)
            else (link[1], link[2])
            for link in self.graph["links"]
        }

    def inside(self, host: Json) -> Scope:
        return Scope(self.defined[host["type"]], self.defined, f"{self.prefix}{host['id']}:", self, host)

    def source(self, link: int) -> list[Any] | Value | None:
        """Where it comes from: [id, output] of a node, what the host's widget has, or None: neither."""
        node, slot = self.origins[link]
        if node == INSIDE:
            return self._from_host(slot)
        origin = self.nodes[node]
        if origin["type"] == REROUTE:
            return self.source(origin["inputs"][0]["link"])
        if origin["type"] in self.defined:
            inner = self.inside(origin)
            return inner.source(inner.graph["outputs"][slot]["linkIds"][0])
        return [f"{self.prefix}{node}", slot]

    def _from_host(self, slot: int) -> list[Any] | Value | None:
        assert self.outer is not None and self.host is not None
        name = self.graph["inputs"][slot]["name"]
        link = next((one["link"] for one in self.host["inputs"] if one["name"] == name), None)
        if link is not None:
            return self.outer.source(link)
        shown = [self.graph["inputs"].index(one) for one in self.graph["inputs"] if self._is_widget(one)]
        values = self.host.get("widgets_values") or []
        if slot not in shown or not values:  # of older ones the widgets inside keep the values
            return None
        return Value(values[shown.index(slot)])

    def _is_widget(self, entry: Json) -> bool:
        """Whether an input of the subgraph leads to a widget."""
        links = set(entry["linkIds"])
        return any(one["link"] in links and "widget" in one for node in self.graph["nodes"] for one in node["inputs"])


def prompt(workflow: Json, info: Mapping[str, Json]) -> dict[str, Json]:
    """The prompt. Raises NotReadable."""
    _, *inner = graphs(workflow)
    defined = {graph["id"]: graph for graph in inner}
    return dict(_sent(Scope(workflow, defined), info))


def _sent(scope: Scope, info: Mapping[str, Json]) -> Iterator[tuple[str, Json]]:
    for node in scope.graph["nodes"]:
        if node.get("mode"):
            raise NotReadable(f"node {node['id']} is muted or bypassed")
        if node["type"] in scope.defined:
            yield from _sent(scope.inside(node), info)
        elif node["type"] not in (*NOTES, REROUTE):
            yield f"{scope.prefix}{node['id']}", _node(scope, node, info)


def _node(scope: Scope, node: Json, info: Mapping[str, Json]) -> Json:
    if node["type"] not in info:
        raise NotReadable(f"no node of type {node['type']}")
    stored = iter(node.get("widgets_values") or [])
    told = info[node["type"]]["input"]
    inputs = dict(_widgets({**told.get("required", {}), **told.get("optional", {})}, stored, ""))
    for one in node["inputs"]:
        source = None if one.get("link") is None else scope.source(one["link"])
        if source is not None:
            inputs[one["name"]] = source.value if isinstance(source, Value) else source
    return {"class_type": node["type"], "inputs": inputs}


def _widgets(told: Mapping[str, Any], stored: Iterator[Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Names and values of a node's widgets; `stored` is read in their order."""
    for name, (typed, *rest) in told.items():
        options = rest[0] if rest else {}
        kind = options.get("widgetType", "COMBO" if isinstance(typed, list) else typed)
        if kind not in (*PLAIN, CHOICE) or options.get("forceInput"):
            continue
        value = next(stored, options.get("default"))
        yield f"{prefix}{name}", value
        if kind == CHOICE:
            chosen = next(one["inputs"] for one in options["options"] if one["key"] == value)
            inner = {**chosen.get("required", {}), **chosen.get("optional", {})}
            yield from _widgets(inner, stored, f"{prefix}{name}.")
        elif options.get("image_upload") or (kind == "INT" and _is_seed(f"{prefix}{name}", options)):
            next(stored, None)


def _is_seed(name: str, options: Mapping[str, Any]) -> bool:
    return bool(options.get("control_after_generate", name in SEEDS))
