"""What a loader refuses a file for, and a streamed model a use, in words that name the thing and the remedy."""

from __future__ import annotations

from os import PathLike

from . import file_formats


class WrongFile(ValueError):
    """A sound file in the wrong place, or one that lacks what its kind must have."""

    __module__ = "fusestream"  # what ComfyUI shows before the message: not a path of the user's disk


class NotStreamable(WrongFile):
    """A model that stock may well run, but whose weights cannot be streamed."""

    __module__ = "fusestream"


class WrongInput(ValueError):
    """What a node is given and cannot serve, told with what to give it instead."""

    __module__ = "fusestream"


class NotWhileStreaming(RuntimeError):
    """Something that needs all of a model's weights at once."""

    __module__ = "fusestream"

    def __init__(self, what: str, path: str | PathLike[str]) -> None:
        """path: of the model's file."""
        super().__init__(f"{what} {file_formats.instead_of_streaming(path)}")
