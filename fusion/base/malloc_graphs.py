"""The Comfy Compiler's recording of allocations, in versions of ComfyUI that have it: it is paused
while weights arrive, and our captures do not happen inside of it.

From about 0.34 on some networks (MiniMax H3, LTX-2, Qwen-Image 2.1, language models that write)
record the order of a block's allocations, and give the next block the same addresses. An allocation
that outlives the block would be given to another one, and the process ends. Streamed weights
outlive blocks, so they arrive while the recording is paused. Nor is a call captured as our graph
meanwhile, because the graph would hold addresses that are given away.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import threading
from collections.abc import Callable
from typing import Any

_MODULE = "comfy.model_prefetch"


def _found() -> Any:
    return importlib.import_module(_MODULE) if importlib.util.find_spec(_MODULE) else None


_prefetch = _found()
_pause: Callable[[], contextlib.AbstractContextManager[Any]] | None = getattr(_prefetch, "pause_malloc_graph", None)
_nothing = contextlib.nullcontext()
_paused = threading.local()


def is_recording() -> bool:
    """Whether ComfyUI records this thread's allocations now."""
    graphs = getattr(_prefetch, "MALLOC_GRAPHS", None)
    if not graphs:
        return False
    graph = graphs.get(threading.get_ident())
    return graph is not None and bool(getattr(graph, "_comfy_active", True))


def paused() -> contextlib.AbstractContextManager[Any]:
    """Pause the recording of this thread's allocations. Nested uses have no effect."""
    return _nothing if _pause is None or getattr(_paused, "now", False) or not is_recording() else _Paused(_pause())


class _Paused(contextlib.AbstractContextManager[None]):
    def __init__(self, pause: contextlib.AbstractContextManager[Any]) -> None:
        self._pause = pause

    def __enter__(self) -> None:
        self._pause.__enter__()
        _paused.now = True

    def __exit__(self, *error: Any) -> None:
        _paused.now = False
        self._pause.__exit__(*error)
