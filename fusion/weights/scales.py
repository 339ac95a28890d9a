"""The scales of quantised weights.

A scale for a weight, or for each of its rows, is small: it stays on the device beside the model. The
scales of groups are not: they are a ninth of an NVFP4 file, and as much of other files of 4 bits.
They are paged like the numbers that they belong to, as weights of the same layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .meta_tensor import META, StandIn
from .storage import is_quantised, stored


@dataclass(frozen=True)
class PagedScale:
    """A tensor of scales that lives in the pager.

    name      its name within the block
    field     of ComfyUI's parameters of a quantised weight
    stand_in  shape and type
    """

    name: str
    field: str
    stand_in: Tensor


def of_groups(name: str, weight: Any) -> tuple[PagedScale, ...]:
    """The scales of a weight's groups that are tensors of the file. name: the weight's within its block."""
    if not is_quantised(weight):
        return ()
    rows = stored(weight).shape[0]
    return tuple(
        PagedScale(f"{name}.{field}", field, scale)
        for field, scale in _unread(weight._params)
        if scale.extent is not None and not scale.extent.is_packed and scale.numel() > rows
    )


def read(params: Any, paged: tuple[PagedScale, ...] = ()) -> Any:
    """ComfyUI's parameters of a quantised weight with the scales' bytes; those that are paged have none."""
    bare = {one.field: one.stand_in for one in without_file(paged)}
    return dataclasses.replace(
        params, **{field: bare[field] if field in bare else scale.read() for field, scale in _unread(params)}
    )


def without_file(paged: tuple[PagedScale, ...]) -> tuple[PagedScale, ...]:
    """The same scales without their reference to the file, because the pager reads it."""
    return tuple(
        dataclasses.replace(one, stand_in=torch.empty_like(one.stand_in.as_subclass(Tensor), device=META))
        for one in paged
    )


def on_device(params: Any, device: torch.device) -> Any:
    """The same parameters with all scales on a device that are not paged."""
    moved = {name: scale.to(device) for name, scale in tensors(params) if not scale.is_meta}
    return dataclasses.replace(params, **moved)


def joined(params: Any, paged: tuple[PagedScale, ...], brought: Mapping[str, Tensor]) -> Any:
    """The same parameters with the paged scales as they were brought, by their names."""
    return dataclasses.replace(params, **{one.field: brought[one.name] for one in paged}) if paged else params


def as_parameter(weight: Any) -> nn.Parameter:
    """A weight as a module holds it. torch would detach a quantised one, which copies its scales."""
    if not is_quantised(weight):
        return nn.Parameter(weight, requires_grad=False)
    weight._is_param = True
    found: nn.Parameter = weight
    return found


def tensors(params: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors among ComfyUI's parameters of a quantised weight, by field."""
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if isinstance(value, Tensor):
            yield field.name, value


def _unread(params: Any) -> Iterator[tuple[str, StandIn]]:
    for field, scale in tensors(params):
        if isinstance(scale, StandIn):
            yield field, scale
