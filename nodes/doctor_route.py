"""The doctor for the page's menu: an address of the server that examines this machine without a graph."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from .doctor import examined
from .front_end import is_busy, running_server

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)

PATH = "/fusestream/doctor"
BUSY = "\nRates were not measured: ComfyUI is at work, and both would be slower for it. Ask again when it is idle.\n"

_one_at_a_time = asyncio.Lock()


def attach() -> None:
    """Let the server answer at the address. Called once, before the server starts to listen."""
    server = running_server()
    if server is not None:
        server.routes.get(PATH)(answer)


async def answer(_request: web.Request) -> web.Response:
    """The report as text, or why there is none. The server goes on meanwhile: examining takes seconds."""
    from aiohttp import web  # noqa: PLC0415 - only a server has it

    try:
        async with _one_at_a_time:
            text = await asyncio.get_running_loop().run_in_executor(None, report)
    except Exception as error:
        log.exception("the doctor stopped")
        text = f"The doctor stopped: {type(error).__name__}: {error}. The place is in ComfyUI's log; please report it."
        return web.Response(text=text, status=500)
    return web.Response(text=text)


def report() -> str:
    """For whoever asks: what the node with the same name says, nothing else. Without rates while a graph runs."""
    busy = is_busy()
    return examined(measure=not busy) + (BUSY if busy else "")
