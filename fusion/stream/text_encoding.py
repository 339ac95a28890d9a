"""What stands around each use of a streamed text encoder: encoding, and where it can, writing.

An encoding moves the running node's bar by its blocks, is one pass of them, and does not leave if
the file changed meanwhile. It has no end of its own that a patcher hears of.

ComfyUI is asked to leave VRAM for it: what it leaves for every model, and what products need in
addition where they make halves of a packed weight. What still runs out of VRAM runs again, with
less of the weights on the card.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import comfy.model_management
import torch

from ..base.hooks import ENCODES, HEAD, STREAMED
from ..base.subclassing import mix
from ..weights.storage import Integers, bytes_of_halves, storage_of
from . import progress, vram_pool
from .block_stream import BlockStream
from .less_vram import with_ever_less

# Matrices of a block of which halves are there at a time: both of a gated feed-forward's first half,
# and its second.
HALVES = 3


def watch_encoding(model: Any, stream: BlockStream) -> None:
    """Of a stock text encoder model whose blocks stream."""
    mix(model, _Encodes, **{ENCODES: stream})


def hold_while_writing(network: Any, stream: BlockStream, block: int) -> None:
    """Let the table that a network's words come from be there when they are looked up: stock does
    not call it."""
    mix(network, _Writes, **{HEAD: (stream, block)})


def words_held(network: Any) -> AbstractContextManager[None]:
    """For this time the table that a network's words come from is where it computes. Of one whose
    words do not stream nothing has to be done."""
    held = network.__dict__.get(HEAD)
    if held is None:
        return contextlib.nullcontext()
    stream, block = held
    return cast(AbstractContextManager[None], stream.bound(block))


def begin_writing(network: Any, layers: Sequence[Any], *, at_last: bool = False) -> None:
    """Before the first of these layers is called: a streamed table of words takes its place, and
    its stream is told what a text needs of a model that sees as well. at_last: the text has become
    long, see `BlockStream.runs_only`."""
    doors = [layer.__dict__[STREAMED] for layer in layers if STREAMED in layer.__dict__]
    blocks = [i for _, i in doors]
    if not doors or None in blocks:  # or their parts are paged
        with words_held(network):
            return
    stream: BlockStream = doors[0][0]
    head = [network.__dict__[HEAD][1]] if HEAD in network.__dict__ else []
    stream.runs_only(blocks, now=head, at_last=at_last)


class _Encodes:
    def encode_token_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Stock's."""
        stream: BlockStream = self.__dict__[ENCODES]

        def run() -> Any:
            with progress.over_blocks(stream), _whole(stream):
                return super(_Encodes, self).encode_token_weights(*args, **kwargs)  # type: ignore[misc]

        return _with_room(stream, run, "the encoding")

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Stock's, which counts the words."""
        stream: BlockStream = self.__dict__[ENCODES]

        def run() -> Any:
            with _whole(stream):
                return super(_Encodes, self).generate(*args, **kwargs)  # type: ignore[misc]

        return _with_room(stream, run, "the writing")

    def memory_estimation_function(self, tokens: Any, device: Any = None) -> float:
        """Bytes that ComfyUI is asked to leave beside the weights: what it leaves for every model, or
        what is known of this one, and halves."""
        known = getattr(super(), "memory_estimation_function", None)
        asked = 0.0 if known is None else float(known(tokens, device=device))
        if device is None or device.type == "cpu":
            return asked
        management: Any = comfy.model_management
        least: float = management.minimum_inference_memory() - management.extra_reserved_memory()
        return max(asked, least) + halves_at_a_time(self.__dict__[ENCODES])


def halves_at_a_time(stream: BlockStream) -> int:
    """Bytes of the halves that products make at a time of weights in other types: of the largest
    matrices of a block, and of one of them once more, in the type that ComfyUI unpacks to."""
    of_blocks = ([_halves(paged.stand_in) for paged in block.paged] for block in stream.blocks)
    return max((sum(sorted(found)[-HALVES:]) + max(found, default=0) for found in of_blocks), default=0)


def _halves(weight: Any) -> int:
    return 0 if isinstance(storage_of(weight), Integers) else bytes_of_halves(weight)


def _with_room(stream: BlockStream, run: Callable[[], Any], what: str) -> Any:
    held = stream.residency.held
    try:
        return with_ever_less(stream, run, what)
    except vram_pool.OutOfVram:  # of the weights, and says so
        raise
    except torch.OutOfMemoryError as error:
        said = str(error)
    raise vram_pool.OutOfVram(
        f"VRAM is too little for {what} of this text, with the text encoder's weights, which held "
        f"{held / vram_pool.GIB:.2f} GiB, down to the {stream.residency.least / vram_pool.GIB:.2f} they need: "
        f"{said.splitlines()[0] if said else 'out of memory'} Make the text shorter, or close what else uses the card."
    )


@contextlib.contextmanager
def _whole(stream: BlockStream) -> Iterator[None]:
    with stream.one_pass():
        yield
    stream.residency.check()


class _Writes:
    def logits(self, *args: Any, **kwargs: Any) -> Any:
        """Stock's."""
        with words_held(self):
            return super().logits(*args, **kwargs)  # type: ignore[misc]
