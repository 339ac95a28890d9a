"""What a computation holds at a time, and whether it lets go. Under torch's FakeTensorMode it is counted without being done."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages made since it was entered and still alive: now, and at most. `before` are not counted."""

    def __init__(self, *before: torch.Tensor) -> None:
        super().__init__()
        self.now = self.most = 0
        self._before = before
        self._known = {t.untyped_storage()._cdata for t in before}

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        self._made(key, storage.nbytes())
        weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _made(self, key: int, size: int) -> None:
        """For those who follow single storages."""

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """What goes in here went with its last reference: ComfyUI warns of models that need more."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
