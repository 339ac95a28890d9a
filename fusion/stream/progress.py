"""What takes its time moves a bar, and can be interrupted.

ComfyUI has one bar for each running node. A loader's is ours: it counts bytes. A sampler's counts
steps, and while its first step brings a model's weights for the first time, that bar moves in parts
of the step: forward, up to where the sampler itself takes it.

Interrupted anywhere, nothing is left half done: files are closed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.utils
import torch

from ..base.hooks import PROGRESS
from .block_stream import BlockStream
from .model_call import ModelCall, wrap

PIECE = 8 << 20  # bytes read between two looks at the user


_is_for_no_node: ContextVar[bool] = ContextVar("is_for_no_node", default=False)


class Bar:
    """The running node's own."""

    def __init__(self, total: int) -> None:
        bar: Any = comfy.utils.ProgressBar
        self._bar = None if _is_for_no_node.get() else bar(total)

    def add(self, count: int) -> None:
        """So much more is done. Raises where the user has interrupted, also without a server, where
        no bar is drawn."""
        if self._bar is None:
            return
        self._bar.update(count)
        comfy.model_management.throw_exception_if_processing_interrupted()


@contextlib.contextmanager
def for_no_node() -> Iterator[None]:
    """What is built meanwhile, in this thread, no node waits for: it moves no bar, and an
    interruption is meant for others."""
    before = _is_for_no_node.set(True)
    try:
        yield
    finally:
        _is_for_no_node.reset(before)


# --------------------------------------------------------------------------------------------------------------- files


def read_through(path: str | Path) -> None:
    """Bring a file from the disk into the page cache, from which a stock function loads it next."""
    room = memoryview(bytearray(PIECE))
    with Path(path).open("rb", buffering=0) as file:
        bar = Bar(Path(path).stat().st_size)
        while count := file.readinto(room):
            bar.add(count)


# -------------------------------------------------------------------------------------------------------------- blocks


@contextlib.contextmanager
def told_of_each_block(stream: BlockStream, tell: Callable[[], None]) -> Iterator[None]:
    """For this time `tell` is called when a block that streams has been used for the first time; it
    may raise. Beside who is told already, of each use."""
    before, used = stream.watcher, set()

    def both(i: int) -> None:
        if before is not None:
            before(i)
        if i not in used:
            used.add(i)
            tell()

    stream.watcher = both
    try:
        yield
    finally:
        stream.watcher = before


@contextlib.contextmanager
def over_blocks(stream: BlockStream) -> Iterator[None]:
    """The running node's bar counts this stream's blocks, whoever computes them."""
    bar = Bar(len(stream.layers))
    with told_of_each_block(stream, lambda: bar.add(1)):
        yield


class FirstPass:
    """Of one model, and of those that stock makes of it for other cards: the first time that its
    blocks run after they were unloaded, or never loaded, all of them come from the file, which may
    take minutes."""

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()  # pagers whose first pass has begun: one on each card

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """One call of the model, as stock's wrappers have it."""
        call = ModelCall(executor, args, kwargs)
        stream = call.stream
        if stream.residency.pager is None or stream.residency.pager in self._seen:
            return call.run()
        self._seen.add(stream.residency.pager)
        where = _step(call.options)
        if where is None:
            return call.run()
        step, steps = where
        blocks = len(stream.layers)
        bar = Bar(steps * blocks)
        bar.add(step * blocks)
        with told_of_each_block(stream, lambda: bar.add(1)):
            return call.run()


def _step(options: Mapping[str, Any]) -> tuple[int, int] | None:
    """Which step of how many the sampler is at, where that is known: the step begins at one of its
    sigmas."""
    every, now = options.get("sample_sigmas"), options.get("sigmas")
    if every is None or now is None or not now.numel() or len(every) < 2:
        return None
    found = torch.isclose(every[:-1].cpu().double(), now.flatten()[0].cpu().double(), rtol=1e-4, atol=0.0).nonzero()
    return (int(found[0]), len(every) - 1) if len(found) else None


def attach(patcher: Any) -> None:
    """Let the first pass of this streaming patcher's model, and of its clones, move the sampler's
    bar."""
    wrap(patcher, PROGRESS, FirstPass())
