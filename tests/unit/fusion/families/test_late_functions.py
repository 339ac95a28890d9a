"""A family's functions that are imported when they are called: they are there, and of the type of the family's field.

mypy sees a `Late` as a function of anything, so what it would ask is asked here.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from fusestream.fusion.base.cost import Cost
from fusestream.fusion.base.family import Family, Late
from fusestream.fusion.base.specimen import Specimen
from fusestream.fusion.base.trained_sparse import TrainedSparse
from fusestream.fusion.families import FAMILIES
from fusestream.kernels_cuda import KernelPolicy
from fusestream.memory import WeightFile

# What the fields' types name, which that module imports for types alone.
NAMES = {
    "torch": torch,
    "Cost": Cost,
    "Specimen": Specimen,
    "KernelPolicy": KernelPolicy,
    "TrainedSparse": TrainedSparse,
    "WeightFile": WeightFile,
}
FIELDS = typing.get_type_hints(Family, localns=NAMES)


def late_ones() -> Iterator[tuple[str, str, Late, int]]:
    """Family, field, the function, and how many of its arguments are given already."""
    for family in FAMILIES:
        for field in dataclasses.fields(family):
            value = getattr(family, field.name)
            given = value.args if isinstance(value, partial) else ()
            found = value.func if isinstance(value, partial) else value
            if isinstance(found, Late):
                yield family.words, field.name, found, len(given)


def unlike(function: Callable[..., Any], given: int, field: Any) -> str:
    """How a function differs from the type of a field: its arguments behind those that are given, and its result."""
    asked = next(
        kind for kind in (field, *typing.get_args(field)) if typing.get_origin(kind) is collections.abc.Callable
    )
    arguments, result = typing.get_args(asked)
    hints = typing.get_type_hints(function, localns=NAMES)
    names = list(inspect.signature(function).parameters.values())[given:]
    try:
        inspect.signature(function).bind(*range(given + len(arguments)))
    except TypeError as error:
        return str(error)
    wrong = [
        f"{one.name} is {hints[one.name]}, not {kind}"
        for one, kind in zip(names, arguments, strict=False)
        if Any not in (kind, hints[one.name]) and not fits(kind, hints[one.name])
    ]
    return "; ".join([*wrong, *([] if fits(hints["return"], result) else [f"gives {hints['return']}, not {result}"])])


def fits(made: Any, asked: Any) -> bool:
    """Whether a value of the one type serves where another is asked for."""
    if made == asked or Any in (made, asked):
        return True
    if isinstance(asked, types.UnionType) or typing.get_origin(asked) is typing.Union:
        ones = typing.get_args(made) if isinstance(made, types.UnionType) else (made,)
        return all(any(fits(one, kind) for kind in typing.get_args(asked)) for one in ones)
    plain, wanted = typing.get_origin(made) or made, typing.get_origin(asked) or asked
    inner = zip(typing.get_args(made), typing.get_args(asked), strict=False)
    return isinstance(plain, type) and issubclass(plain, wanted) and all(fits(*pair) for pair in inner)


@pytest.mark.parametrize(
    ("field", "late", "given"), [pytest.param(*rest, id=f"{words} {rest[0]}") for words, *rest in late_ones()]
)
def test_a_late_function_is_of_its_fields_type(field: str, late: Late, given: int) -> None:
    assert not unlike(late.function, given, FIELDS[field])


def test_a_function_of_another_type_is_found_out() -> None:
    def cost(net: Any, shape: str) -> Cost | None: ...

    def need(net: Any) -> float: ...

    def fuse(net: Any, policy: KernelPolicy) -> str: ...

    assert "shape is" in unlike(cost, 0, FIELDS["cost"])
    assert "too many" in unlike(need, 0, FIELDS["need"])
    assert "gives" in unlike(fuse, 0, FIELDS["fuse"])
