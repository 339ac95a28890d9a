"""A server that answers as ComfyUI's HTTP interface does, and fails as it is told to. It computes nothing: a prompt's output is its
own text, some time after it has begun."""

from __future__ import annotations

import json
import threading
import time
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeComfyUI:
    """`with FakeComfyUI() as server:` answers at `server.url` until it is killed.

    lasts       seconds of a prompt, by its text
    on_prompt   called with a prompt's text when it was queued, before it is answered; what it returns False for gets no answer
    begun       texts of prompts in the order in which they were queued
    cancelled   ids that were taken off the queue or interrupted
    """

    def __init__(
        self, lasts: Callable[[str], float] = lambda _: 0.02, on_prompt: Callable[[str], bool | None] = lambda _: True
    ) -> None:
        self.lasts, self.on_prompt = lasts, on_prompt
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self.prompts: dict[str, tuple[str, float]] = {}
        self.port = 0
        self.http: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeComfyUI:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()

    def start(self) -> None:
        """At the address that it had before, if it had one."""
        handler = type("Handler", (_Handler,), {"fake": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, args=(0.005,), daemon=True).start()

    def kill(self, *, forgets: bool = True) -> None:
        """No answer from now on. forgets: as a process does, and not a cable that was pulled."""
        http, self.http = self.http, None
        if http is not None:
            http.shutdown()
            http.server_close()
        if forgets:
            self.prompts.clear()

    def queue(self, text: str, prompt_id: str) -> bool:
        """Whether it is to be answered."""
        self.begun.append(text)
        self.prompts[prompt_id] = text, time.monotonic() + self.lasts(text)
        return self.on_prompt(text) is not False

    def history(self, prompt_id: str) -> dict[str, Any]:
        text, ends = self.prompts.get(prompt_id, ("", float("inf")))
        if time.monotonic() < ends:
            return {}
        if prompt_id in self.cancelled:
            return {prompt_id: {"outputs": {}, "status": _status("error", "execution_interrupted")}}
        if text.startswith("wrong"):
            error = {"node_type": "KSampler", "exception_message": "out of luck"}
            return {prompt_id: {"outputs": {}, "status": _status("error", "execution_error", error)}}
        kept = {"filename": f"{text}.png", "subfolder": "video", "type": "output"}
        passing = {"filename": "look.png", "subfolder": "", "type": "temp"}
        return {
            prompt_id: {
                "outputs": {"9": {"images": [kept, passing], "animated": [True]}},
                "status": _status("success", "execution_success"),
            }
        }

    def waiting(self) -> list[list[Any]]:
        now = time.monotonic()
        return [[0, prompt_id, {}] for prompt_id, (_, ends) in self.prompts.items() if now < ends]


def _status(said: str, kind: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"status_str": said, "completed": said == "success", "messages": [[kind, data or {}]]}


class _Handler(BaseHTTPRequestHandler):
    fake: FakeComfyUI

    def log_message(self, *_: Any) -> None:
        """To nobody."""

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if self.fake.http is None:
            self.close_connection = True
        elif path == "/system_stats":
            self._answer({"system": {}})
        elif path.startswith("/history/"):
            self._answer(self.fake.history(path.removeprefix("/history/")))
        elif path == "/queue":
            self._answer({"queue_running": self.fake.waiting(), "queue_pending": []})
        elif path == "/view":
            asked = urllib.parse.parse_qs(query)
            self._send(200, f"{asked['type'][0]} {asked['subfolder'][0]}/{asked['filename'][0]}".encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.fake.http is None:
            self.close_connection = True
        elif self.path == "/prompt":
            text = body["prompt"]["1"]["inputs"]["text"]
            if text.startswith("refused"):
                self._answer({"error": {"message": "no such node"}}, 400)
            elif self.fake.queue(text, body["prompt_id"]):
                self._answer({"prompt_id": body["prompt_id"]})
        elif self.path == "/queue":
            self.fake.cancelled += body["delete"]
            self._send(200, b"")
        elif self.path == "/interrupt":
            self.fake.cancelled.append(body["prompt_id"])
            self._send(200, b"")

    def _answer(self, found: Any, status: int = 200) -> None:
        self._send(status, json.dumps(found).encode())

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
