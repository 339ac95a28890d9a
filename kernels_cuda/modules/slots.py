"""Places in a fused network: for a Sequential, or for the modules of a chain.

The network's own modules are kept, and so are its parameters' names, because a place shares the
dictionaries of the module that it replaces. While torch traces, everything computes as before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from .conv_norm_act import FusedConvNormAct2d
from .fallback import traced
from .upsample_conv import FusedUpsampleConv2d

SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
# attribute of a tensor: the place that computed it, with everything behind that place in the chain
MARK = "fusestream_done_by"


class Step(NamedTuple):
    """Neighbours of a Sequential, by name, and the module that computes them."""

    parts: dict[str, nn.Module]
    fused: nn.Module


def disturbed(parts: Sequence[nn.Module]) -> bool:
    """Whether modules have come to do more than their class does since they were fused."""
    for part in parts:
        if part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__:
            return True
        if part.training and isinstance(part, nn.Dropout):
            return True
    return False


KEEPING = (FusedConvNormAct2d, FusedUpsampleConv2d)  # these keep values made of their weights


def refold(fused: nn.Module) -> None:
    """Make a fused module derive its weights anew, because writes to inference parameters are not
    counted."""
    if isinstance(fused, KEEPING):
        fused.refold()


def forget(fused: nn.Module) -> None:
    """Make a fused module drop its derived weights, because `.to()` is called to free memory, and a
    fused module is no child and so does not hear of it."""
    if isinstance(fused, KEEPING):
        fused.forget()


class FusedSequential(nn.Sequential):
    """A Sequential that computes some of its neighbours together. Its parts are the original's, for
    code that takes one of them."""

    _original: nn.Sequential | None = None
    _steps: tuple[Step, ...] = ()

    @staticmethod
    def over(original: nn.Sequential, steps: Sequence[Step]) -> FusedSequential:
        made = FusedSequential()
        made.__dict__.update(original.__dict__)  # attributes set by others are kept
        made.__dict__.update(_original=original, _steps=tuple(steps), training=original.training)
        return made

    def forward(self, x: Any) -> Any:
        if traced():
            return super().forward(x)  # type: ignore[no-untyped-call]
        starts = {next(iter(step.parts)): step for step in self._steps}
        names = list(self._modules)
        at = 0
        while at < len(names):
            step = starts.get(names[at])
            if step is not None and self._stands(step, names[at : at + len(step.parts)]):
                x, at = step.fused(x), at + len(step.parts)
            else:
                x, at = self._modules[names[at]](x), at + 1
        return x

    def train(self, mode: bool = True) -> FusedSequential:
        super().train(mode)
        for step in self._steps:
            step.fused.train(mode)
        return self

    def __getitem__(self, which: Any) -> Any:
        """A part, or a plain Sequential of some."""
        if not isinstance(which, slice):
            return super().__getitem__(which)
        return nn.Sequential(OrderedDict(list(self._modules.items())[which]))

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        for step in self._steps:
            refold(step.fused)
        super()._load_from_state_dict(*arguments, **options)

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        for step in self._steps:
            forget(step.fused)
        return super()._apply(*arguments, **options)  # type: ignore[no-untyped-call]

    def _stands(self, step: Step, names: list[str]) -> bool:
        """Whether the neighbours are the same as when they were fused."""
        same = names == list(step.parts) and all(self._modules[name] is part for name, part in step.parts.items())
        return same and not disturbed(list(step.parts.values()))


class Place(nn.Module):
    """Stands for a module that begins a chain, or that the chain's beginning computes."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__.update({name: original.__dict__[name] for name in SHARED})
        self.__dict__.update(_original=original, training=original.training)

    def __getattr__(self, name: str) -> Any:
        """Look up missing attributes in the original, because a network reads its layers' sizes."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_original" not in self.__dict__:
                raise
            return getattr(self.__dict__["_original"], name)

    def train(self, mode: bool = True) -> Place:
        super().train(mode)
        self._original.train(mode)
        return self


class Beginning(Place):
    """Computes a whole chain."""

    def __init__(self, original: nn.Module, parts: Sequence[nn.Module], fused: nn.Module) -> None:
        super().__init__(original)
        # Not children, because their parameters have names already. places: this one, and those of
        # the other parts.
        self.__dict__.update(_parts=tuple(parts), _fused=fused, _places=[self])

    def forward(self, x: Tensor) -> Tensor:
        if traced() or disturbed([*self._parts, *self._places]):
            made: Tensor = self._original(x)
            return made
        made = self._fused(x)
        setattr(made, MARK, self)
        return made

    def train(self, mode: bool = True) -> Beginning:
        super().train(mode)
        self._fused.train(mode)
        return self

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        refold(self._fused)
        super()._load_from_state_dict(*arguments, **options)

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        forget(self._fused)
        return super()._apply(*arguments, **options)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        return f"computes {', '.join(type(part).__name__ for part in self._parts)} as {type(self._fused).__name__}"


class Covered(Place):
    """Passes on what the beginning of its chain has computed; anything else goes through the
    original module."""

    def __init__(self, original: nn.Module, beginning: Beginning) -> None:
        super().__init__(original)
        self.__dict__["_beginning"] = beginning
        beginning._places.append(self)

    def forward(self, x: Tensor) -> Tensor:
        if getattr(x, MARK, None) is self._beginning:
            return x
        made: Tensor = self._original(x)
        return made

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        refold(self._beginning._fused)
        super()._load_from_state_dict(*arguments, **options)

    def extra_repr(self) -> str:
        return f"{type(self._original).__name__}, computed by the place before it"
