"""What is said where a file cannot be quantised."""

from __future__ import annotations


class CannotQuantise(ValueError):
    """A file that is not to be quantised, or not so. The message names the file and the remedy."""
