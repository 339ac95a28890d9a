"""`import fusestream` in other packs: a module with the names of kernels_cuda/public.py.

It is no package, so nobody gets a second copy of the pack by importing below it. A wheel that a
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
    """Imports a name when it is asked for: the server starts without it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__all__", "__version__"):  # Python's own questions about a module
            raise AttributeError(name)
        found = importlib.import_module(PUBLIC, __package__)
        if name not in ("__all__", *found.__all__):
            raise AttributeError(f"fusestream has no {name!r}; there are {', '.join(found.__all__)}")
        return getattr(found, name)


def attach() -> None:
    """From now on `import fusestream` finds this copy of the pack."""
    sys.modules.setdefault(NAME, Alias(NAME, "FuseStream's modules for other packs: see docs/modules.md"))
