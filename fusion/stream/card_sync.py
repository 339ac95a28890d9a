"""What the cards of one sampling have to hear of each other (`cards.py`)."""

from __future__ import annotations


class AnotherFailed(BaseException):
    """A call of another card did, so this one ends too. No Exception, since nobody between the
    blocks and `patcher/vram_retry.py` may go on."""


class Together:
    """Of one sampling, shared by the streams of its cards. error: what ended the first call that did not end well."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def failed(self, error: BaseException) -> None:
        self.error = self.error or error

    def look(self) -> None:
        """Raises where another card's call has failed."""
        if self.error is not None:
            raise AnotherFailed
