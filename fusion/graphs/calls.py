"""A model that streams, as the owner of captured calls (`gpu/graphed_calls/`).

A call is captured only while the model is settled (`BlockStream.settled`). The stream knows nothing
of two things, so `guard.py` looks at them: tensors that do not stream may lie elsewhere, and
modules may keep something from one call for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import comfy.ldm.modules.attention
import comfy.model_management
import torch
from torch import nn

from ...gpu.graphed_calls import GraphedCalls, Owner, Settled
from ...gpu.graphs import RECORDER, Recorder
from ...kernels_cuda import LEDGER
from ...kernels_cuda.tune.autotune import tuner
from ...kernels_cuda.tune.selection import hurried
from ..base import malloc_graphs
from ..base.format import counted
from ..base.hooks import STREAMED
from ..stream.block_hooks import NOWHERE, generation_of
from .guard import Unchanged, difference, lasting

Body = Callable[..., Any]
GIB = 2**30


class Model(Protocol):
    """The weights that calls read: a `BlockStream`, or a model on the card (`resident.py`)."""

    @property
    def device(self) -> torch.device: ...

    def settled(self) -> Settled: ...

    def standing_still(self) -> AbstractContextManager[bool]:
        """A context in which the modules hold their weights, and nothing moves. Gives False if the
        model is not settled any more."""

    def ran_as_a_graph(self) -> None:
        """Count that all of its blocks have run, with one launch."""

    def room(self, nbytes: int) -> bool:
        """Take bytes in addition to the weights or, if negative, give them back. Returns whether
        the budget had them left."""

    def note(self, what: str, why: str) -> None:
        """Note something for the report."""


class _ModelOwner(Owner):
    def __init__(self, model: Model, net: nn.Module) -> None:
        self._model, self._net = model, Unchanged(net)
        self._looked_up: Hashable = None  # the model's generation at the last look-up

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._model.device

    def settled(self) -> Settled:
        """The model's state, with the addresses of tensors that do not stream."""
        found = self._model.settled()
        if found.generation is None:
            return found
        if found.generation != self._looked_up:
            self._net.look_up()
            self._looked_up = found.generation
        return Settled((found.generation, self._net.addresses()))

    def refused(self, reason: str) -> None:
        if self._model.settled().generation is None:
            return  # the report says why
        self.note(f"none: {reason}")
        if not LEDGER.knows("model call", "CUDA graph", reason):
            LEDGER.refused("model call", "CUDA graph", reason, "a call of the model", "launch after launch")

    def note(self, words: str) -> None:
        self._model.note("CUDA graphs", words)

    def room(self, nbytes: int) -> bool:
        return self._model.room(nbytes)

    def watch(self) -> tuple[Container[int], Callable[[], str | None]]:
        before = self._net.kept()

        def keeps() -> str | None:
            name = difference(before, self._net.kept())
            return None if name is None else f"it keeps something between two calls ({name})"

        return lasting(before), keeps

    def standing_still(self) -> AbstractContextManager[bool]:
        return self._model.standing_still()

    def before_replay(self) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()

    def replayed(self) -> None:
        self._model.ran_as_a_graph()


class Graphs(GraphedCalls):
    """Calls of one model: a diffusion network, the blocks of a text encoder, a VAE."""

    def __init__(
        self,
        model: Model,
        net: nn.Module,
        recorder: Recorder = RECORDER,
        undecided: Callable[[], int] = lambda: tuner().undecided,
    ) -> None:
        """net: the network that calls run, or a larger one. undecided: how many calls of an op were
        served so far before a kernel was chosen for it."""
        super().__init__(_ModelOwner(model, net), undecided, hurried, recorder)

    def call(
        self,
        body: Body,
        given: Sequence[Any],
        key: Hashable = (),
        memory: object = None,
        changed: Callable[[], str | None] | None = None,
    ) -> Any:
        """As `GraphedCalls.call`, except while torch or ComfyUI records."""
        if torch.compiler.is_compiling() or malloc_graphs.is_recording():
            return body(*given)
        return super().call(body, given, (key, comfy.ldm.modules.attention.optimized_attention), memory, changed)

    def words(self) -> str:
        """Words for the report; empty if nothing was captured."""
        if not self.captured:
            return ""
        held = f"{counted(self.count, 'graph', 'graphs')} in {self.nbytes / GIB:.2f} GiB of VRAM"
        texts = f" ({counted(self.tokens, 'token', 'tokens')} of text)" if self.tokens else ""
        calls = f"{counted(self.replayed, 'call was', 'calls were')} replayed{texts}, {self.captured} captured"
        return f"Short calls run as CUDA graphs: {calls}; {held} now."


def replayed(block: Any, body: Body, given: Sequence[Any], key: Hashable = (), memory: object = None) -> Any:
    """body(*given), which runs this block and its kin: as a graph if their stream has graphs and
    they pay. memory: as in `GraphedCalls.call`."""
    stream, number = block.__dict__.get(STREAMED, NOWHERE)
    graphs: Graphs | None = None if stream is None else stream.residency.graphs
    return body(*given) if graphs is None else graphs.call(body, given, (number, key), memory)


def let_go(block: Any, memory: object) -> None:
    """Drop every graph of the block's stream that uses this memory."""
    stream, _ = block.__dict__.get(STREAMED, NOWHERE)
    graphs: Graphs | None = None if stream is None else stream.residency.graphs
    if graphs is not None:
        graphs.let_go(memory)


def stays(block: Any) -> bool:
    """Whether everything that streams with this block keeps its address until it is read, so that a
    call may be replayed."""
    return generation_of(block) is not None
