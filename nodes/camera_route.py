"""The address at which a page sends a camera's frames, over a WebSocket: each message a JPEG, or a word: `stop`, or
`refused` and why.

It takes them from pages of this very server alone, from the one page that a running node has given a word to, and while it runs.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from . import between_prompts, camera
from .front_end import running_server

if TYPE_CHECKING:
    from aiohttp import web

PATH = "/fusestream/live/camera"
STOP, REFUSED = "stop", "refused "


def attach() -> None:
    """Let the server answer at the address. Called once, before it starts to listen."""
    server = running_server()
    if server is not None:
        server.routes.get(PATH)(take)
        between_prompts.always(camera.close_all)


async def take(request: web.Request) -> web.StreamResponse:
    """word: what the node has told the page. 403: a page of another server. 404: no node waits with this word. 409: a page sends
    already."""
    from aiohttp import WSMsgType, web  # noqa: PLC0415 - only a server has it

    if not is_own_page(request.headers.get("Origin"), request.headers.get("Host")):
        return web.Response(status=403)
    wanted = camera.of(request.query.get("word", ""))
    if wanted is None:
        return web.Response(status=404)
    if wanted.hang_up is not None:
        return web.Response(status=409)
    socket = web.WebSocketResponse(max_msg_size=camera.MOST_BYTES, compress=False)
    loop = asyncio.get_running_loop()

    def hang_up() -> None:
        asyncio.run_coroutine_threadsafe(socket.close(), loop)

    wanted.hang_up = hang_up
    try:
        await socket.prepare(request)
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                wanted.put(message.data)
            elif message.type is WSMsgType.TEXT and message.data == STOP:
                wanted.stop()
            elif message.type is WSMsgType.TEXT and message.data.startswith(REFUSED):
                wanted.refuse(message.data.removeprefix(REFUSED))
    finally:
        if wanted.hang_up is hang_up:
            wanted.hang_up = None
    return socket


def is_own_page(origin: str | None, host: str | None) -> bool:
    """Whether a browser says that the page is of this server. Pages of others cannot say so."""
    if not origin or not host:
        return False
    return urlsplit(origin).netloc.lower() == host.lower()
