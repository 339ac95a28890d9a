"""A graph in the making: nodes in columns, from which come the file a person opens and the prompt a machine queues."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from .files import File
from .signatures import Signature, signature

# LiteGraph's own measures: what a title bar, a socket and a widget take on a node.
TITLE, SOCKET, WIDGET, MARGIN = 30, 20, 24, 20
GAP = 24
# Where the front end draws nodes as elements, a widget is taller, and a node of ours has the pack's name below.
ELEMENT, BADGE, LEAST_GAP = 28, 38, 16
ERROR_BAR = 32  # what the front end draws below an element whose file is missing, and room
NAMESPACE = uuid.UUID("5d1b6f3e-6f0a-4f6e-9a5b-0f5e57ea0001")
NAMELESS = {"text": "STRING", "value": "INT"}  # names of widgets that say nothing without their node
SAVING = ("SaveVideo", "SaveImage")  # whose results app mode shows
# Of each a ground on which the names of sockets have a contrast of 4.5 in both themes; on the front end's own it is 3 to 1.
GREEN = {"color": "#232", "bgcolor": "#233b23"}
RED = {"color": "#4a2d2d", "bgcolor": "#4a2d2d"}
OLIVE = {"color": "#2b2b0e", "bgcolor": "#363612"}  # links can be read on it in both themes


@dataclass(frozen=True)
class Output:
    """One output of a node, to be connected to an input. shown: by a widget that it feeds, and nothing reads that. kind: its
    type."""

    node: int
    slot: int
    shown: Any = 0
    kind: str = "INT"


@dataclass
class Column:
    """Nodes below each other. grows: by how much its last node becomes higher as it runs."""

    x: int
    width: int
    y: int = 80
    grows: int = 0


@dataclass
class Node:
    """A node as it was asked for."""

    id: int
    type: str
    box: tuple[int, int, int, int]
    values: dict[str, Any]
    title: str | None
    colours: dict[str, str]
    files: tuple[File, ...]
    collapsed: bool = False

    @property
    def signature(self) -> Signature:
        return signature(self.type)

    @property
    def links(self) -> dict[str, Output]:
        """The connected inputs in the order of the sockets; a widget that is fed comes last, as the front end has it."""
        signed = self.signature
        names = [*signed.sockets, *(name for name in signed.widgets if isinstance(self.values.get(name), Output))]
        return {name: self.values[name] for name in names if name in self.values}

    def __getitem__(self, slot: int) -> Output:
        kind = self.signature.outputs[slot][1]
        return Output(self.id, slot, "" if kind == "STRING" else self.values.get("value", 0), kind)


@dataclass
class Graph:
    """`add` nodes, then take `.ui()` and `.api()`. Ids count from 1, so the same calls make the same files.

    asks  the widgets that the front end's app mode shows, each by its node's title and its name; none: it has no app mode
    """

    name: str
    nodes: list[Node] = field(default_factory=list)
    asks: tuple[tuple[str, str], ...] = ()

    def add(
        self,
        column: Column,
        type_: str,
        title: str | None = None,
        tall: int = 0,
        colours: dict[str, str] | None = None,
        files: tuple[File, ...] = (),
        collapsed: bool = False,
        **values: Any,
    ) -> Node:
        """Put a node at the end of `column`. `values` are its widgets' values and the outputs on its sockets.

        `tall` is its height where it needs more than its rows. A widget that is not given takes its default, if it has a
        published one. `files` are what its widgets name. Of one that is collapsed only the title is drawn.
        """
        signed = signature(type_)
        values = {**signed.defaults, **values}
        unknown = set(values) - set(signed.sockets) - set(signed.widgets)
        missing = [name for name in signed.widgets if name not in values]
        missing += [name for name, kind in signed.sockets.items() if not kind.startswith("?") and name not in values]
        if unknown or missing:
            raise ValueError(f"{type_} in {self.name}: unknown {sorted(unknown)}, missing {missing}")
        fed = sum(isinstance(values[name], Output) for name in signed.widgets)
        rows = max(len(signed.sockets) + fed, len(signed.outputs))
        tall = tall or SOCKET * rows + WIDGET * len(signed.widgets) + MARGIN
        box = (column.x, column.y, column.width, tall)
        is_ours = type_.startswith("FuseStream")
        as_elements = SOCKET * rows + ELEMENT * len(signed.widgets) + (BADGE if is_ours else 0)
        gap = ERROR_BAR if files and not is_ours else GAP
        column.grows = 0
        column.y += TITLE + (GAP if collapsed else max(tall + gap, as_elements + LEAST_GAP))
        node = Node(len(self.nodes) + 1, type_, box, values, title, colours or {}, files, collapsed)
        self.nodes.append(node)
        return node

    def files(self) -> list[File]:
        """The weight files it needs, each once, in the order of the nodes."""
        return list(dict.fromkeys(file for node in self.nodes for file in node.files))

    def api(self) -> dict[str, Any]:
        """The prompt: what the front end would queue."""
        return {str(node.id): _prompt(node) for node in self.nodes if node.type != "MarkdownNote"}

    def ui(self) -> dict[str, Any]:
        """The workflow file."""
        links = self._links()
        return {
            "id": str(uuid.uuid5(NAMESPACE, self.name)),
            "revision": 0,
            "last_node_id": len(self.nodes),
            "last_link_id": len(links),
            "nodes": [self._labelled(_drawn(node, order, links)) for order, node in enumerate(self.nodes)],
            "links": links,
            "groups": [],
            "config": {},
            "extra": {"ds": {"scale": 0.7, "offset": [20, 20]}} | self._app(),
            "version": 0.4,
        }

    def _app(self) -> dict[str, Any]:
        """What app mode asks for and shows. The workflow opens as a graph all the same."""
        if not self.asks:
            return {}
        nodes = {node.title: node for node in self.nodes}
        unknown = [title for title, widget in self.asks if widget not in nodes[title].signature.widgets]
        if unknown:
            raise ValueError(f"app mode of {self.name}: no such widget on {unknown}")
        inputs = [[str(nodes[title].id), widget] for title, widget in self.asks]
        saved = [str(node.id) for node in self.nodes if node.type in SAVING]
        return {"linearData": {"inputs": inputs, "outputs": saved}, "linearMode": False}

    def _labelled(self, drawn: dict[str, Any]) -> dict[str, Any]:
        """With the node's title on a widget that app mode asks for, whose name alone would tell nothing there."""
        for title, widget in self.asks:
            if drawn.get("title") == title and widget in NAMELESS:
                label = {
                    "name": widget,
                    "type": NAMELESS[widget],
                    "label": title,
                    "widget": {"name": widget},
                    "link": None,
                }
                drawn["inputs"].append(label)
        return drawn

    def _links(self) -> list[list[Any]]:
        """[id, from node, from slot, to node, to slot, type] of every connection."""
        links: list[list[Any]] = []
        for node in self.nodes:
            sockets = _sockets(node)
            for name, source in node.links.items():
                kind = signature(self.nodes[source.node - 1].type).outputs[source.slot][1]
                links.append([len(links) + 1, source.node, source.slot, node.id, list(sockets).index(name), kind])
        return links


def _sockets(node: Node) -> dict[str, str]:
    """Name to type of the inputs that the file lists: all sockets, and the widgets that are fed."""
    fed = {name: source.kind for name, source in node.links.items() if name in node.signature.widgets}
    return node.signature.sockets | fed


def _prompt(node: Node) -> dict[str, Any]:
    signed = node.signature
    inputs = {name: node.values[name] for name in signed.widgets if name not in signed.hidden}
    inputs |= signed.sent
    inputs |= {name: [str(source.node), source.slot] for name, source in node.links.items()}
    out: dict[str, Any] = {"class_type": node.type, "inputs": inputs}
    if node.title is not None:
        out["_meta"] = {"title": node.title}
    return out


def _drawn(node: Node, order: int, links: list[list[Any]]) -> dict[str, Any]:
    x, y, width, height = node.box
    properties: dict[str, Any] = {"Node name for S&R": node.type}
    if node.files:  # with these the front end offers a download for what is not there
        properties["models"] = [{"name": f.name, "url": f.url, "directory": f.folder} for f in node.files]
    out: dict[str, Any] = {
        "id": node.id,
        "type": node.type,
        "pos": [x, y],
        "size": [width, height],
        "flags": {"collapsed": True} if node.collapsed else {},
        "order": order,
        "mode": 0,
        "inputs": [_input(node, slot, name, kind, links) for slot, (name, kind) in enumerate(_sockets(node).items())],
        "outputs": [
            {"name": name, "type": kind, "links": [link[0] for link in links if link[1:3] == [node.id, slot]]}
            for slot, (name, kind) in enumerate(node.signature.outputs)
        ],
        "properties": properties,
        "widgets_values": [
            value.shown if isinstance(value := node.values[name], Output) else value for name in node.signature.widgets
        ],
        **node.colours,
    }
    if node.title is not None:
        out["title"] = node.title
    return out


def _input(node: Node, slot: int, name: str, kind: str, links: list[list[Any]]) -> dict[str, Any]:
    link = next((link[0] for link in links if link[3:5] == [node.id, slot]), None)
    out: dict[str, Any] = {"name": name, "type": kind.lstrip("?"), "link": link}
    if kind.startswith("?"):
        out["shape"] = 7  # drawn hollow: it may stay open
    if name in node.signature.widgets:
        out["widget"] = {"name": name}
    return out
