"""A report as plain values. It keeps no model, tensor or memory alive."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class LayerRow:
    """One block.

    nbytes     in VRAM
    stored     bytes in the file, and over the bus
    resident   whether it stays in VRAM
    use, copy, stall    seconds in a typical pass: computing with it, bringing it, waiting for it
    predicted  seconds of stall by the plan at the measured rates, if known
    rare       whether most passes do without it
    """

    name: str
    nbytes: int
    stored: int
    resident: bool
    use: float = 0.0
    copy: float = 0.0
    stall: float = 0.0
    predicted: float | None = None
    rare: bool = False


@dataclass(frozen=True)
class Stretch:
    """A stretch of the last pass, in seconds from its start. layer: its number."""

    kind: str
    layer: int
    start: float
    end: float
    nbytes: int = 0


@dataclass(frozen=True)
class Memory:
    """A pool of memory: bytes taken now, bytes that may be taken, and the most ever taken (None:
    not known)."""

    name: str
    used: int
    limit: int
    peak: int | None = None


@dataclass(frozen=True)
class WhatIf:
    """The plan's prediction for another budget, at the measured rates. nbytes: of VRAM for the
    blocks."""

    nbytes: int
    seconds: float


@dataclass(frozen=True)
class KernelRow:
    """The candidate that computed an op. why: in words, or with the measured times."""

    op: str
    shape: str
    winner: str
    why: str


@dataclass(frozen=True)
class RefusalRow:
    op: str
    candidate: str
    reason: str
    served_by: str
    times: int


@dataclass(frozen=True)
class Sparsity:
    """Counts of attentions that may be sparse.

    asked      the setting, in words
    attentions how many were sparse
    visited    share of the key blocks that these visited; None: there were none
    seconds, dense_seconds    of one sparse attention, and of one that could be sparse and was
                              dense; None: not timed
    dense      (why, how many) of those that stayed dense
    """

    asked: str
    attentions: int = 0
    visited: float | None = None
    seconds: float | None = None
    dense_seconds: float | None = None
    dense: tuple[tuple[str, int], ...] = ()

    @property
    def all(self) -> int:
        return self.attentions + sum(count for _, count in self.dense)


@dataclass(frozen=True)
class Foretold:
    """A step cache. asked: the setting, in words; done: what it did in the last sampling, in words."""

    asked: str
    done: str = "no sampling yet"


@dataclass(frozen=True)
class Sampling:
    """The last sampling. seconds: of a step; spent: by all steps; first: by the first one, which
    brings the weights; pixels: frames, height and width, zeros where they do not apply."""

    steps: int
    seconds: float
    spent: float
    first: float = 0.0
    pixels: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True)
class NodeTime:
    """Seconds that the nodes of a name took in the prompt, and how many there were."""

    name: str
    seconds: float
    count: int = 1


@dataclass(frozen=True)
class LiveStage:
    """A stage of a live video. seconds: the usual time for a group of frames. waited: the usual
    delay between the arrival of its input and its beginning."""

    name: str
    seconds: float
    waited: float


@dataclass(frozen=True)
class Live:
    """The last live video.

    rate      frames a second, over the last groups
    overlap   of the time in which a stage ran, the share in which several did
    timeline  stages of the last groups; `layer` is the group's number
    replayed  encodings and decodings that were replayed as CUDA graphs
    """

    frames: int
    skipped: int
    batch: int
    rate: float
    stages: tuple[LiveStage, ...]
    overlap: float
    timeline: tuple[Stretch, ...]
    replayed: int = 0


@dataclass(frozen=True)
class Report:
    """title: the model. state: where its weights are, in a sentence. Fields that do not apply are
    empty."""

    title: str
    state: str
    device: str = ""
    policy: str = ""
    # the rates at which a family's streamed model computes: a precision, `stored` or ComfyUI's
    tier: str = ""
    streams: bool = False
    passes: int = 0
    slots: int = 0
    window: int = 0
    budget: int = 0
    layers: tuple[LayerRow, ...] = ()
    timeline: tuple[Stretch, ...] = ()
    memories: tuple[Memory, ...] = ()
    routes: tuple[tuple[str, int], ...] = ()
    rate: float = 0.0
    overlap: float = 0.0
    predicted_pass: float | None = None
    what_if: tuple[WhatIf, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
    sparsity: Sparsity | None = None
    foretold: Foretold | None = None
    sampling: Sampling | None = None
    live: Live | None = None
    kernels: tuple[KernelRow, ...] = ()
    refusals: tuple[RefusalRow, ...] = ()
    messages: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()  # on going faster
    spare: tuple[str, ...] = ()  # on doing with less
    nodes: tuple[NodeTime, ...] = ()  # that have run in the prompt, the longest first

    @property
    def pass_seconds(self) -> float:
        """Seconds of a typical pass through the blocks: computing and waiting."""
        return sum(layer.use + layer.stall for layer in self.layers)

    @property
    def stall_seconds(self) -> float:
        return sum(layer.stall for layer in self.layers)

    @property
    def stall_share(self) -> float:
        return self.stall_seconds / self.pass_seconds if self.pass_seconds > 0 else 0.0

    @property
    def resident_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers if layer.resident)

    @property
    def streamed_bytes(self) -> int:
        """Bytes over the bus in each pass."""
        return sum(layer.stored for layer in self.layers if not layer.resident and not layer.rare)


def as_dict(report: Report) -> dict[str, Any]:
    """All fields, and the sums."""
    sums = {
        "pass_seconds": report.pass_seconds,
        "stall_seconds": report.stall_seconds,
        "stall_share": report.stall_share,
        "resident_bytes": report.resident_bytes,
        "streamed_bytes_per_pass": report.streamed_bytes,
    }
    return {**asdict(report), "sums": sums}


def as_json(report: Report) -> str:
    return json.dumps(as_dict(report), indent=1)


def size(nbytes: float) -> str:
    """Bytes in words."""
    if nbytes >= 0.1 * GIB:
        return f"{nbytes / GIB:.2f} GiB"
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**19 else f"{nbytes / 1024:.1f} KiB"


def duration(seconds: float) -> str:
    """Seconds in words."""
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{seconds * 1e3:.1f} ms"
        if seconds >= 1e-3
        else f"{seconds * 1e6:.0f} us"
    )
