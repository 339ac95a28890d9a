"""A call's arguments as a key and tensors: what two calls must have in common to be the same work.

What is not known through and through is unfit: a class of somebody's own may compute with more than its items or fields.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class Unfit(Exception):
    """What a call is given that no graph can be keyed by, in words a user understands."""


PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size, torch.memory_format)


def _is_plain(kind: type) -> bool:
    return issubclass(kind, PLAIN)


# Whether what is of a type is a value, which two calls may have in common. Asked of every argument of every call.
is_plain: Callable[[Any], bool] = functools.cache(_is_plain)


def taken_apart(value: Any, tensors: list[Tensor], device: torch.device) -> Hashable:
    """What `value` is but for its tensors' numbers. Its tensors are added to `tensors`, each once. Raises Unfit."""
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
    """A list or tuple, or a named tuple."""
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
    """The same value with these tensors in the places of its own, in the order of `taken_apart`."""
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
    given = [field.name for field in dataclasses.fields(value) if field.init]  # the others are made of these
    made = {name: put_together(getattr(value, name), tensors, known) for name in given}
    same = all(made[name] is getattr(value, name) for name in made)
    return value if same else dataclasses.replace(value, **made)


def span(tensor: Tensor) -> Tensor:
    """All of its memory from its first element to its last, gaps too, in one row."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((elements if tensor.numel() else 0,), (1,))


def own_copy(tensor: Tensor) -> Tensor:
    """A tensor like this one, strides and all, in memory of its own, with its numbers."""
    with torch.inference_mode(False), torch.no_grad():
        room = torch.empty_like(span(tensor))
    return room.copy_(span(tensor)).as_strided(tensor.shape, tensor.stride(), 0)


def same_numbers(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether tensors of the same forms have the same bytes. Waits for the device."""
    return all(
        torch.equal(span(a).view(torch.uint8), span(b).view(torch.uint8)) for a, b in zip(one, other, strict=True)
    )
