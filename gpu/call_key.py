"""A call's arguments as a key and tensors. Two calls with the same key are the same work.

A value that is not known through and through is unfit, because an unknown class may compute with
more than its items or fields.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class Unfit(Exception):
    """An argument that no graph can be keyed by, in words for a user."""


PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size, torch.memory_format)


def _is_plain(kind: type) -> bool:
    return issubclass(kind, PLAIN)


# Whether objects of a type are values, which two calls may have in common. Cached, because every
# argument of every call is asked.
is_plain: Callable[[Any], bool] = functools.cache(_is_plain)


def taken_apart(value: Any, tensors: list[Tensor], device: torch.device) -> Hashable:
    """The key of `value`: everything but its tensors' numbers. Its tensors are added to `tensors`,
    each once. Raises Unfit."""
    kind: Any = type(value)
    if is_plain(kind):
        return kind, value
    if isinstance(value, Tensor):
        return _place_of(value, tensors, device)
    if kind is dict:
        return kind, tuple([(key, taken_apart(each, tensors, device)) for key, each in value.items()])
    if _is_sequence(value):
        return kind, tuple([taken_apart(each, tensors, device) for each in value])
    if dataclasses.is_dataclass(value) and kind.__dataclass_params__.frozen:
        fields = (getattr(value, field.name) for field in dataclasses.fields(value))
        return kind, tuple([taken_apart(each, tensors, device) for each in fields])
    raise Unfit(f"it is given a {kind.__name__}")


def _is_sequence(value: Any) -> bool:
    """Whether it is a list, a tuple or a named tuple."""
    return type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields"))


def _place_of(value: Tensor, tensors: list[Tensor], device: torch.device) -> Hashable:
    if type(value) not in (Tensor, torch.nn.Parameter):
        raise Unfit(f"it is given a {type(value).__name__}")
    if value.device != device:
        raise Unfit(f"it is given a tensor on the {value.device.type.upper()}")
    if value.requires_grad and torch.is_grad_enabled():
        raise Unfit("a gradient is wanted")
    known = [id(tensor) for tensor in tensors]
    number = known.index(id(value)) if id(value) in known else len(tensors)
    if number == len(tensors):
        tensors.append(value)
    return Tensor, number, value.shape, value.stride(), value.dtype


def put_together(value: Any, tensors: Iterator[Tensor], known: dict[int, Tensor] | None = None) -> Any:
    """`value` with its tensors replaced by these, in the order of `taken_apart`."""
    known = {} if known is None else known
    if isinstance(value, Tensor):
        if id(value) not in known:
            known[id(value)] = next(tensors)
        return known[id(value)]
    kind: Any = type(value)
    if is_plain(kind):
        return value
    if kind is dict:
        return {key: put_together(each, tensors, known) for key, each in value.items()}
    if _is_sequence(value):
        parts = [put_together(each, tensors, known) for each in value]
        return kind(*parts) if hasattr(value, "_fields") else kind(parts)
    # the other fields are made of these
    given = [field.name for field in dataclasses.fields(value) if field.init]
    made = {name: put_together(getattr(value, name), tensors, known) for name in given}
    same = all(made[name] is getattr(value, name) for name in made)
    return value if same else dataclasses.replace(value, **made)


def span(tensor: Tensor) -> Tensor:
    """All memory of a tensor, from its first element to its last with the gaps, as one row."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((elements if tensor.numel() else 0,), (1,))


def own_copy(tensor: Tensor) -> Tensor:
    """A copy of the tensor, strides included, in memory of its own."""
    with torch.inference_mode(False), torch.no_grad():
        room = torch.empty_like(span(tensor))
    return room.copy_(span(tensor)).as_strided(tensor.shape, tensor.stride(), 0)


def same_numbers(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether tensors of the same forms have the same bytes. Waits for the device."""
    return all(
        torch.equal(span(a).view(torch.uint8), span(b).view(torch.uint8)) for a, b in zip(one, other, strict=True)
    )
