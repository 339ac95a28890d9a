"""Frames that a page's camera sends while a node runs.

Few wait; the oldest are dropped when more come than are taken. The node asks its page for frames
with a word that only that page receives. With this word the page sends them over a WebSocket, each
message a JPEG, or a word: `stop`, or `refused` with a reason. The server takes them only from its
own pages, from the one that has the word, and while the node runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from .page import between_prompts
from .page.front_end import answered, running_server, tell

if TYPE_CHECKING:
    from aiohttp import web
    from torch import Tensor

EVENT = "fusestream.camera"
PATH = "/fusestream/live/camera"
STOP, REFUSED = "stop", "refused "
WAITING = 2  # frames
# Seconds without a frame; before the first one a user may have to allow it.
FIRST, LATER = 60.0, 5.0
ASK_EVERY = 1.0  # seconds until the page answers, because it may have been reloaded
POLL = 0.005
MOST_BYTES = 4 << 20  # of a picture as it is sent
MOST_PIXELS = 4096 * 4096
LONGEST_REASON = 300  # letters
SLACK = 0.8  # of the time between two frames: those that come sooner are dropped

_open: dict[str, Camera] = {}  # by the word that a page sends


class NoCamera(RuntimeError):
    """There is no camera, or it has sent no frame at all."""

    __module__ = "fusestream"


class Camera:
    """The camera of one run of a node.

    width, height: 0: the camera's own. fps: the most frames that are taken in a second.
    """

    def __init__(
        self, node: str | None, width: int, height: int, fps: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.word = secrets.token_urlsafe(16)
        self._asks = {"node": node, "width": width, "height": height, "fps": fps, "word": self.word}
        self._least = SLACK / fps
        self._clock = clock
        self._waiting: deque[bytes] = deque(maxlen=WAITING)
        self._came = threading.Condition()
        self._put_at = float("-inf")
        self._is_stopped = False
        self._why_not: str | None = None
        # Closes the page's connection, if there is one.
        self.hang_up: Callable[[], None] | None = None
        server = running_server()
        if server is None or server.client_id is None:
            raise NoCamera("The camera is a page's, and no page has queued this. Connect frames or video.")
        _open[self.word] = self

    def put(self, picture: bytes) -> None:
        """Take a picture, as JPEG. From any thread."""
        now = self._clock()
        with self._came:
            if now - self._put_at >= self._least:
                self._put_at = now
                self._waiting.append(picture)
                self._came.notify()

    def stop(self) -> None:
        """End the frames for the user. Those that have arrived are still used."""
        with self._came:
            self._is_stopped = True
            self._came.notify()

    def refuse(self, reason: str) -> None:
        """Note that the page has no camera: a sentence in its user's language."""
        with self._came:
            self._why_not = reason[:LONGEST_REASON]
            self._came.notify()

    def frames(self) -> Iterator[Tensor | None]:
        """Frames [h, w, 3] uint8; None: none is waiting. Ends with the camera."""
        from ..fusion.base import notices  # noqa: PLC0415 - the server starts without it

        count, last, asked = 0, self._clock(), float("-inf")
        try:
            while True:
                with self._came:
                    if not self._waiting and not self._is_stopped:
                        self._came.wait(POLL)
                    picture = self._waiting.popleft() if self._waiting else None
                if self._why_not is not None:
                    raise NoCamera(f"{self._why_not.rstrip('.')}. {INSTEAD}")
                now = self._clock()
                if picture is not None:
                    count, last = count + 1, now
                    yield pixels_of(picture)
                    continue
                if self._is_stopped:
                    return
                if now - last > (LATER if count else FIRST):
                    if not count:
                        raise NoCamera(NOTHING_CAME)
                    notices.warn(
                        f"The camera stopped after {count} frames: nothing came for {LATER:g} s. The video ends there."
                    )
                    return
                if self.hang_up is None and now - asked >= ASK_EVERY:
                    asked = now
                    tell(EVENT, self._asks)
                yield None
        finally:
            self.close()

    def close(self) -> None:
        """Take no more frames. May be called again."""
        if _open.pop(self.word, None) is not None:
            tell(EVENT, {"node": self._asks["node"], "word": None})
        hang_up, self.hang_up = self.hang_up, None
        if hang_up is not None:
            hang_up()


INSTEAD = "Or connect frames or video."
NOTHING_CAME = (
    f"No frame came from a camera in {FIRST:g} s. Press Use the camera on the node, and allow it; browsers give cameras only to "
    f"pages on this machine (localhost) or with https. {INSTEAD}"
)


def of(word: str) -> Camera | None:
    """The camera that waits with this word."""
    return _open.get(word)


def close_all() -> None:
    """Close the cameras of prompts that have ended."""
    for camera in list(_open.values()):
        camera.close()


class WrongPicture(ValueError):
    """A message that is no picture, or one that is too large."""

    __module__ = "fusestream"


def pixels_of(picture: bytes) -> Tensor:
    """The pixels of a JPEG, [h, w, 3] uint8."""
    import numpy  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from PIL.JpegImagePlugin import JpegImageFile  # noqa: PLC0415

    try:
        # Not by `Image.open`, which has an error of its own for what is too large.
        with JpegImageFile(io.BytesIO(picture)) as found:
            if found.width * found.height > MOST_PIXELS:
                raise WrongPicture(
                    f"The camera sent a picture of {found.width}x{found.height}. Choose a smaller width and height."
                )
            pixels: Any = numpy.asarray(found.convert("RGB"))
    except WrongPicture:
        raise
    except (SyntaxError, ValueError, OSError) as error:
        raise WrongPicture(f"What the camera sent is no picture: {error}. Load the page anew, and run again.") from None
    return torch.from_numpy(pixels.copy())


# ------------------------------------------------------------------------------------------------------------ the address


def attach() -> None:
    """Let the server answer at the address. Called once, before it starts to listen."""
    server = running_server()
    if server is not None:
        server.routes.get(PATH)(take)
        between_prompts.always(close_all)


async def take(request: web.Request) -> web.StreamResponse:
    """Receive frames from a page. The query's `word` is the one that the node has told the page.

    403: a page of another server. 404: no node waits with this word. 409: a page sends already.
    """
    from aiohttp import WSMsgType, web  # noqa: PLC0415 - only a server has it

    if not is_own_page(request.headers.get("Origin"), request.headers.get("Host")):
        return answered({"error": "Frames are taken from this server's own pages alone."}, 403)
    wanted = of(request.query.get("word", ""))
    if wanted is None:
        return answered({"error": "No node waits for this camera."}, 404)
    if wanted.hang_up is not None:
        return answered({"error": "Another page sends its camera already."}, 409)
    socket = web.WebSocketResponse(max_msg_size=MOST_BYTES, compress=False)
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
    """Whether the browser states that the page is of this server, which pages of others cannot
    fake."""
    if not origin or not host:
        return False
    with contextlib.suppress(ValueError):  # what is no address
        return urlsplit(origin).netloc.lower() == host.lower()
    return False
