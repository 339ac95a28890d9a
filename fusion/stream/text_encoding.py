"""What stands around each use of a streamed text encoder: encoding, and where it can, writing.

An encoding moves the running node's bar by its blocks, is one pass of them, and does not leave if
the file changed meanwhile. It has no end of its own that a patcher hears of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from ..base.hooks import ENCODES, HEAD, STREAMED
from ..base.subclassing import mix
from . import progress
from .block_stream import BlockStream


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
        with progress.over_blocks(stream), _whole(stream):
            return super().encode_token_weights(*args, **kwargs)  # type: ignore[misc]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Stock's, which counts the words."""
        with _whole(self.__dict__[ENCODES]):
            return super().generate(*args, **kwargs)  # type: ignore[misc]


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
