"""What takes time beside a node's own work, told to the page: a line of words and a bar below the node that runs.

Kernels are measured in the middle of a sampler's first step, and the sampler's own bar counts steps.
"""

from __future__ import annotations

import time

from . import notices
from .front_end import running_node, tell

EVENT = "fusestream.activity"
EVERY = 0.1  # seconds between two messages

_last = 0.0


def attach() -> None:
    """Let `fusion` tell the page, also what it warns of. Called by nodes that run, as often as they like."""
    from ..fusion.stream import progress  # noqa: PLC0415 - the server starts without it

    progress.show_with(show)
    notices.attach()


def show(op: str, done: int, of: int) -> None:
    """This operation's kernels are being measured. The page has the words for it, in the user's language."""
    global _last  # noqa: PLW0603 - when the page was told last
    now = time.monotonic()
    if now - _last < EVERY:
        return
    _last = now
    tell(EVENT, {"node": running_node(), "measuring": op, "done": done, "of": of})
