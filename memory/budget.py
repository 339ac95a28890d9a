"""Memory of one device for weights, shared by all models that stream into it."""

from __future__ import annotations

import threading

from .plan import OverBudget


class DeviceBudget:
    """Bytes that may be taken in all. Every pager of a device takes its footprint from the same
    budget."""

    def __init__(self, total: int, device: str = "the GPU") -> None:
        self.total = total
        self.device = device
        # taken again where a model is collected by the thread that has it, which gives its bytes back
        self._lock = threading.RLock()
        self._taken = 0

    @property
    def taken(self) -> int:
        with self._lock:
            return self._taken

    @property
    def left(self) -> int:
        with self._lock:
            return self.total - self._taken

    def take(self, nbytes: int) -> None:
        """Take bytes. Raises OverBudget, and takes nothing, if they are too many."""
        with self._lock:
            if self._taken + nbytes > self.total:
                gib = 2**30
                raise OverBudget(
                    f"Weights want {nbytes / gib:.2f} GiB on {self.device}, and of its budget of {self.total / gib:.2f} "
                    f"GiB other models hold {self._taken / gib:.2f}. Unload them, or raise the VRAM budget."
                )
            self._taken += nbytes

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            assert nbytes <= self._taken, "more given back than was taken"
            self._taken -= nbytes
