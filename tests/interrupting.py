"""Ctrl-C at a moment of one's choice, and never before: what starts a thread may not be interrupted itself."""

from __future__ import annotations

import _thread
import signal
import threading
import time


class Interrupt:
    """`soon()` returns at once; after `delay` seconds the main thread gets a KeyboardInterrupt. Also where a shell started the
    tests in the background, and Ctrl-C is ignored."""

    def __init__(self, delay: float) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._asked = False
        self._thread = threading.Thread(target=self._wait, args=(delay,), daemon=True)
        self._thread.start()

    def soon(self) -> None:
        """A plain assignment: nothing in it can be broken off halfway."""
        self._asked = True

    def join(self) -> None:
        """Wait until it has come."""
        self._thread.join()

    def _wait(self, delay: float) -> None:
        while not self._asked:
            time.sleep(0)
        time.sleep(delay)
        _thread.interrupt_main()
