"""Processes of the bench: many may start at once, one at a time works. Standard library only.

To import torch and ComfyUI takes ten seconds. Processes do that beside each other, make their CUDA contexts, say READY and wait for
a word: so nothing on the card changes while one of them is measured, but for what it does itself.

Where nothing is measured, one process may take many words, one after another.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parents[1]
READY, RESULT = "READY", "RESULT "
ENDING_S = 30.0  # to give back pinned pages and the card


class Process:
    """One job: {"task": ...} as the worker knows it."""

    def __init__(self, job: dict[str, Any], log: Path) -> None:
        self.job = job
        self.log = log
        self._results: queue.Queue[dict[str, Any] | None] = queue.Queue()  # None: there will be no more
        self._ready, self._over = threading.Event(), threading.Event()
        self._out = log.open("w", encoding="utf-8")
        command = [sys.executable, str(BENCH), "worker", json.dumps(job)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._out, text=True, bufsize=1)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(RESULT):
                self._results.put(json.loads(line.removeprefix(RESULT)))
            elif line.strip() == READY:
                self._ready.set()
            else:
                self._out.write(line)
                self._out.flush()
        self._ready.set()
        self._over.set()
        self._results.put(None)

    def wait_ready(self, seconds: float) -> None:
        """Until it has started, or has failed at it, or so long."""
        self._ready.wait(seconds)

    def go(self, word: dict[str, Any], seconds: float, *, stay: bool = False) -> dict[str, Any]:
        """Let it work, for so long at most. What it found, or {"error": ...}. It has ended then, unless it is to stay."""
        start = time.perf_counter()
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(word) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended already, and its log says why
        late = False
        try:
            result = self._results.get(timeout=seconds)
        except queue.Empty:
            result, late = None, True
        if result is None or not stay:
            self._over.wait(0.0 if late else ENDING_S)
            self.end()
        if result is not None:
            return {**result, "took s": time.perf_counter() - start}
        return {"error": f"ran past {seconds:g} s" if late else f"exit code {self._process.returncode} and no result"}

    def end(self) -> None:
        """Also where nobody asked it for anything: it holds memory of the card."""
        if self._process.poll() is None and not self._over.is_set():
            self._process.kill()
        self._process.wait()
        self._out.close() if self._over.wait(5) else None

    def last_lines(self, count: int) -> list[str]:
        return self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-count:]
