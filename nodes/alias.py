"""`import fusestream` for other packs: a module with the names of kernels_cuda/public.py.

It is no package, so an import below it cannot make a second copy of the pack. A wheel that a
program has installed and imported before stays.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

NAME = "fusestream"
PUBLIC = "..kernels_cuda.public"


class Alias(ModuleType):
    """Imports names on demand, so that the server starts without them."""

    def __getattr__(self, name: str) -> Any:
        # Python's own questions about a module.
        if name.startswith("__") and name not in ("__all__", "__version__"):
            raise AttributeError(name)
        found = importlib.import_module(PUBLIC, __package__)
        if name not in ("__all__", *found.__all__):
            raise AttributeError(f"fusestream has no {name!r}; there are {', '.join(found.__all__)}")
        return getattr(found, name)


def attach() -> None:
    """Let `import fusestream` find this copy of the pack from now on."""
    sys.modules.setdefault(NAME, Alias(NAME, "FuseStream's modules for other packs: see docs/modules.md"))
