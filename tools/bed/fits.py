"""Whether newer single files fit into a tree of Python modules: read from the source, nothing is imported.

Looked at are the names that one module takes from another, by `from x import name` or by `x.name` after `import x`.
What did not hold before in the tree itself is nobody's fault.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ANY = "*"  # among a module's names: it may have any


@dataclass(frozen=True)
class Missing:
    """A name that `taker` takes from the file `giver`, which does not have it."""

    taker: str
    giver: str
    name: str


def refused(tree: Path, files: Mapping[str, Path]) -> dict[str, str]:
    """Which of the files do not fit into the tree, and why; by their paths in it, as `files` has them."""
    before = {path.relative_to(tree).as_posix(): path for path in tree.rglob("*.py")}
    held_before = set(missing(before))
    found = {name: said for name, path in files.items() if name.endswith(".py") and (said := _not_compiled(path))}
    while True:
        laid = {name: path for name, path in files.items() if name not in found}
        pythons = {name: path for name, path in laid.items() if name.endswith(".py")}
        wrong = [one for one in missing({**before, **pythons}) if one not in held_before]
        if not wrong:
            return found
        # Where one of the two is the tree's own it is clear which does not fit; others may fit once that one is gone.
        clear = [one for one in wrong if not {one.taker, one.giver} <= laid.keys()]
        for one in clear or wrong:
            blamed = one.taker if one.taker in laid else one.giver
            found.setdefault(blamed, f"{one.taker} takes {one.name} from {one.giver}, which does not have it")


def _not_compiled(path: Path) -> str:
    try:
        _parsed(path)
    except (SyntaxError, ValueError) as error:
        return f"does not compile: {error}"
    return ""


def missing(files: Mapping[str, Path]) -> Iterator[Missing]:
    """What modules take from each other and do not find. By their paths, with the files that have the text."""
    modules = {module(name): name for name in files}
    for taker, path in files.items():
        for target, name in taken(taker, path, frozenset(modules)):
            has = names(files[modules[target]])
            if name not in has and ANY not in has and f"{target}.{name}" not in modules and not _is_package(
                f"{target}.{name}", modules
            ):  # fmt: skip
                yield Missing(taker, modules[target], name)


def _is_package(name: str, modules: Mapping[str, str]) -> bool:
    return any(one.startswith(f"{name}.") for one in modules)


def module(name: str) -> str:
    """What a file is imported as."""
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def taken(name: str, path: Path, modules: frozenset[str]) -> Iterator[tuple[str, str]]:
    """The names that a file takes from these modules: module and name."""
    tree = _parsed(path)
    package = module(name).split(".") if name.endswith("/__init__.py") else module(name).split(".")[:-1]
    called: dict[str, str] = {}  # what the file calls a module
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                if f"{target}.{alias.name}" in modules:
                    called[alias.asname or alias.name] = f"{target}.{alias.name}"
                elif target in modules and alias.name != "*":
                    yield target, alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                called[alias.asname or alias.name] = alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (target := called.get(_dotted(node.value), "")) in modules:
            yield target, node.attr


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def names(path: Path) -> frozenset[str]:
    """The names that a module has once it was imported, as far as its text tells."""
    found = {"__name__", "__file__", "__doc__", "__path__", "__dict__"}
    for node in _own(_parsed(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found |= {node.name} | ({ANY} if node.name == "__getattr__" else set())
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Global):
            found |= set(node.names)
        elif isinstance(node, ast.Call) and _dotted(node.func) == "globals":
            found.add(ANY)
    return frozenset(found)


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """What belongs to a module itself: nothing inside its functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _own(child)
