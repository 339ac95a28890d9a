"""How a block's weights come to it when it is called, and go.

They are put in around the `__call__` of the modules through which a block, or a part of one, is
entered: its doors. A subclass made for that does it. Stock's hook for blocks,
`patches_replace["dit"][("double_block", i)]`, will not do for it: it is not asked for VACE's side
branch, and another node that replaces the same block takes our place, weights and all. Torch's
module hooks will not do either: an interrupt of ComfyUI is a BaseException, after which torch calls
no hook, and the weights would stay where they are. Around `__call__` there is a `finally`, and
whatever other nodes do to `forward` or with the block hook happens inside.

A network may enter its blocks by other methods too: Wan-Animate-2 calls `forward_pose` and
`forward_gen` of each block. So every method that a door's class has from stock and that is given a
tensor brings the weights, unless they are there, as from within the block's own call.

Where what a block makes of a text is kept, the weights that make it are behind doors of their own:
the module that attends to texts, for whoever computes it otherwise than we do, and those that have
them. Our code asks `of_text`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...gpu.graphed_calls import Settled
from ..base.errors import NotWhileStreaming
from ..base.hooks import ENTERED, STREAMED, STREAMED_TEXT
from ..base.malloc_graphs import paused
from ..base.subclassing import mix
from .blocks import Parameters
from .text_kv import Compute

NOWHERE = (None, None)  # of a module that does not stream
OURS = __name__.removesuffix("stream.block_hooks")  # how the names of the pack's own modules begin


class BlockSource(Protocol):
    """The owner of the blocks' weights: `BlockStream`."""

    @property
    def path(self) -> Path: ...
    def enter(self, i: int) -> Parameters | None: ...
    def leave(self, i: int, before: Parameters | None) -> None: ...
    def taken_over(self, module: nn.Module, i: int | None) -> int | None: ...
    def settled(self) -> Settled: ...
    def of_text(
        self, i: int, context: Tensor, depends: Hashable, compute: Compute, *, is_steady: bool
    ) -> Sequence[Tensor]: ...


def leads(door: nn.Module, stream: BlockSource, i: int | None) -> None:
    """From now on whoever calls the door finds block i of the stream behind it; None: nothing that
    is paged by itself."""
    mix(door, _Streamed, **{STREAMED: (stream, i), STREAMED_TEXT: None, ENTERED: False})


def leads_to_text(door: nn.Module, i: int) -> None:
    """And block i beside, which makes what is kept of texts."""
    door.__dict__[STREAMED_TEXT] = i


class _Streamed:
    """What a block's class is mixed with."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if _Streamed in cls.__bases__:  # another one's subclass has these methods from it
            for name, method in _methods_of(cls):
                setattr(cls, name, _entering(cls, name, method))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stream, i = self.__dict__[STREAMED]
        if "forward" in self.__dict__:
            i = stream.taken_over(self, i)
        text = self.__dict__[STREAMED_TEXT]
        if i is None and text is None:
            if torch.compiler.is_compiling():
                return super().__call__(*args, **kwargs)  # type: ignore[misc]
            before, self.__dict__[ENTERED] = self.__dict__[ENTERED], True
            try:
                return super().__call__(*args, **kwargs)  # type: ignore[misc]
            finally:
                self.__dict__[ENTERED] = before
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            _refuse_gradients(stream, (*args, *kwargs.values()))
        if text is not None:
            return _held(stream, [i, text], super().__call__, *args, **kwargs)  # type: ignore[misc]
        before = _enter(stream, i)
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            _leave(stream, i, before)


def _methods_of(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """The methods by which a network may enter a module of this class, beside a call: those that it
    has from stock or another node. One of stock's operations is called, and its other methods are
    about its weights, not with them."""
    if hasattr(kind, "comfy_cast_weights"):
        return
    for name in set(dir(kind)).difference(dir(nn.Module)):
        method = next((vars(one)[name] for one in kind.__mro__ if name in vars(one)), None)
        if isinstance(method, FunctionType) and not method.__module__.startswith((OURS, "torch.")):
            yield name, method


def _entering(kind: type, name: str, method: Any) -> Any:
    """The same for a door, which brings its weights. Which method that is, is looked up at each
    call: another node may have put its own into stock's class since."""

    @functools.wraps(method)
    def entering(self: Any, *args: Any, **kwargs: Any) -> Any:
        stream, i = self.__dict__[STREAMED]
        compute = getattr(super(kind, self), name)
        numbers = [one for one in (i, self.__dict__[STREAMED_TEXT]) if one is not None]
        is_compiled = torch.compiler.is_compiling()
        if not is_compiled and numbers and all(map(stream.is_in_use, numbers)):
            return compute(*args, **kwargs)
        if not _has_tensors((*args, *kwargs.values())):
            return compute(*args, **kwargs)
        if not is_compiled and not numbers and stream.residency.is_in_parts and not self.__dict__[ENTERED]:
            # Where this is a block of which parts are paged, its method may look for weights
            # anywhere in it.
            whole = stream.taken_over(self, None)
            numbers = [] if whole is None else [whole]
        if numbers and not is_compiled and torch.is_grad_enabled():
            _refuse_gradients(stream, (*args, *kwargs.values()))
        return _held(stream, numbers, compute, *args, **kwargs)

    return entering


def _has_tensors(values: Sequence[Any]) -> bool:
    """Whether there is something to compute with among these: a question about a block, or a
    setting of it, brings nothing."""
    listed = (one for value in values if isinstance(value, (list, tuple)) for one in value)
    return any(isinstance(value, Tensor) for value in (*values, *listed))


def generation_of(door: Any) -> Hashable:
    """Of what streams behind a door: `Settled.generation`; None: it has not come to rest, or
    nothing streams."""
    stream: BlockSource | None = door.__dict__.get(STREAMED, NOWHERE)[0]
    return None if stream is None else stream.settled().generation


def within(door: Any, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """compute(*args, **kwargs), with the weights of the part of a block that this is a door of,
    where blocks are paged in parts."""
    stream, i = door.__dict__.get(STREAMED, NOWHERE)
    if i is None:
        return compute(*args, **kwargs)
    before = _enter(stream, i)
    try:
        return compute(*args, **kwargs)
    finally:
        _leave(stream, i, before)


def of_text(
    door: Any, context: Tensor, depends: Callable[[], Hashable], compute: Compute, *, is_steady: bool = True
) -> Sequence[Tensor]:
    """compute(), which makes tensors of a context alone, with the weights in this door that see no
    more: kept from an earlier call where the door's stream keeps them. Nobody may write to them.
    depends: on what else they do. is_steady: whether a call's blocks find the same numbers in the
    same tensor."""
    i = door.__dict__.get(STREAMED_TEXT)
    if i is None:
        return compute()
    stream: BlockSource = door.__dict__[STREAMED][0]
    if torch.compiler.is_compiling():
        found: Sequence[Tensor] = _of_text_apart(stream, i, context, depends, compute, is_steady)
        return found
    return stream.of_text(i, context, depends(), compute, is_steady=is_steady)


def _held(
    stream: BlockSource, blocks: Sequence[int | None], compute: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """compute(*args, **kwargs), with the weights of these."""
    if not blocks:
        return compute(*args, **kwargs)
    i, *others = blocks
    if i is None:
        return _held(stream, others, compute, *args, **kwargs)
    before = _enter(stream, i)
    try:
        return _held(stream, others, compute, *args, **kwargs)
    finally:
        _leave(stream, i, before)


def _refuse_gradients(stream: BlockSource, values: Sequence[Any]) -> None:
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in values):
        raise NotWhileStreaming(
            "Training needs a model's weights once more on the way back, when streamed ones are gone.", stream.path
        )


def _enter(stream: BlockSource, i: int) -> Parameters | None:
    if torch.compiler.is_compiling():
        found: Parameters | None = _entered_apart(stream, i)
        return found
    with paused():
        return stream.enter(i)


def _leave(stream: BlockSource, i: int, before: Parameters | None) -> None:
    if torch.compiler.is_compiling():
        _left_apart(stream, i, before)
        return
    with paused():
        stream.leave(i, before)


# A compiled graph breaks here; uncompiled, the way around it would cost as much as the rest.


@torch.compiler.disable
def _entered_apart(stream: BlockSource, i: int) -> Parameters | None:
    return stream.enter(i)


@torch.compiler.disable
def _of_text_apart(
    stream: BlockSource, i: int, context: Tensor, depends: Callable[[], Hashable], compute: Compute, is_steady: bool
) -> Sequence[Tensor]:
    return stream.of_text(i, context, depends(), compute, is_steady=is_steady)


@torch.compiler.disable
def _left_apart(stream: BlockSource, i: int, before: Parameters | None) -> None:
    stream.leave(i, before)
