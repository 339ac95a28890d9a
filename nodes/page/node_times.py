"""Seconds that each node of the running prompt took, as ComfyUI's own progress begins and ends.

A node whose result ComfyUI still has does not run, and has no time. One that waits for others, for
lazy inputs or for the nodes that it stands for, is counted from where it began last.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from ...fusion.compatibility.aside import step_aside

if TYPE_CHECKING:
    from ...fusion.report.data import NodeTime


class NodeTimes:
    """The times of one prompt, by the ids of its nodes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._prompt: Any = None  # ComfyUI's progress of it, of which there is one for each prompt
        self._begun: dict[str, float] = {}
        self._took: dict[str, tuple[str, float]] = {}  # class and seconds

    def begin(self, progress: Any, node: str) -> None:
        if progress is not self._prompt:
            self.forget()
            self._prompt = progress
        self._begun[node] = self._clock()

    def end(self, progress: Any, node: str) -> None:
        begun = self._begun.pop(node, None)
        if begun is not None and progress is self._prompt:
            self._took[node] = progress.dynprompt.get_node(node)["class_type"], self._clock() - begun

    def forget(self) -> None:
        """Of the prompt that is over."""
        self._prompt = None
        self._begun, self._took = {}, {}

    def so_far(self, names: Callable[[str], str]) -> tuple[NodeTime, ...]:
        """The nodes that have run, each name once, the longest first. names: of a class."""
        from ...fusion.report.data import NodeTime  # noqa: PLC0415 - the server starts without it

        found: dict[str, list[float]] = {}
        for class_type, seconds in self._took.values():
            found.setdefault(names(class_type), []).append(seconds)
        told = (NodeTime(name, sum(each), len(each)) for name, each in found.items())
        return tuple(sorted(told, key=lambda one: -one.seconds))


_times = NodeTimes()


def attach() -> None:
    """Let ComfyUI's progress tell us of each node. Called once."""
    from comfy_execution import progress  # noqa: PLC0415 - not while nodes are being listed

    kind = getattr(progress, "ProgressRegistry", None)
    if all(callable(getattr(kind, name, None)) for name in ("start_progress", "finish_progress")):
        _watch(kind, _times)
    else:
        lacks = "comfy_execution.progress has no ProgressRegistry that tells of nodes"
        step_aside("Times of nodes in reports", lacks, "Reports are without them")


def so_far() -> tuple[NodeTime, ...]:
    """The nodes that have run in the prompt, by their names in the menu."""
    names = importlib.import_module("nodes").NODE_DISPLAY_NAME_MAPPINGS
    return _times.so_far(lambda kind: names.get(kind) or kind)


def forget() -> None:
    _times.forget()


def _watch(kind: Any, times: NodeTimes) -> None:
    begin, end = kind.start_progress, kind.finish_progress

    @wraps(begin)
    def start_progress(self: Any, node_id: str) -> None:
        times.begin(self, node_id)
        begin(self, node_id)

    @wraps(end)
    def finish_progress(self: Any, node_id: str) -> None:
        times.end(self, node_id)
        end(self, node_id)

    kind.start_progress, kind.finish_progress = start_progress, finish_progress
