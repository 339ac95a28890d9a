"""The user's files: the settings of ComfyUI's dialog, and the times of steps.

The settings are read whenever their file has changed. With several users on one server the first
one's file counts, because memory belongs to the machine. The times of steps are kept between two
starts, among ComfyUI's own data, which no page can read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import folder_paths

from . import between_prompts
from .front_end import running_server

# The names in nodes/web/js.
METER, RESERVE, RAM = "FuseStream.Meter.Enabled", "FuseStream.Memory.Reserve", "FuseStream.Memory.RAM"
PREVIEW = "FuseStream.Preview.Moving"
STEP_TIMES = "step-times.json"

_read: dict[str, Any] = {}
_state: tuple[int, int] | None = None
_are_applied = False  # whether a loader has run; before, settings have nothing to apply to
_are_times_read = False


def attach() -> None:
    """Let a changed setting hold from the next prompt on, also for loaded models. Called once."""
    between_prompts.always(write_step_times)
    server = running_server()
    if server is not None:
        server.add_on_prompt_handler(_before_a_prompt)


def value(name: str, default: Any) -> Any:
    return _settings().get(name, default)


def apply() -> None:
    """Apply the settings. Called by loaders, before they load."""
    from ...fusion.stream import limits  # noqa: PLC0415 - the server starts without it

    global _are_applied  # noqa: PLW0603 - of the one server that a process has
    _are_applied = True
    limits.apply(limits.Limits.of(value(RESERVE, 0), value(RAM, 0)))


def _before_a_prompt(body: dict[str, Any]) -> dict[str, Any]:
    if _are_applied:
        apply()
    return body


def _settings() -> dict[str, Any]:
    """The settings; empty if the file is missing or holds something else."""
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
    # It is being written: the last settings hold meanwhile.
    except (OSError, ValueError, RecursionError):
        pass
    return _read


# ------------------------------------------------------------------------------------------------------- the times of steps


def path_of_step_times() -> Path:
    return Path(folder_paths.get_system_user_directory("fusestream")) / STEP_TIMES


def read_step_times() -> None:
    """Read the times of earlier starts, once. Called by nodes that run."""
    global _are_times_read  # noqa: PLW0603 - of the one file that a process has
    if not _are_times_read:
        from ...fusion.sampling import measured  # noqa: PLC0415 - the server starts without it

        _are_times_read = True
        measured.read(path_of_step_times())


def write_step_times() -> None:
    """Write the times after a prompt. Before a loader has run there are none to keep."""
    if _are_times_read:
        from ...fusion.sampling import measured  # noqa: PLC0415

        measured.write(path_of_step_times())
