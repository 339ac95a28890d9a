"""What takes time beside a node's own work, told to the page: a line of words and a bar below the node that runs.

Kernels are measured in the middle of a sampler's first step, and the sampler's own bar counts steps.
"""

from __future__ import annotations

import time

from .front_end import running_server

EVENT = "fusestream.activity"
EVERY = 0.1  # seconds between two messages

_last = 0.0


def attach() -> None:
    """Let `fusion` tell the page. Called by nodes that run, as often as they like."""
    from ..fusion.stream import progress  # noqa: PLC0415 - the server starts without it

    progress.show_with(show)


def show(words: str, done: int, of: int) -> None:
    """To the one who queued the prompt, about the node that runs now."""
    global _last  # noqa: PLW0603 - when the page was told last
    now = time.monotonic()
    server = running_server()
    if now - _last < EVERY or server is None or server.client_id is None:
        return
    _last = now
    from comfy_execution.utils import get_executing_context  # noqa: PLC0415 - as ComfyUI's own bar finds the node

    running = get_executing_context()
    node = server.last_node_id if running is None else running.node_id
    told = {"node": node, "words": words, "done": done, "of": of, "prompt_id": server.last_prompt_id}
    server.send_sync(EVENT, told, server.client_id)
