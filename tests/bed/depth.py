"""How deep property tests, fuzzing and hostile use go: a part of their examples, or with `dev.py test --thorough` all of them."""

from __future__ import annotations

import os

SWITCH = "FUSESTREAM_THOROUGH"


def is_thorough() -> bool:
    """Whether the switch is on."""
    return bool(os.environ.get(SWITCH))


def examples(all_of_them: int) -> int:
    """So many of them as are to be tried."""
    return all_of_them if is_thorough() else max(all_of_them // 4, 10)
