"""Processes of the bench: many may start at once, one at a time works. Standard library only.

To import torch and ComfyUI takes ten seconds. Processes do that beside each other, make their CUDA contexts, say READY and wait for
a word: so nothing on the card changes while one of them is measured, but for what it does itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")
READY, RESULT = "READY", "RESULT "


class Process:
    """One job: {"task": ...} as worker.py knows it."""

    def __init__(self, job: dict[str, Any], log: Path) -> None:
        self.job = job
        self.log = log
        self._result: dict[str, Any] | None = None
        self._ready, self._over = threading.Event(), threading.Event()
        self._out = log.open("w", encoding="utf-8")
        command = [sys.executable, str(WORKER), json.dumps(job)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._out, text=True, bufsize=1)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(RESULT):
                self._result = json.loads(line.removeprefix(RESULT))
            elif line.strip() == READY:
                self._ready.set()
            else:
                self._out.write(line)
                self._out.flush()
        self._ready.set()
        self._over.set()

    def wait_ready(self, seconds: float) -> None:
        """Until it has started, or has failed at it, or so long."""
        self._ready.wait(seconds)

    def go(self, word: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Let it work, for so long at most. What it found, or {"error": ...}; it has ended."""
        start = time.perf_counter()
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(word) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended already, and its log says why
        over = self._over.wait(seconds)
        self.end()
        if self._result is not None:
            return {**self._result, "took s": time.perf_counter() - start}
        return {"error": f"exit code {self._process.returncode} and no result" if over else f"ran past {seconds:g} s"}

    def end(self) -> None:
        """Also where nobody asked it for anything: it holds memory of the card."""
        if self._process.poll() is None and not self._over.is_set():
            self._process.kill()
        self._process.wait()
        self._out.close() if self._over.wait(5) else None

    def last_lines(self, count: int) -> list[str]:
        return self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-count:]
