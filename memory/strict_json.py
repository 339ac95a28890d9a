"""JSON from a stranger: one object, read in bounded time and memory, or a `ValueError` that says
what is wrong.

Python's reader alone is too trusting: it keeps the last of two equal names, takes NaN and half a
surrogate pair, makes a list of 64 bytes out of every `[]`, and recurses as deep as the process
happens to allow (a custom node may have raised that limit far beyond the stack).
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

# A weight header is three levels deep.
MAX_DEPTH = 16
# Most quotes, and most brackets and commas: they cost memory beyond the text itself. A tensor needs
# a dozen of either, and Wan 14B has 1100 tensors.
MAX_PARTS = 1_000_000
# 2**64 has 20 digits. Longer numbers are no sizes, and turning them into integers takes quadratic
# time.
MAX_DIGITS = 20

_STRING = re.compile(rb'"[^"]*"')
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))


def parse(raw: bytes) -> dict[str, Any]:
    text = raw.decode("utf-8")
    _bound(raw)
    table = json.loads(
        text, object_pairs_hook=_object, parse_int=_integer, parse_float=_number, parse_constant=_constant
    )
    if not isinstance(table, dict):
        raise ValueError(f"it is a {type(table).__name__}, not an object")
    return table


def is_text(value: object) -> bool:
    r"""Whether `value` is a string that can be written and shown. JSON's escapes can spell half a
    character, such as "\ud800"."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bound(raw: bytes) -> None:
    """Refuse what is too big or too deep, before anything is built of it."""
    # Without escaped backslashes and quotes every remaining quote opens or closes a string, so that
    # only structure is left.
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > MAX_PARTS:
        raise ValueError(f"more than {MAX_PARTS // 2} texts")
    bare = _STRING.sub(b"", plain)
    brackets = bare.translate(None, _NO_BRACKET)
    if len(brackets) + bare.count(b",") > MAX_PARTS:
        raise ValueError(f"more than {MAX_PARTS} values")
    for _ in range(MAX_DEPTH):  # each turn removes the innermost brackets
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    if brackets:
        raise ValueError(f"brackets that do not pair up, or are nested more than {MAX_DEPTH} deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {name[:80]!r} comes twice")
            seen.add(name)
    return table


def _integer(digits: str) -> float | int:
    # As in other readers, "-0" and numbers that no 64 bits hold become floats, which are not
    # mistaken for a count.
    if digits == "-0" or len(digits) > MAX_DIGITS:
        return _number(digits)
    return int(digits)


def _number(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError("a number out of range")
    return number


def _constant(name: str) -> float:
    raise ValueError(f"the word {name}")
