"""Before which part of its names a file has a diffusion model: nothing, or what a whole checkpoint puts there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...memory import WeightFile


def prefix_of(header: WeightFile, part: re.Pattern[str], beside: Iterable[str]) -> str | None:
    """None: the file has no such model.

    part    a name in one of its blocks, whose first group is the prefix. Any block will do: a file that lacks one is a model of the
            family all the same
    beside  names of which it has at least one, and relatives with such blocks have none
    """
    names = header.extents.keys()
    found = (match[1] for name in names if (match := part.fullmatch(name)) is not None)
    return next((prefix for prefix in found if any(prefix + name in names for name in beside)), None)
