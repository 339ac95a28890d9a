"""The graph that is being queued, for nodes whose inputs are checked.

ComfyUI shows a node only its own inputs. The server passes a prompt to handlers before it checks
the nodes, both in one task, so the prompt that is noted here is the one being checked. Without a
server there is none.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from typing import Any

from ..page.front_end import running_server
from .links import Graph
from .prompt import Kind

STOCK = ("nodes", "comfy_extras.", "comfy_api_nodes.")  # modules of ComfyUI's own nodes

_queued: ContextVar[Mapping[str, Any] | None] = ContextVar("queued", default=None)


def attach() -> None:
    """Let the server show us queued prompts. Called once."""
    server = running_server()
    if server is not None:
        server.add_on_prompt_handler(note)


def note(body: dict[str, Any]) -> dict[str, Any]:
    """Note what the server was sent, and return it unchanged."""
    _queued.set(body)
    return body


def value(node: str | None, name: str) -> Any:
    """The value that this input of a node is queued with: a widget's, a link, or None if unknown.

    For inputs that are not among the arguments of the node's check, because ComfyUI shows a refusal
    at each argument.
    """
    try:
        return (_queued.get() or {})["prompt"][node]["inputs"].get(name)
    except (KeyError, TypeError, AttributeError):
        return None


def graph(node: str, inputs: Mapping[str, Any]) -> Graph | None:
    """The graph that is being queued, if this node has these inputs in it."""
    body = _queued.get() or {}
    prompt: Any = body.get("prompt")
    ends = body.get("partial_execution_targets")
    try:
        if any(prompt[node]["inputs"].get(name) != value for name, value in inputs.items()):
            return None
        return Graph(prompt, kind_of, ends if isinstance(ends, Collection) else None)
    # The server reports a body of another shape itself.
    except (KeyError, TypeError, AttributeError):
        return None


def kind_of(class_type: str) -> Kind | None:
    """The description of a class of nodes, by its name."""
    found = importlib.import_module("nodes").NODE_CLASS_MAPPINGS.get(class_type)
    if found is None:
        return None
    home = getattr(found, "RELATIVE_PYTHON_MODULE", None) or "nodes"
    outputs = tuple(str(type) for type in found.RETURN_TYPES or ())
    return Kind(outputs, bool(getattr(found, "OUTPUT_NODE", False)), home.startswith(STOCK), found)
