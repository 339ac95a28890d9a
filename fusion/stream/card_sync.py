"""One sampling on several cards: a failed call on one card ends the calls on the others
(`patcher/cards.py`)."""

from __future__ import annotations


class AnotherFailed(BaseException):
    """Another card's call failed, so this one ends too. A BaseException, because no code between
    the blocks and `patcher/vram_retry.py` may catch it and go on."""


class Together:
    """One sampling, shared by the streams of its cards. error: the error of the first call that
    failed."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def failed(self, error: BaseException) -> None:
        self.error = self.error or error

    def look(self) -> None:
        """Raises `AnotherFailed` where another card's call has failed."""
        if self.error is not None:
            raise AnotherFailed
