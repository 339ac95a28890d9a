"""Priority among threads at the driver.

The driver does one thing at a time, and a thread that calls it again and again leaves others little
chance in between. So a thread in a hurry says so, and a thread that makes long calls in a row lets
it pass between two.
"""

from __future__ import annotations

import threading

LONGEST_SECONDS = 0.005  # the longest wait for threads that stay in a hurry


class Precedence:
    """`with precedence:` around calls that should not wait; `give_way()` between calls that may."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hurried = 0
        self._free = threading.Event()
        self._free.set()

    def __enter__(self) -> None:
        with self._lock:
            self._hurried += 1
            self._free.clear()

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._hurried -= 1
            if not self._hurried:
                self._free.set()

    def give_way(self) -> None:
        self._free.wait(LONGEST_SECONDS)
