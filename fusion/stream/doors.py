"""How a block's weights come to it when it is called, and go.

They are put in around the `__call__` of the modules through which a block, or a part of one, is entered: its doors. A subclass made
for that does it. Stock's hook for blocks, `patches_replace["dit"][("double_block", i)]`, will not do for it: it is not asked for
VACE's side branch, and another node that replaces the same block takes our place, weights and all. Torch's module hooks will not
do either: an interrupt of ComfyUI is a BaseException, after which torch calls no hook, and the weights would stay where they are.
Around `__call__` there is a `finally`, and whatever other nodes do to `forward` or with the block hook happens inside.

Where what a block makes of a text is kept, the weights that make it are behind doors of their own: the module that attends to
texts, for whoever computes it otherwise than we do, and those that have them. Our code asks `of_text`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import NotWhileStreaming
from ..mixing import mix
from .blocks import Parameters

if TYPE_CHECKING:
    from .stream import Stream
    from .texts import Compute

STREAMED = "_fusestream"  # where a door has its stream, and the block's number; no number: it is not what is paged
NOWHERE = (None, None)  # of a module that does not stream
TEXT = "_fusestream_text"  # where a door has the number of the block that makes what is kept of texts


def leads(door: nn.Module, stream: Stream, i: int | None) -> None:
    """From now on whoever calls the door finds block i of the stream behind it; None: nothing that is paged by itself."""
    mix(door, _Streamed, **{STREAMED: (stream, i), TEXT: None})


def leads_to_text(door: nn.Module, i: int) -> None:
    """And block i beside, which makes what is kept of texts."""
    door.__dict__[TEXT] = i


class _Streamed:
    """What a block's class is mixed with."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stream, i = self.__dict__[STREAMED]
        if "forward" in self.__dict__:
            i = stream.taken_over(self, i)
        text = self.__dict__[TEXT]
        if i is None and text is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            _refuse_gradients(stream, (*args, *kwargs.values()))
        if text is not None:
            return _held(stream, [i, text], super().__call__, *args, **kwargs)  # type: ignore[misc]
        before = _enter(stream, i)
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            _leave(stream, i, before)


def generation_of(door: Any) -> Hashable:
    """Of what streams behind a door: `Settled.generation`; None: it has not come to rest, or nothing streams."""
    stream: Stream | None = door.__dict__.get(STREAMED, NOWHERE)[0]
    return None if stream is None else stream.settled().generation


def within(door: Any, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """compute(*args, **kwargs), with the weights of the part of a block that this is a door of, where blocks are paged in parts."""
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
    """compute(), which makes tensors of a context alone, with the weights in this door that see no more: kept from an earlier call
    where the door's stream keeps them. Nobody may write to them. depends: on what else they do. is_steady: whether a call's blocks
    find the same numbers in the same tensor."""
    i = door.__dict__.get(TEXT)
    if i is None:
        return compute()
    stream: Stream = door.__dict__[STREAMED][0]
    if torch.compiler.is_compiling():
        found: Sequence[Tensor] = _of_text_apart(stream, i, context, depends, compute, is_steady)
        return found
    return stream.of_text(i, context, depends(), compute, is_steady=is_steady)


def _held(stream: Stream, blocks: Sequence[int | None], compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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


def _refuse_gradients(stream: Stream, values: Sequence[Any]) -> None:
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in values):
        raise NotWhileStreaming(
            "Training needs a model's weights once more on the way back, when streamed ones are gone.", stream.path
        )


def _enter(stream: Stream, i: int) -> Parameters | None:
    return _entered_apart(stream, i) if torch.compiler.is_compiling() else stream.enter(i)


def _leave(stream: Stream, i: int, before: Parameters | None) -> None:
    _left_apart(stream, i, before) if torch.compiler.is_compiling() else stream.leave(i, before)


# A compiled graph breaks here; uncompiled, the way around it would cost as much as the rest.


@torch.compiler.disable
def _entered_apart(stream: Stream, i: int) -> Parameters | None:
    return stream.enter(i)


@torch.compiler.disable
def _of_text_apart(
    stream: Stream, i: int, context: Tensor, depends: Callable[[], Hashable], compute: Compute, is_steady: bool
) -> Sequence[Tensor]:
    return stream.of_text(i, context, depends(), compute, is_steady=is_steady)


@torch.compiler.disable
def _left_apart(stream: Stream, i: int, before: Parameters | None) -> None:
    stream.leave(i, before)
