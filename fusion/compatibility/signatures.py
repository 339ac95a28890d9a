"""Compares the parameters of a stock method and of ours that stands in for it: by name, in order,
with their defaults.

A parameter that only stock's method takes would be lost without a word, or break the call. One that
only ours takes does no harm if it has a default. A method that takes any names is taken to pass
them on or look at them, unless its parameter for them begins with an underscore: then it drops
them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator
from typing import Any

EMPTY = inspect.Parameter.empty
ANY_NAMES, ANY_NUMBER = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL


def differences(ours: type, stock: type) -> Iterator[str]:
    """Differences in all methods that our class defines and stock's has, in words that begin with
    the method."""
    for name, method in vars(ours).items():
        theirs = getattr(stock, name, None)
        if inspect.isfunction(method) and inspect.isfunction(theirs) and not name.startswith("__"):
            yield from same_parameters(method, theirs)


def same_parameters(
    ours: Callable[..., Any], stock: Callable[..., Any], needless: Container[str] = ()
) -> Iterator[str]:
    """Differences in stock's parameters that ours does not have as they are. needless: parameters
    of stock's, as "method.parameter", that may be lost."""
    own, theirs = (inspect.signature(function).parameters for function in (ours, stock))
    passes_on = any(each.kind is ANY_NAMES and not each.name.startswith("_") for each in own.values())
    takes_more, theirs_takes_more = (any(p.kind is ANY_NUMBER for p in each.values()) for each in (own, theirs))
    name = stock.__qualname__
    known = [each for each in theirs.values() if each.kind not in (ANY_NAMES, ANY_NUMBER)]
    for i, parameter in enumerate(known):
        if (ours_too := own.get(parameter.name)) is None:
            if not passes_on and f"{stock.__name__}.{parameter.name}" not in needless:
                yield f"{name} takes {parameter.name}"
        elif _default(ours_too) != _default(parameter) and not _is_our_none(ours_too, parameter):
            yield f"{name} has another default for {parameter.name}: {parameter.default!r}"
        elif _is_by_place(ours_too, parameter, takes_more) and list(own).index(parameter.name) != i:
            yield f"{name} takes {parameter.name} in another place"
    for ours_too in own.values():
        is_needed = ours_too.default is EMPTY and ours_too.kind not in (ANY_NAMES, ANY_NUMBER)
        by_place = theirs_takes_more and ours_too.kind is not inspect.Parameter.KEYWORD_ONLY
        if is_needed and ours_too.name not in theirs and not by_place:
            yield f"{name} takes no {ours_too.name} any more"


def _is_by_place(ours: inspect.Parameter, stock: inspect.Parameter, takes_more: bool) -> bool:
    """Whether stock may pass it by place, and ours takes it so. A keyword of ours may stand behind
    any number of places."""
    named = inspect.Parameter.KEYWORD_ONLY
    return stock.kind is not named and (ours.kind is not named or not takes_more)


def _default(parameter: inspect.Parameter) -> Any:
    """The default, but None for a list, a dictionary or an empty tuple, because calls without the
    argument may have written to a mutable default."""
    value = parameter.default
    is_none = isinstance(value, dict | list) or (isinstance(value, tuple) and not value)
    return None if is_none else value


def _is_our_none(ours: inspect.Parameter, stock: inspect.Parameter) -> bool:
    """Whether ours may be left out and stock's must be given, so that stock always gives it."""
    return ours.default is None and stock.default is EMPTY
