"""A fingerprint of code: of the modules' files, and of the classes' present methods, which another
pack may have replaced.

A class is told by the code and defaults of its methods, and of those that it inherits within
ComfyUI. Comments and line numbers do not count there. In a file everything counts, which at worst
costs a needless trial.
"""

from __future__ import annotations

import hashlib
import inspect
import operator
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

PLAIN = (bool, int, float, str, bytes, type(None))


def fingerprint(things: Iterable[Any]) -> str:
    """A fingerprint of modules, classes and functions."""
    return hashlib.sha256("".join(map(_of_thing, things)).encode()).hexdigest()[:32]


# By id of a thing: what it held when last seen, which is kept alive, and its fingerprint.
_known: dict[int, tuple[list[Any], str]] = {}


def _of_thing(thing: Any) -> str:
    """A thing's fingerprint. It is reused as long as the module and its classes, or the class, hold
    the same things, because it is asked for before every load."""
    holds = list(_held(thing))
    before = _known.get(id(thing))
    if before is not None and len(before[0]) == len(holds) and all(map(operator.is_, before[0], holds)):
        return before[1]
    found = hashlib.sha256(b"\0".join(_parts(thing))).hexdigest()
    _known[id(thing)] = holds, found
    return found


def _held(thing: Any) -> Iterator[Any]:
    """The thing, and everything in it that another pack may replace."""
    yield thing
    if isinstance(thing, ModuleType):
        for value in vars(thing).values():
            yield value
            if _is_class_of(thing, value):
                yield from vars(value).values()
    elif inspect.isclass(thing):
        for kind in thing.__mro__:
            yield from vars(kind).values()


def of_folder(folder: Path) -> str:
    """A fingerprint of the Python files in a folder."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:32]


def _parts(thing: Any) -> Iterator[bytes]:
    if isinstance(thing, ModuleType):
        yield Path(str(thing.__file__)).read_bytes()
        # as they are now, because another pack may have replaced them
        for name, value in sorted(vars(thing).items()):
            if inspect.isfunction(value) or _is_class_of(thing, value):
                yield name.encode()
                yield from _of_class(value) if inspect.isclass(value) else _of_function(value)
    elif inspect.isclass(thing):
        for kind in thing.__mro__:
            if kind.__module__.partition(".")[0] == "comfy":
                yield from _of_class(kind)
    else:
        yield from _of_function(thing)


def _is_class_of(module: ModuleType, value: Any) -> bool:
    return inspect.isclass(value) and value.__module__ == module.__name__


def _of_class(kind: type) -> Iterator[bytes]:
    for name, value in sorted(vars(kind).items()):
        if found := list(_of_function(value)):  # entries that Python adds to a class have no code
            yield f"{kind.__qualname__}.{name}".encode()
            yield from found


def _of_function(value: Any) -> Iterator[bytes]:
    """The code of a function, and of functions that it wraps by a decorator or closes over."""
    waiting, seen = [getattr(value, "fget", None) or getattr(value, "__func__", None) or value], set[int]()
    while waiting:
        function = waiting.pop()
        code = getattr(function, "__code__", None)
        if id(function) in seen or not isinstance(code, CodeType):
            continue
        seen.add(id(function))
        defaults = getattr(function, "__defaults__", None) or ()
        named = getattr(function, "__kwdefaults__", None) or {}
        yield repr([_plain(one) for one in (*defaults, *named.items())]).encode()
        yield from _of_code(code)
        cells = (cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_filled(cell))
        waiting += [one for one in (*cells, getattr(function, "__wrapped__", None)) if inspect.isfunction(one)]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _of_code(code: CodeType) -> Iterator[bytes]:
    yield code.co_code
    yield repr((code.co_names, code.co_varnames, code.co_freevars)).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _of_code(constant)
        else:
            yield repr(_plain(constant)).encode()


def _plain(value: Any) -> Any:
    """The value in a form that is the same in each process, at any time. Mutable defaults become
    their type's name, because calls write into them."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, frozenset):
        return sorted(map(repr, map(_plain, value)))
    return type(value).__qualname__
