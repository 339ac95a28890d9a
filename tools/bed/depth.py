"""How deep the tests go: a part of what they could try, or with `dev.py test --thorough` all of it.

Two marks stand beside tests that take long for what they tell beside others:

    @pytest.mark.deep               runs with --thorough alone
    @pytest.mark.deep("sdxl*")      its parameters of these patterns do, because another kind, storage or window stays
    @pytest.mark.every_other        every second of its parameters does

Property tests and fuzzing ask `examples`, tests of many sizes `is_thorough`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

SWITCH = "FUSESTREAM_THOROUGH"


def is_thorough() -> bool:
    """Whether the switch is on."""
    return bool(os.environ.get(SWITCH))


def examples(all_of_them: int) -> int:
    """So many of them as are to be tried."""
    return all_of_them if is_thorough() else max(all_of_them // 4, 10)


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Those that the marks leave to --thorough."""
    if is_thorough():
        return []
    found, seen = [], Counter[str]()
    for item in items:
        name, _, parameters = item.name.partition("[")
        mark = item.get_closest_marker("deep")
        is_deep = mark is not None and _is_meant(mark.args, parameters.removesuffix("]"))
        if not is_deep and item.get_closest_marker("every_other"):
            seen[f"{item.path}:{name}"] += 1
            is_deep = seen[f"{item.path}:{name}"] % 2 == 0
        if is_deep:
            found.append(item)
    return found


def _is_meant(patterns: Sequence[str], parameters: str) -> bool:
    return not patterns or any(fnmatchcase(parameters, one) for one in patterns)
