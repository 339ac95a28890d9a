"""What `fusion` warns of while a graph runs, told to the page, which shows it as a toast: in the log hardly anybody sees it."""

from __future__ import annotations

from .front_end import running_node, tell

EVENT = "fusestream.notice"


def attach() -> None:
    """Let `fusion` tell the page. Called by nodes that run, as often as they like."""
    from ..fusion import notices  # noqa: PLC0415 - the server starts without it

    notices.listen(show)


def show(sentence: str) -> None:
    """About the node that runs now."""
    tell(EVENT, {"node": running_node(), "sentence": sentence})
