"""`auto`: measure the candidates once per (op, shape class, card, driver, code) and keep the fastest.

Stock's own computation is always among them, so an op in `auto` is never slower than stock where it was measured. The
candidates run on the very tensors of the call that asked, or on the first tokens of them (`Op.sample`), in turns, a few
milliseconds each, or a few times where one time takes longer.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..gpu import driver
from ..gpu.capture import capturing
from . import device_code
from .build import matrix
from .call import Call, Candidate, Tunable, place
from .errors import KernelError
from .ledger import LEDGER, Choice
from .winners import Winner, WinnersFile

ROUNDS = 7
ROUND_SECONDS = 1e-3
LEAST_TIMES = 3
MOST_LAUNCHES = 50
QUEUE_CYCLES = 80_000  # for each launch: 40 us or more
LEAST_CYCLES = 400_000  # stock's computation may be many kernels
# Ours must beat stock by more than a race is noisy, or stock keeps its place: `auto` promises never to be slower.
MARGIN = 0.02
FILE = "kernel-winners.json"


# Private to torch, so its absence is no error.
_spin: Callable[[int], None] | None = getattr(torch.cuda, "_sleep", None)


Observer = Callable[[str, int, int], None]


def _unobserved(op: str, done: int, of: int) -> None: ...


_observer: Observer = _unobserved


def observe(observer: Observer) -> None:
    """From now on this is told how far each measurement is: the op, how much of it is done, of how much. Called some ten times
    in each. It may raise: that ends the measurement, of which nothing is kept."""
    global _observer  # noqa: PLW0603 - who looks on, not a toggle
    _observer = observer


def measure(op: Tunable, call: Call, candidates: Sequence[Candidate]) -> dict[str, float]:
    """The least seconds that each candidate took: what disturbs a measurement only ever adds to it, and while weights stream
    in for the first time the driver makes launches wait. One that cannot run at all takes for ever, and says why."""
    with torch.cuda.device(call.device):
        try:
            return _in_turns(op, replace(call, tensors=op.sample(call)), candidates)
        finally:
            torch.cuda.empty_cache()  # what candidates needed for themselves: nobody will need it in these sizes again


def _in_turns(op: Tunable, call: Call, candidates: Sequence[Candidate]) -> dict[str, float]:
    of = len(candidates) + ROUNDS
    _observer(op.name, 0, of)
    tensors = _apart(op, call)
    seconds: dict[str, list[float]] = {}
    runs: dict[str, tuple[Callable[[], Any], int]] = {}
    for done, candidate in enumerate(candidates, 1):
        try:
            run: Callable[[], Any] = partial(candidate.prepare(call), *tensors)
            _time(run, 1)  # first use: load, allocate, warm up
            once = _time(run, 1)
            launches = max(1, min(MOST_LAUNCHES, int(ROUND_SECONDS / max(once, 1e-7))))
            runs[candidate.name] = run, launches
            seconds[candidate.name] = [once] if launches == 1 else []
        except (torch.OutOfMemoryError, KernelError) as error:
            LEDGER.say_once(f"{op.name}: {candidate.name} failed while being measured: {error}")
            seconds[candidate.name] = [math.inf]
        _observer(op.name, done, of)
    for done in range(ROUNDS):  # in turns, so that a clock change meets all of them
        for name, (run, launches) in runs.items():
            if not _is_known(seconds[name], launches):
                seconds[name].append(_time(run, launches))
        _observer(op.name, len(candidates) + done + 1, of)
    return {name: min(times) for name, times in seconds.items()}


def _is_known(times: Sequence[float], launches: int) -> bool:
    """Whether enough was measured of it: some milliseconds, and the two least agree. What disturbs (the driver at work for
    weights that come in) differs from time to time, so two that were disturbed do not."""
    if len(times) < LEAST_TIMES or launches * sum(times) < ROUNDS * ROUND_SECONDS:
        return False
    least, second = sorted(times)[:2]
    return second <= (1 + MARGIN) * least


def _apart(op: Tunable, call: Call) -> list[torch.Tensor | None]:
    """The tensors, with copies of those that are written: one copy for all operands that are the same tensor."""
    copies = {place(t): _copy(t) for i in op.mutates if (t := call.tensors[i]) is not None}
    return [None if t is None else copies.get(place(t), t) for t in call.tensors]


def _copy(t: torch.Tensor) -> torch.Tensor:
    """A copy with the original's strides: plans are made for them, and `clone` leaves out the gaps between rows."""
    if not t.numel():
        return t.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.as_strided((span,), (1,)).clone().as_strided(t.shape, t.stride())


def _time(run: Callable[[], Any], launches: int) -> float:
    """Device seconds per launch.

    The device first spins while the host puts the launches into its queue: on a slow host small kernels would else be
    compared by what it costs to launch them. If the queue runs dry all the same, the host's time is what is found.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.current_stream().synchronize()
    if _spin is not None:
        _spin(max(LEAST_CYCLES, QUEUE_CYCLES * launches))
    start.record()
    for _ in range(launches):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / launches


def card_key(call: Call) -> str:
    """What a measured time depends on besides the shape."""
    properties = torch.cuda.get_device_properties(call.device)
    return (
        f"{properties.name}|{properties.multi_processor_count}|driver {driver().version}|torch {torch.__version__}|"
        f"{call.policy.isa or ''}|{matrix.source_hash()}"
    )


class Tuner:
    def __init__(
        self,
        file: WinnersFile,
        measure: Callable[..., dict[str, float]] = measure,
        card_key: Callable[[Call], str] = card_key,
    ) -> None:
        self._file = file
        self._measure = measure
        self._card_key = card_key
        self._lock = threading.Lock()
        self.measurings = 0  # that candidates were measured: a step in which they were says little of the next one

    def fastest(self, op: Tunable, call: Call, able: Sequence[Candidate]) -> Candidate:
        """The winner among the candidates that can serve: remembered, or measured now."""
        names = {candidate.name: candidate for candidate in able}
        shape = op.shape_class(call)
        key = f"{op.name}|{shape}|{self._card_key(call)}"
        with self._lock:  # one measuring at a time, or they would measure each other
            known = self._file.get(key)
            if known is None or known.name not in names or not names.keys() <= known.seconds.keys():
                if capturing():
                    # Timing needs a synchronisation, which a capture forbids.
                    LEDGER.chose(Choice(op.name, shape, able[0].name, "not measured: a CUDA graph is being captured"))
                    return able[0]
                self.measurings += 1  # before it: it may fail
                seconds = self._measure(op, call, able)
                known = Winner(_first(able, seconds), seconds)
                if all(math.isfinite(s) for s in seconds.values()):  # running out of memory today is not a property
                    self._file.put(key, known)
        LEDGER.chose(Choice(op.name, shape, known.name, "measured", dict(known.seconds)))
        return names[known.name]


def _first(able: Sequence[Candidate], seconds: dict[str, float]) -> str:
    """The fastest, where a candidate of ours counts as slower by the margin."""
    handicap = {candidate.name: 1 + MARGIN if candidate.ours else 1.0 for candidate in able}
    return min(seconds, key=lambda name: seconds[name] * handicap[name])


_tuner: Tuner | None = None
_tuner_lock = threading.Lock()


def tuner() -> Tuner:
    global _tuner  # noqa: PLW0603 - a cache of measurements of this machine, not a toggle
    with _tuner_lock:
        if _tuner is None:
            _tuner = Tuner(WinnersFile(device_code.cache_folder() / FILE))
        return _tuner


def fastest(op: Tunable, call: Call, able: Sequence[Candidate]) -> Candidate:
    return tuner().fastest(op, call, able)
