"""The way from a node to the page that shows it. A graph may also be run without a server."""

from __future__ import annotations

from typing import Any


def running_server() -> Any:
    """ComfyUI's server, or None."""
    from server import PromptServer  # noqa: PLC0415 - not while nodes are being listed

    return getattr(PromptServer, "instance", None)
