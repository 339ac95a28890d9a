"""The group norms of a network's call, in their order.

A group norm reads whole pictures, and a band has but its rows. So the bands take the statistics of a
call on a smaller version of the picture (`reduced.py`), and all bands take the same: between two of
them there is no seam. Frames are all there in the smaller version, and stock's code divides them into
the same pieces. So the so-manieth group norm of one call is that of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .rules import aten, named
from .tensor import Banded, Unreadable

AT_ONCE = 1 << 24  # values that are converted to FP32 at a time


@dataclass(frozen=True)
class Norm:
    """What a group norm was given: so many samples of channels in groups.

    mean, rstd  [samples, groups] FP32, of the values of a group; None: nothing is computed
    """

    samples: int
    channels: int
    groups: int
    mean: Tensor | None = None
    rstd: Tensor | None = None

    def is_like(self, other: Norm) -> bool:
        """Whether both norm as many samples, channels and groups."""
        return (self.samples, self.channels, self.groups) == (other.samples, other.channels, other.groups)


def same(some: Sequence[Norm], others: Sequence[Norm]) -> bool:
    """Whether two calls have the same group norms."""
    return len(some) == len(others) and all(one.is_like(other) for one, other in zip(some, others, strict=True))


class Norms(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The group norms of bands while one call runs.

    known  their statistics; None: those of this call are recorded, so its band is a whole picture
    met    the group norms of this call
    """

    def __init__(self, known: Sequence[Norm] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = known
        self.met: list[Norm] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_norm = func.overloadpacket is aten.group_norm and isinstance(args[0], Banded)
        if not is_norm or args[0].axis is None:
            return func(*args, **kwargs)
        given = named(func, args, kwargs)
        x, groups = given["input"], given["num_groups"]
        if x.axis < 2:
            raise Unreadable("a group norm's channels are cut")
        norm = Norm(x.shape[0], x.shape[1], groups)
        if x.held.is_meta:
            made = torch.empty_like(x.held)
            if self._known is not None:
                self._next(norm)
        else:
            norm = recorded(x.held, norm, given.get("eps", 1e-5)) if self._known is None else self._next(norm)
            made = normed(x.held, norm, given.get("weight"), given.get("bias"))
        self.met.append(norm)
        return x.like(made, x.axis, x.span, x.whole)

    def _next(self, norm: Norm) -> Norm:
        assert self._known is not None
        at = len(self.met)
        if at >= len(self._known) or not self._known[at].is_like(norm):
            raise Unreadable("a band meets other group norms than a smaller picture")
        return self._known[at]

    def end(self) -> None:
        """The call is over."""
        if self._known is not None and len(self.met) != len(self._known):
            raise Unreadable("a band meets fewer group norms than a smaller picture")


def recorded(x: Tensor, norm: Norm, eps: float) -> Norm:
    """The statistics of x [samples, channels, ...], in FP32 whatever its type."""
    groups = x.reshape(norm.samples * norm.groups, -1)
    found = [
        torch.var_mean(some.float(), 1, correction=0)
        for some in torch.split(groups, max(1, AT_ONCE // groups.shape[1]))
    ]
    variance, mean = (torch.cat(each).view(norm.samples, norm.groups) for each in zip(*found, strict=True))
    return replace(norm, mean=mean, rstd=(variance + eps).rsqrt())


def normed(x: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """x [samples, channels, ...], normed by these statistics; of x's type, computed in FP32.

    weight, bias  [channels]
    """
    assert norm.mean is not None and norm.rstd is not None
    each = norm.channels // norm.groups
    means, variances = (one.repeat_interleave(each, 1) for one in (norm.mean, norm.rstd.pow(-2)))
    weight, bias = _in_fp32(weight, x, 1.0), _in_fp32(bias, x, 0.0)
    if norm.samples == 1 or x.stride(0) == norm.channels * x.stride(1):
        one = x.view(1, norm.samples * norm.channels, *x.shape[2:])
        made = _by_channel(
            one, weight.repeat(norm.samples), bias.repeat(norm.samples), means.flatten(), variances.flatten()
        )
        return made.view(x.shape)
    made = torch.empty_like(x)
    for at in range(norm.samples):
        made[at : at + 1] = _by_channel(x[at : at + 1], weight, bias, means[at], variances[at])
    return made


def _by_channel(x: Tensor, weight: Tensor, bias: Tensor, means: Tensor, variances: Tensor) -> Tensor:
    """One pass over x, without a copy of it in FP32."""
    return torch.batch_norm(x, weight, bias, means, variances, False, 0.0, 0.0, False)


def _in_fp32(given: Tensor | None, x: Tensor, otherwise: float) -> Tensor:
    """A norm's weight or bias [channels]."""
    if given is None:
        return torch.full((x.shape[1],), otherwise, dtype=torch.float32, device=x.device)
    return given.to(x.device, torch.float32)
