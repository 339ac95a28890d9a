"""Loads the pack under the alias `fusestream`, whatever its folder is called, and never through sys.path."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def load_pack() -> None:
    if "fusestream" in sys.modules:
        return
    entry = ROOT / "__init__.py"
    if entry.exists():
        spec = importlib.util.spec_from_file_location("fusestream", entry, submodule_search_locations=[str(ROOT)])
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["fusestream"] = module
        spec.loader.exec_module(module)
    else:
        module = types.ModuleType("fusestream")
        module.__path__ = [str(ROOT)]
        sys.modules["fusestream"] = module


load_pack()
