"""The graph that is being queued, for nodes that are asked about their inputs.

ComfyUI shows a node no more than these. The server lets everybody see a prompt before it asks the
nodes about it, both in one task; so the prompt that is noted here is the one that a node is asked
for. Without a server nothing is known.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from typing import Any

from ..page.front_end import running_server
from .links import Graph, Kind

STOCK = ("nodes", "comfy_extras.", "comfy_api_nodes.")  # modules of ComfyUI's own nodes

_queued: ContextVar[Mapping[str, Any] | None] = ContextVar("queued", default=None)


def attach() -> None:
    """Let the server show us what is queued. Called once."""
    server = running_server()
    if server is not None:
        server.add_on_prompt_handler(note)


def note(body: dict[str, Any]) -> dict[str, Any]:
    """body: what the server was sent. It goes on as it came."""
    _queued.set(body)
    return body


def value(node: str | None, name: str) -> Any:
    """The value that this input of a node is queued with: a widget's, a link, or None if unknown.

    For an input beside those that a node is asked about by name, because ComfyUI shows a refusal at
    each of these.
    """
    try:
        return (_queued.get() or {})["prompt"][node]["inputs"].get(name)
    except (KeyError, TypeError, AttributeError):
        return None


def graph(node: str, inputs: Mapping[str, Any]) -> Graph | None:
    """The one that is being queued, if in it this node has these inputs."""
    body = _queued.get() or {}
    prompt: Any = body.get("prompt")
    ends = body.get("partial_execution_targets")
    try:
        if any(prompt[node]["inputs"].get(name) != value for name, value in inputs.items()):
            return None
        return Graph(prompt, kind_of, ends if isinstance(ends, Collection) else None)
    except (KeyError, TypeError, AttributeError):  # a body of another shape; the server says so itself
        return None


def kind_of(class_type: str) -> Kind | None:
    """What a class of nodes gives, by its name."""
    found = importlib.import_module("nodes").NODE_CLASS_MAPPINGS.get(class_type)
    if found is None:
        return None
    home = getattr(found, "RELATIVE_PYTHON_MODULE", None) or "nodes"
    outputs = tuple(str(type) for type in found.RETURN_TYPES or ())
    return Kind(outputs, bool(getattr(found, "OUTPUT_NODE", False)), home.startswith(STOCK))
