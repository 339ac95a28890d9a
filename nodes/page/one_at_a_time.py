"""Work in another thread, one piece at a time, for clients that are still there.

ComfyUI's server goes on with a request when its client has left. A client that leaves while it waits
for its turn gets none here, and work that can be stopped is told to stop.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from aiohttp import web

POLL = 0.1  # seconds between two looks whether the client is there

Found = TypeVar("Found")


class NoTurn(Exception):
    """Other work takes longer than the client waits, or the client has left."""


class OneAtATime(Generic[Found]):
    """The work of one kind. Used from one event loop."""

    def __init__(self) -> None:
        self._running: asyncio.Future[Found] | None = None

    async def do(
        self, request: web.Request, work: Callable[[Callable[[], bool]], Found], most: float = math.inf
    ) -> Found:
        """What `work` returns. It is given a function that says whether it should stop. most:
        seconds to wait for other work. Raises `NoTurn`, and what `work` raises."""
        loop = asyncio.get_running_loop()
        until = loop.time() + most
        while self._running is not None and not self._running.done():
            left = until - loop.time()
            if left <= 0 or has_left(request):
                raise NoTurn
            await asyncio.wait({self._running}, timeout=min(POLL, left))
        if has_left(request):
            raise NoTurn
        over = threading.Event()
        running = self._running = loop.run_in_executor(None, work, over.is_set)
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=POLL)
                if has_left(request):
                    over.set()
            return running.result()
        finally:
            over.set()


def has_left(request: web.Request) -> bool:
    """Whether nobody waits for the answer any more."""
    return request.transport is None or request.transport.is_closing()
