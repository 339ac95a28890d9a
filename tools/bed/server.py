"""A real ComfyUI server with this pack in its `custom_nodes`, in a base folder of its own.

The user's ComfyUI is only read: models, outputs, settings and the database of the server live in the base folder.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from .paths import ROOT

PACK = "FuseStream"
# With the attention that stock has on a card: what it takes on the CPU needs eight times as long in fp16.
ON_THE_CPU = ["--cpu", "--use-pytorch-cross-attention"]
MODEL_FOLDERS = ("diffusion_models", "text_encoders", "vae", "loras", "clip_vision")


class ServerFailed(RuntimeError):
    """The server did not start or died. The message ends with its log."""


class Server:
    """`with Server(...) as server:` starts it and waits until it answers; leaving stops it."""

    def __init__(self, python: Path, comfyui: Path, base: Path, arguments: Sequence[str] = ()) -> None:
        self.python, self.comfyui, self.base, self.arguments = python, comfyui, base, list(arguments)
        self.log_path = base / "server.log"
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.startup_log = ""

    def __enter__(self) -> Server:
        self.prepare()
        environment = {**self.environment(), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self.command(), stdout=log, stderr=subprocess.STDOUT, cwd=self.base, env=environment
            )
        try:
            self._wait_until_up(timeout=180)
            self.startup_log = self.log()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def prepare(self) -> None:
        """Make the base folder."""
        prepare(self.base)

    def command(self) -> list[str]:
        """What starts it, in the base folder."""
        return [
            str(self.python), str(self.comfyui / "main.py"), "--base-directory", str(self.base),
            "--port", str(self.port), "--disable-auto-launch", "--disable-api-nodes",
            "--database-url", "sqlite:///:memory:", *([] if has_nvidia_gpu() else ON_THE_CPU), *self.arguments,
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Its variables, beside those of every server."""
        return dict(os.environ)

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def get(self, path: str) -> object:
        """The JSON answer to GET `path`."""
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.load(answer)

    def _wait_until_up(self, timeout: float) -> None:
        assert self.process is not None
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerFailed(f"ComfyUI ended with exit code {self.process.returncode}:\n{self._log_tail()}")
            try:
                self.get("/system_stats")
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)
        raise ServerFailed(f"ComfyUI did not answer within {timeout:.0f} s:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        return "\n".join(self.log().splitlines()[-40:])


def prepare(base: Path) -> None:
    """Make the base folder: empty model folders and this pack in `custom_nodes`, unless somebody has put it there."""
    for folder in ("custom_nodes", "input", "output", "temp", "user", *(f"models/{name}" for name in MODEL_FOLDERS)):
        (base / folder).mkdir(parents=True, exist_ok=True)
    installed = base / "custom_nodes" / PACK
    if installed.is_symlink() or not installed.exists():
        link_folder(installed, ROOT)


def link_folder(link: Path, target: Path) -> None:
    """Make the folder `target` appear at `link`: a symbolic link, or a junction on Windows, which needs no rights."""
    if link.exists() and link.resolve() == target.resolve():
        return
    link.unlink(missing_ok=True)
    if sys.platform == "win32":
        import _winapi

        _winapi.CreateJunction(str(target), str(link))
    else:
        link.symlink_to(target, target_is_directory=True)


def has_nvidia_gpu() -> bool:
    """Whether an NVIDIA driver with a device answers; asks the driver itself, which takes no torch."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
