"""The way from a node to the page that shows it. A graph may also be run without a server.

The page shows a warning of `fusion` as a toast, because few users read the log, and lines such as a
text's rate on the node that runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiohttp import web

WORDS, NOTICE = "fusestream.words", "fusestream.notice"


def running_server() -> Any:
    """ComfyUI's server, or None."""
    from server import PromptServer  # noqa: PLC0415 - not while nodes are being listed

    return getattr(PromptServer, "instance", None)


def is_busy() -> bool:
    """Whether prompts run or wait."""
    server = running_server()
    return server is not None and server.prompt_queue.get_tasks_remaining() > 0


def answered(told: dict[str, Any], status: int = 200) -> web.Response:
    """An answer that must not be cached."""
    from aiohttp import web  # noqa: PLC0415 - only a server has it

    return web.json_response(told, status=status, headers={"Cache-Control": "no-store"})


def tell(event: str, told: dict[str, Any]) -> None:
    """Send an event to the page that queued the prompt, if there is one."""
    server = running_server()
    if server is not None and server.client_id is not None:
        server.send_sync(event, {**told, "prompt_id": server.last_prompt_id}, server.client_id)


def write_on(node: str | None, words: str) -> None:
    """Show words as ComfyUI's progress text on a node of the page that queued; `last_words.js`
    keeps them, and is told first."""
    server = running_server()
    if server is not None and server.client_id is not None and node is not None:
        server.send_sync(WORDS, {"node": node, "words": words}, server.client_id)
        server.send_progress_text(words, node, server.client_id)


def running_node() -> str | None:
    """The id of the node that runs now, as ComfyUI's own bar finds it."""
    from comfy_execution.utils import get_executing_context  # noqa: PLC0415

    running = get_executing_context()
    return getattr(running_server(), "last_node_id", None) if running is None else running.node_id


def hear_notices() -> None:
    """Let `fusion` tell the page. Called by nodes that run; repeated calls do no harm."""
    from ...fusion.base import notices  # noqa: PLC0415 - the server starts without it

    notices.listen(_show, _write_on_the_running_node)


def _show(sentence: str) -> None:
    """Send a notice about the node that runs now."""
    tell(NOTICE, {"node": running_node(), "sentence": sentence})


def _write_on_the_running_node(words: str) -> None:
    write_on(running_node(), words)
