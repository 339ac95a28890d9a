"""Makes a large card act as a small one, and watches how much of it is used."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch

GIB = 2**30
INTERVAL = 0.02


@contextlib.contextmanager
def acting_small(free: float | None) -> Iterator[None]:
    """While ComfyUI takes the card for one of so many GiB in all: it chooses pieces of work, and what it leaves free, by that."""
    if free is None or not torch.cuda.is_available():
        yield
        return
    management: Any = importlib.import_module("comfy.model_management")
    own, total_mib = management.get_total_memory, management.total_vram
    most = int(free * GIB)

    def bounded(dev: Any = None, torch_total_too: bool = False) -> Any:
        found = own(dev, torch_total_too)
        if getattr(dev, "type", "cuda") == "cpu":
            return found
        return (min(found[0], most), min(found[1], most)) if torch_total_too else min(found, most)

    management.get_total_memory, management.total_vram = bounded, min(total_mib, most / 2**20)
    try:
        yield
    finally:
        management.get_total_memory, management.total_vram = own, total_mib


class Card:
    """Takes memory until `free` GiB of the card are left, then watches the driver's count of what is free.

    The ballast is a plain cudaMalloc, outside of torch: ComfyUI sees the card as full as another program would make it.
    """

    def __init__(self, free: float | None, index: int = 0) -> None:
        """index: of the card, where a model is on several."""
        self._free, self._index = free, index
        self._stop = threading.Event()
        self._ballast = 0
        self.start = self.low = 0
        self.allocators = (
            0  # bytes that torch's allocator held at the peak; the rest is the pager's, and the libraries'
        )

    def __enter__(self) -> Card:
        if not torch.cuda.is_available():
            return self
        torch.zeros(1, device=torch.device("cuda", self._index))
        torch.cuda.empty_cache()
        if self._free is not None:
            self._take(self._left() - int(self._free * GIB))
        self.start = self.low = self._left()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _left(self) -> int:
        return torch.cuda.mem_get_info(self._index)[0]

    def _take(self, nbytes: int) -> None:
        if nbytes <= 0:
            return
        runtime = importlib.import_module("cuda.bindings.runtime")  # comes with torch's CUDA 13 builds
        with torch.cuda.device(self._index):
            status, self._ballast = runtime.cudaMalloc(nbytes)
        if int(status):
            raise RuntimeError(
                f"the ballast of {nbytes / GIB:.1f} GiB cannot be allocated: {status}. Use another --free."
            )

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL):
            self._look()

    def _look(self) -> None:
        free = self._left()
        if free < self.low:
            self.low, self.allocators = free, torch.cuda.memory_reserved(self._index)

    def restart(self) -> None:
        """Forget the peak so far."""
        if torch.cuda.is_available():
            self.low, self.allocators = self._left(), torch.cuda.memory_reserved(self._index)

    @property
    def peak(self) -> float:
        """GiB, the most that was in use since the ballast was taken."""
        return (self.start - self.low) / GIB

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._ballast:
            importlib.import_module("cuda.bindings.runtime").cudaFree(self._ballast)
            self._ballast = 0
