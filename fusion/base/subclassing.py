"""Giving one module behaviour of ours: its class becomes a subclass, of the same name, with a mixin before it.

A method kept in the module's own dictionary would refer to the module, and a model would go only when the garbage collector
comes by: gigabytes late. A class refers to nothing.
"""

from __future__ import annotations

import functools
from typing import Any


def mix(module: Any, mixin: Any, **attributes: Any) -> None:
    """From now on the module has the mixin's methods before its own, and these attributes, which are not parameters."""
    module.__dict__.update(attributes)
    if not isinstance(module, mixin):
        kind: Any = type(module)
        module.__class__ = _mixed(mixin, kind)


@functools.cache
def _mixed(mixin: Any, kind: Any) -> Any:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (mixin, kind), names)
