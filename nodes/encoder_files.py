"""The further files of a text encoder: encoders beside the first that make one model with it, as
in stock's loaders of two, three and four files.

The second file may also be a checkpoint, of which LTX-2's text encoder takes its projection; stock
has a node of its own for that. ComfyUI checks itself whether a name is listed, so a node is asked
about its first file alone, and one refusal is shown. The names of the others are in the queued
graph.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import folder_paths

from ..fusion.base.family import Role
from . import files
from .graph import queued

NONE = "none"
# The inputs that name them, and where each looks for its file.
PLACES = {
    "second_file": (Role.TEXT, Role.CHECKPOINT),
    "third_file": (Role.TEXT,),
    "fourth_file": (Role.TEXT,),
}


def listed(widget: str) -> list[str]:
    """The names that an input offers: none first."""
    return list(dict.fromkeys([NONE, *(name for role in PLACES[widget] for name in files.listed(role))]))


def where(widget: str, name: Any) -> str | None:
    """The path of the file that an input names; None: it names none that is there, or is a link."""
    if not isinstance(name, str) or name == NONE:
        return None
    return next((path for role in PLACES[widget] if (path := files.where(role, name)) is not None), None)


def paths_of(names: Sequence[str]) -> list[str]:
    """The paths of the files that these inputs name, without none. Raises `FileNotFoundError` as
    stock does. names: in the order of the inputs."""
    found = []
    for widget, name in zip(PLACES, names, strict=True):
        if name != NONE:
            path = where(widget, name)
            found.append(path or folder_paths.get_full_path_or_raise(Role.TEXT.folder, name))
    return found


def fingerprint(named: dict[str, Any]) -> str:
    """A mark of the files that a node's inputs name, which changes with each of them."""
    paths = (where(widget, named.get(widget)) for widget in PLACES)
    return "".join(files.state(path) for path in paths if path is not None)


def chosen(node: str | None) -> dict[str, str]:
    """The names by input with which a node is queued, without none and links."""
    values = {widget: queued.value(node, widget) for widget in PLACES}
    return {widget: name for widget, name in values.items() if isinstance(name, str) and name != NONE}


async def fault(node: str | None, first: str) -> str | None:
    """The fault of a queued node's files together, in a sentence. None: their headers are sound.
    first: the path of the first file."""
    paths = [first]
    for widget, name in chosen(node).items():
        path = where(widget, name)
        if path is None:
            return f"{name} is not there any more. Press R, and choose a file that is there, or none."
        paths.append(path)
    kind = queued.value(node, "type")
    states = tuple(map(files.state, paths))
    looked = tuple(paths), states, kind if isinstance(kind, str) else None
    return await asyncio.to_thread(files.refused_by, _look_at, *looked)


@lru_cache(maxsize=64)
def _look_at(paths: tuple[str, ...], _states: tuple[str, ...], kind: str | None) -> None:
    from .. import fusion  # noqa: PLC0415 - the server starts without it

    fusion.inspect_text_encoders(paths, kind, files.text_encoder_paths())
