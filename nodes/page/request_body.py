"""The JSON body of a request, from whoever can reach the server: read in bounded time and memory, or
refused with one sentence.

It is read here and not by aiohttp's `request.json()`, which trusts the charset that the client
names, takes as much as ComfyUI takes of a picture, and recurses as deep as the text does.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ...memory.strict_json import parse
from .front_end import answered

if TYPE_CHECKING:
    from aiohttp import web

MOST_BYTES = 4 << 20
CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii")  # JSON is UTF-8


class Refused(Exception):
    """A request that is not done: why, in a sentence."""

    def __init__(self, sentence: str, status: int = 400) -> None:
        super().__init__(sentence)
        self.sentence, self.status = sentence, status

    def answer(self) -> web.Response:
        return answered({"error": self.sentence}, self.status)


async def body_of(request: web.Request, asks: str, most: int = MOST_BYTES) -> dict[str, Any]:
    """The object that a request's body is. asks: what the address takes, for the sentence. most:
    bytes, as they are after a Content-Encoding. Raises `Refused`."""
    raw = await _read(request, asks, most)
    try:
        # In another thread: megabytes take longer than other requests should wait.
        return await asyncio.get_running_loop().run_in_executor(None, parse, raw)
    except ValueError as error:
        raise Refused(f"This asks for {asks}, as JSON. What came is none: {error}.") from error


async def _read(request: web.Request, asks: str, most: int) -> bytes:
    charset = _charset(request)
    if charset not in CHARSETS:
        raise Refused(f"This asks for {asks}, in UTF-8. What came is said to be in {charset[:40]!r}.")
    if (request.content_length or 0) > most:
        raise _too_large(most)
    found = bytearray()
    try:
        async for some in request.content.iter_any():
            found += some
            if len(found) > most:
                raise _too_large(most)
    except Refused:
        raise
    except Exception as error:  # the client left in the middle, or aiohttp cannot decode what it sent
        raise Refused(f"This asks for {asks}. Its body could not be read: {type(error).__name__}.") from error
    return bytes(found)


def _charset(request: web.Request) -> str:
    """In small letters; aiohttp raises where it cannot read the header at all."""
    try:
        return (request.charset or CHARSETS[0]).lower()
    except ValueError:
        return "nothing that can be read"


def _too_large(most: int) -> Refused:
    return Refused(f"This takes {most >> 20} MiB at most." if most >> 20 else f"This takes {most} bytes at most.", 413)
