"""Where the times of steps are kept between two starts: a file among ComfyUI's own data, which no page can ask for."""

from __future__ import annotations

from pathlib import Path

import folder_paths

from . import between_prompts

FILE = "step-times.json"

_was_read = False


def attach() -> None:
    """Called once."""
    between_prompts.always(write)


def path() -> Path:
    return Path(folder_paths.get_system_user_directory("fusestream")) / FILE


def read() -> None:
    """What earlier starts have kept, once. Called by nodes that run."""
    global _was_read  # noqa: PLW0603 - of the one file that a process has
    if not _was_read:
        from ..fusion.sampling import measured  # noqa: PLC0415 - the server starts without it

        _was_read = True
        measured.read(path())


def write() -> None:
    """After a prompt. Before one has loaded a model there is nothing to keep."""
    if _was_read:
        from ..fusion.sampling import measured  # noqa: PLC0415

        measured.write(path())
