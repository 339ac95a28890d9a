"""The errors with which a loader refuses a file and a streamed model a use. Their words name the
thing and the remedy."""

from __future__ import annotations

from os import PathLike

from . import file_formats


class WrongFile(ValueError):
    """A sound file in the wrong place, or one that lacks what its kind must have."""

    # ComfyUI shows this before the message, instead of a path of the user's disk
    __module__ = "fusestream"


class NotStreamable(WrongFile):
    """A model that stock may be able to run, but whose weights cannot be streamed."""

    __module__ = "fusestream"


class WrongInput(ValueError):
    """An input that a node cannot serve. The message says what to give it instead."""

    __module__ = "fusestream"


class NotWhileStreaming(RuntimeError):
    """A use that needs all of a model's weights at once."""

    __module__ = "fusestream"

    def __init__(self, what: str, path: str | PathLike[str]) -> None:
        """path: of the model's file."""
        super().__init__(f"{what} {file_formats.instead_of_streaming(path)}")
