"""The pack as ComfyUI loads it: from its path, under a name of its own.

ComfyUI has a top-level module `nodes`, the pack a folder of that name: the pack's root must never be on `sys.path`. Here the name
is `fusestream`.
"""

from __future__ import annotations

import importlib.util
import sys

from .paths import ROOT


def load() -> None:
    """From now on `import fusestream` works in this process. Where ComfyUI is on the path its nodes are there too."""
    if "fusestream" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "fusestream", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None and spec.loader is not None
    pack = importlib.util.module_from_spec(spec)
    sys.modules["fusestream"] = pack
    spec.loader.exec_module(pack)
