"""Another ComfyUI, made of this one: a function of its code with some text of it changed."""

from __future__ import annotations

import inspect
import itertools
import linecache
import sys
import textwrap
from types import ModuleType
from typing import Any

import pytest

_numbers = itertools.count()


def mutated(monkeypatch: pytest.MonkeyPatch, owner: type | ModuleType, name: str, old: str, new: str) -> None:
    """From now on, and until the test ends, this method of a class, or this function of a module, is what its source says with
    `new` in the place of the first `old`."""
    if isinstance(owner, type):
        owner = next(kind for kind in owner.__mro__ if name in vars(kind))
    found = vars(owner)[name]
    function = inspect.unwrap(getattr(found, "__func__", found))
    source = textwrap.dedent(inspect.getsource(function))
    changed = source.replace(old, new, 1)
    assert changed != source, f"{owner.__name__}.{name} says nothing of {old!r}"
    space: dict[str, Any] = {}
    if isinstance(owner, type):
        # A function outside of its class does not know which one `super()` is about.
        changed = changed.replace("super()", "super(_owner_, self)")
        changed = f"def _within_(_owner_):\n{textwrap.indent(changed, '    ')}\n    return {name}\n"
    place = f"<{owner.__name__}.{name}, changed {next(_numbers)}>"
    linecache.cache[place] = (
        len(changed),
        None,
        changed.splitlines(keepends=True),
        place,
    )  # for who changes it once more
    exec(compile(changed, place, "exec"), vars(sys.modules[function.__module__]), space)
    made = space["_within_"](owner) if isinstance(owner, type) else space[name]
    made = getattr(made, "__func__", made)  # a decorator stands in the source
    made.__module__, made.__qualname__ = function.__module__, function.__qualname__
    monkeypatch.setattr(owner, name, type(found)(made) if isinstance(found, staticmethod | classmethod) else made)
