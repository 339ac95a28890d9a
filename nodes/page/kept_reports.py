"""The reports of the last runs, for the page: of streamed diffusion models, and of Report nodes.

They are plain values, so none keeps a model alive; the oldest goes when there are too many.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...fusion.base.hooks import STREAM
from . import node_times

if TYPE_CHECKING:
    from ...fusion.report import Report

MOST = 4


@dataclass(frozen=True)
class Kept:
    """when: seconds since 1970. text: of the report, made once because the page asks for it
    often."""

    id: int
    when: float
    report: Report
    text: str


_kept: deque[Kept] = deque(maxlen=MOST)
_numbers = itertools.count(1)
_lock = threading.Lock()
_since = 0.0  # the end of the last prompt, on the clock of streams
_told: weakref.WeakSet[Any] = weakref.WeakSet()  # streams that have a report of the running prompt
_unfinished: set[int] = set()  # ids of reports that were made while their prompt ran


def kept() -> list[Kept]:
    """The kept reports, the newest first."""
    with _lock:
        return list(reversed(_kept))


def gathered(model: Any) -> Report:
    """The report on a MODEL that has run in this prompt, with what would be faster, and with the
    times of the nodes that have run."""
    from ...fusion import report  # noqa: PLC0415 - the server starts without it
    from ...fusion.estimate.telling import with_changes  # noqa: PLC0415

    return replace(with_changes(report.gather(model), model), nodes=node_times.so_far())


def keep(report: Report, model: Any = None) -> None:
    """Keep a report. model: the MODEL that it is about."""
    from ...fusion.report import as_text  # noqa: PLC0415 - the server starts without it

    with _lock:
        one = Kept(next(_numbers), time.time(), report, as_text(report))
        _kept.append(one)
        _unfinished.add(one.id)
    stream = _stream_of(model)
    if stream is not None:
        _told.add(stream)


def keep_those_of_the_prompt() -> None:
    """Keep reports of the diffusion models that streamed since the last prompt, unless a node made
    one. Those of nodes get the times of what ran after them."""
    from . import in_memory  # noqa: PLC0415 - the server starts without it

    global _since
    before, _since = _since, time.monotonic()
    told = set(_told)
    _told.clear()
    _finish()
    for patcher in list(in_memory.patchers()):
        stream = _stream_of(patcher)
        if stream is None or stream in told or stream.residency.last_used <= before:
            continue
        if hasattr(patcher.model, "diffusion_model"):
            keep(gathered(patcher))
    _unfinished.clear()
    node_times.forget()


def _finish() -> None:
    """Let the reports that the prompt's nodes made have the times of all of its nodes."""
    from ...fusion.report import as_text  # noqa: PLC0415 - the server starts without it

    nodes = node_times.so_far()
    with _lock:
        for place, one in enumerate(_kept):
            if one.id in _unfinished and nodes:
                report = replace(one.report, nodes=nodes)
                _kept[place] = replace(one, report=report, text=as_text(report))


def _stream_of(model: Any) -> Any:
    return getattr(getattr(model, "model", None), STREAM, None)
