"""A workflow file with subgraphs as the prompt that the front end queues: nodes inside have their hosts' ids before theirs.

What a node's widgets are called, a server says (`/object_info`); of a type that it does not know only links are read. What is
muted or bypassed is left out as the front end does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .swap import Json, graphs

NOTES = ("MarkdownNote", "Note")
REROUTE, PRIMITIVE = "Reroute", "PrimitiveNode"  # of the front end alone: they hand on a link, and their first widget
COMBO = "CustomCombo"  # of options that the user wrote, behind which choice it is
NEVER, BYPASS = 2, 4  # modes of a node
INSIDE = -10  # the id of a subgraph's inputs as a node within it
PLAIN = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
CHOICE = "COMFY_DYNAMICCOMBO_V3"  # a list, each entry of which has inputs of its own
SEEDS = ("seed", "noise_seed")  # the front end puts a widget of its own behind them


@dataclass(frozen=True)
class Value:
    """What a widget has, as opposed to a link."""

    value: Any


@dataclass(frozen=True)
class Scope:
    """A graph where it stands: the workflow, or a subgraph in the place of its host."""

    graph: Json
    defined: Mapping[str, Json]
    info: Mapping[str, Json]
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
        return Scope(self.defined[host["type"]], self.defined, self.info, f"{self.prefix}{host['id']}:", self, host)

    def source(self, link: int) -> list[Any] | Value | None:
        """Where it comes from: [id, output] of a node, what the host's widget has, or None: neither."""
        node, slot = self.origins[link]
        if node == INSIDE:
            return self._from_host(slot)
        origin = self.nodes[node]
        if origin.get("mode") == NEVER:
            return None
        if origin.get("mode") == BYPASS:
            return self._bypassed(origin, slot)
        if origin["type"] == REROUTE:
            return self._came(origin["inputs"][0])
        if origin["type"] == PRIMITIVE:
            return Value(origin["widgets_values"][0])
        if origin["type"] in self.defined:
            inner = self.inside(origin)
            links = inner.graph["outputs"][slot]["linkIds"]
            return inner.source(links[0]) if links else None
        return [f"{self.prefix}{node}", slot]

    def _came(self, entry: Json) -> list[Any] | Value | None:
        return None if entry.get("link") is None else self.source(entry["link"])

    def _bypassed(self, node: Json, slot: int) -> list[Any] | Value | None:
        """What a bypassed node hands out: the input across from the output, else the first of its type."""
        type_, inputs = node["outputs"][slot]["type"], node["inputs"]
        fits = [one for one in inputs if one["type"] in (type_, "*") or type_ == "*"]
        across = [one for one in inputs[slot : slot + 1] if one in fits]
        return next((self._came(one) for one in (*across, *fits)), None)

    def _from_host(self, slot: int) -> list[Any] | Value | None:
        assert self.outer is not None and self.host is not None
        name = self.graph["inputs"][slot]["name"]
        link = next((one["link"] for one in self.host["inputs"] if one["name"] == name), None)
        if link is not None:
            return self.outer.source(link)
        shown = [self.graph["inputs"].index(one) for one in self.graph["inputs"] if self._is_widget(one)]
        values = self.host.get("widgets_values") or []
        if slot not in shown:
            return None
        if not values:  # of older ones the widgets inside keep the values
            return next(self._kept_inside(slot), None)
        return Value(values[shown.index(slot)])

    def _kept_inside(self, slot: int) -> Iterator[Value]:
        links = set(self.graph["inputs"][slot]["linkIds"])
        for node in self.graph["nodes"]:
            own = _own(node, self.info)
            for one in node["inputs"]:
                if one["link"] in links and one["name"] in own:
                    yield Value(own[one["name"]])

    def _is_widget(self, entry: Json) -> bool:
        """Whether an input of the subgraph leads to a widget."""
        links = set(entry["linkIds"])
        return any(one["link"] in links and "widget" in one for node in self.graph["nodes"] for one in node["inputs"])


def prompt(workflow: Json, info: Mapping[str, Json]) -> dict[str, Json]:
    """The prompt."""
    _, *inner = graphs(workflow)
    defined = {graph["id"]: graph for graph in inner}
    return dict(_sent(Scope(workflow, defined, info)))


def _sent(scope: Scope) -> Iterator[tuple[str, Json]]:
    for node in scope.graph["nodes"]:
        if node.get("mode") in (NEVER, BYPASS):
            continue
        if node["type"] in scope.defined:
            yield from _sent(scope.inside(node))
        elif node["type"] not in (*NOTES, REROUTE, PRIMITIVE):
            yield f"{scope.prefix}{node['id']}", _node(scope, node)


def _node(scope: Scope, node: Json) -> Json:
    inputs = _own(node, scope.info)
    for one in node["inputs"]:
        source = None if one.get("link") is None else scope.source(one["link"])
        if source is not None:
            inputs[one["name"]] = source.value if isinstance(source, Value) else source
    return {"class_type": node["type"], "inputs": inputs}


def _own(node: Json, info: Mapping[str, Json]) -> dict[str, Any]:
    """The values of a node's own widgets, by their names."""
    stored = iter(node.get("widgets_values") or [])
    told = info[node["type"]]["input"] if node["type"] in info else {}
    values = dict(_widgets({**told.get("required", {}), **told.get("optional", {})}, stored, ""))
    if node["type"] == COMBO:
        values["index"] = next(stored, 0)
    return values


def _widgets(told: Mapping[str, Any], stored: Iterator[Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Names and values of a node's widgets; `stored` is read in their order."""
    for name, (typed, *rest) in told.items():
        options = rest[0] if rest else {}
        kind = options.get("widgetType", "COMBO" if isinstance(typed, list) else typed)
        if kind not in (*PLAIN, CHOICE) or options.get("forceInput"):
            continue
        first = options["options"][0]["key"] if kind == CHOICE else None
        value = next(stored, options.get("default", first))
        yield f"{prefix}{name}", value
        if kind == CHOICE:
            chosen = next(one["inputs"] for one in options["options"] if one["key"] == value)
            inner = {**chosen.get("required", {}), **chosen.get("optional", {})}
            yield from _widgets(inner, stored, f"{prefix}{name}.")
        elif options.get("image_upload") or (kind == "INT" and _is_seed(f"{prefix}{name}", options)):
            next(stored, None)


def _is_seed(name: str, options: Mapping[str, Any]) -> bool:
    return bool(options.get("control_after_generate", name in SEEDS))
