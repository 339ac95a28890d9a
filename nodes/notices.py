"""What `fusion` warns of while a graph runs, told to the page, which shows it as a toast: in the log hardly anybody sees it. And
how fast a text was written, on the node that asked for it."""

from __future__ import annotations

from .front_end import running_node, tell, write_on

EVENT = "fusestream.notice"


def attach() -> None:
    """Let `fusion` tell the page. Called by nodes that run, as often as they like."""
    from ..fusion.base import notices  # noqa: PLC0415 - the server starts without it
    from ..fusion.text import token_rate  # noqa: PLC0415

    notices.listen(show)
    token_rate.listen(show_on_node)


def show_on_node(words: str) -> None:
    """As text on the node that runs now."""
    write_on(running_node(), words)


def show(sentence: str) -> None:
    """About the node that runs now."""
    tell(EVENT, {"node": running_node(), "sentence": sentence})
