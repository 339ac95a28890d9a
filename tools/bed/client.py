"""A client of ComfyUI's HTTP and websocket interface: queue a workflow, follow it, collect what came out."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

PROGRESS_TEXT, PREVIEW = ((i).to_bytes(4, "big") for i in (3, 4))  # ComfyUI's BinaryEventTypes

Workflow = dict[str, dict[str, Any]]
Listener = Callable[[str, dict[str, Any]], None]
Watcher = Callable[[dict[str, Any], bytes], None]


class Rejected(RuntimeError):
    """The server refused the prompt; `.body` is its JSON answer."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__(json.dumps(body))
        self.body = body


@dataclass
class Run:
    """What one prompt did."""

    prompt_id: str
    executed: list[str] = field(default_factory=list)
    cached: set[str] = field(default_factory=set)
    progress: list[tuple[str, int, int]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    interrupted: bool = False
    interrupted_in: str | None = None  # the node's type


class Client:
    """One client of the server at `url`. Every method is a call of its own; no connection is kept between them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.id = uuid.uuid4().hex

    def run(
        self,
        workflow: Workflow,
        listener: Listener | None = None,
        timeout: float = 300,
        progress_text: Callable[[str, str], None] | None = None,
        preview: Watcher | None = None,
        preview_method: str = "default",
    ) -> Run:
        """Queue `workflow` (API format) and wait for its end; `listener` sees every message as it arrives, `progress_text` each
        text for a node, `preview` each preview, as the front end does, with what is told of it."""
        run = self._run(workflow, listener, progress_text, preview, preview_method)
        return asyncio.run(asyncio.wait_for(run, timeout))

    def post(self, path: str, body: dict[str, Any] | None = None) -> int:
        """POST JSON to `path`; the HTTP status."""

        async def call() -> int:
            async with aiohttp.ClientSession() as session, session.post(self.url + path, json=body or {}) as answer:
                return answer.status

        return asyncio.run(call())

    def fetch(self, file: dict[str, str]) -> bytes:
        """The bytes of an output file as a run's `outputs` name it."""

        async def call() -> bytes:
            wanted = {"filename": file["filename"], "subfolder": file["subfolder"], "type": file["type"]}
            async with aiohttp.ClientSession() as session, session.get(self.url + "/view", params=wanted) as answer:
                answer.raise_for_status()
                return await answer.read()

        return asyncio.run(call())

    async def _run(
        self,
        workflow: Workflow,
        listener: Listener | None,
        progress_text: Callable[[str, str], None] | None,
        preview: Watcher | None,
        preview_method: str,
    ) -> Run:
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{self.url}/ws", params={"clientId": self.id}, max_msg_size=0) as socket,
        ):
            if preview is not None:
                await socket.send_json({"type": "feature_flags", "data": {"supports_preview_metadata": True}})
            extra = {"preview_method": preview_method}
            body = {"prompt": workflow, "client_id": self.id, "extra_data": extra}
            async with session.post(f"{self.url}/prompt", json=body) as answer:
                reply = await answer.json()
                if answer.status != 200:
                    raise Rejected(reply)
            run = Run(reply["prompt_id"])
            node: str | None = None
            since = time.monotonic()
            async for message in socket:
                if message.type != aiohttp.WSMsgType.TEXT:  # binary messages are preview pictures, and texts for nodes
                    length = int.from_bytes(message.data[4:8], "big")
                    head, rest = message.data[8 : 8 + length], message.data[8 + length :]
                    if progress_text is not None and message.data[:4] == PROGRESS_TEXT:
                        progress_text(head.decode(), rest.decode())
                    if preview is not None and message.data[:4] == PREVIEW:
                        preview(json.loads(head), rest)
                    continue
                event = json.loads(message.data)
                kind, data = event["type"], event["data"]
                if data.get("prompt_id") != run.prompt_id:
                    continue
                if listener:
                    listener(kind, data)
                ended = _take(run, kind, data)
                if kind == "executing" or ended:
                    now = time.monotonic()
                    if node is not None:
                        run.seconds[node] = run.seconds.get(node, 0.0) + now - since
                    node, since = data.get("node"), now
                if ended:
                    return run
        raise ConnectionError("the server closed the connection before the prompt ended; its log says why")


def _take(run: Run, kind: str, data: dict[str, Any]) -> bool:
    """Note one message; True if it is the last of its prompt."""
    if kind == "executing" and data["node"] is not None:
        run.executed.append(data["node"])
    elif kind == "execution_cached":
        run.cached.update(data["nodes"])
    elif kind == "progress":
        run.progress.append((data["node"], data["value"], data["max"]))
    elif kind == "executed":
        if data["output"] is None:  # it was to run, and another one had made the same meanwhile
            run.cached.add(data["node"])
        else:
            run.outputs[data["node"]] = data["output"]
    elif kind == "execution_error":
        run.error = data
    elif kind == "execution_interrupted":
        run.interrupted = True
        run.interrupted_in = data["node_type"]
    return kind in ("execution_success", "execution_error", "execution_interrupted")
