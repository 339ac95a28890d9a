"""The settings of ComfyUI's dialog that the server itself goes by, read from the user's file whenever it has changed.

With several users on one server it is the first one's file: memory belongs to the machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import folder_paths

from .front_end import running_server

# As nodes/web/js has them.
METER, RESERVE, RAM = "FuseStream.Meter.Enabled", "FuseStream.Memory.Reserve", "FuseStream.Memory.RAM"
PREVIEW = "FuseStream.Preview.Moving"

_read: dict[str, Any] = {}
_state: tuple[int, int] | None = None
_are_applied = False  # whether a loader has run: before, there is nothing that they could hold for


def attach() -> None:
    """What a user changes holds from the next prompt on, also for models that are loaded already. Called once."""
    server = running_server()
    if server is not None:
        server.add_on_prompt_handler(_before_a_prompt)


def value(name: str, default: Any) -> Any:
    return _settings().get(name, default)


def apply() -> None:
    """Called by loaders, before they load."""
    from ..fusion.stream import limits  # noqa: PLC0415 - the server starts without it

    global _are_applied  # noqa: PLW0603 - of the one server that a process has
    _are_applied = True
    limits.apply(limits.Limits.of(value(RESERVE, 0), value(RAM, 0)))


def _before_a_prompt(body: dict[str, Any]) -> dict[str, Any]:
    if _are_applied:
        apply()
    return body


def _settings() -> dict[str, Any]:
    """Of a file that is none, none."""
    global _read, _state  # noqa: PLW0603
    path = Path(folder_paths.get_user_directory()) / "default" / "comfy.settings.json"
    try:
        found = path.stat()
        if _state != (found.st_mtime_ns, found.st_size):
            told = json.loads(path.read_text(encoding="utf-8"))
            _read = told if isinstance(told, dict) else {}
            _state = found.st_mtime_ns, found.st_size
    except FileNotFoundError:
        _read, _state = {}, None
    except (OSError, ValueError, RecursionError):  # it is being written: what was read before holds until it can be
        pass
    return _read
