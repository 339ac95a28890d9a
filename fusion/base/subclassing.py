"""Behaviour of ours for one module: its class becomes a subclass, of the same name, with a mixin
before it.

A method in the module's own dictionary would refer to the module, and then only the garbage
collector would free a model, gigabytes late. A class has no such reference.
"""

from __future__ import annotations

import functools
from typing import Any


def mix(module: Any, mixin: Any, **attributes: Any) -> None:
    """Give the module the mixin's methods, before its own, and these attributes, which are not
    parameters."""
    module.__dict__.update(attributes)
    if not isinstance(module, mixin):
        kind: Any = type(module)
        module.__class__ = _mixed(mixin, kind)


@functools.cache
def _mixed(mixin: Any, kind: Any) -> Any:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (mixin, kind), names)
