"""City96's node pack, which reads GGUF files for stock ComfyUI: what people have, and what ours stand beside.

It is not part of this project: a copy of it lies in a folder that GGUF_PACK names, and the `gguf` package where Python finds it.
The pack is loaded from there as ComfyUI loads a custom node, less the module with all of stock's nodes, of which it takes
nothing that a loader needs.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "GGUF_PACK"
WHERE = "github.com/city96/ComfyUI-GGUF"
MODULE = "bench_gguf_pack"


def folder() -> Path | None:
    """Where the pack lies; None: nobody said so."""
    told = os.environ.get(VARIABLE)
    return Path(told) if told else None


def load_diffusion_model(path: str) -> Any:
    """A MODEL, as the pack's loader node makes it."""
    loader = _nodes().UnetLoaderGGUF()
    _list(Path(path))
    return loader.load_unet(Path(path).name)[0]


def watch_copies(seen: Callable[[int], None]) -> None:
    """From here on, tell how many bytes each of its copies from RAM to another device had."""
    _nodes()
    kind: Any = sys.modules[f"{MODULE}.ops"].GGMLTensor
    plain = kind.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        moved = plain(self, *args, **kwargs)
        if self.device.type == "cpu" != moved.device.type:
            seen(moved.untyped_storage().nbytes())
        return moved

    kind.to = to


def _nodes() -> ModuleType:
    if f"{MODULE}.nodes" in sys.modules:
        return sys.modules[f"{MODULE}.nodes"]
    found = folder()
    if found is None or not (found / "nodes.py").is_file():
        raise RuntimeError(
            f"{VARIABLE} names no copy of ComfyUI-GGUF: get {WHERE}, pip install gguf, and set {VARIABLE} to its folder"
        )
    sys.modules.setdefault("nodes", ModuleType("nodes"))
    spec = importlib.util.spec_from_file_location(
        MODULE, found / "__init__.py", submodule_search_locations=[str(found)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    spec.loader.exec_module(module)
    return sys.modules[f"{MODULE}.nodes"]


def _list(path: Path) -> None:
    """Its loader finds files by name, in ComfyUI's folders."""
    import folder_paths  # noqa: PLC0415

    folder_paths.add_model_folder_path("unet", str(path.parent))
