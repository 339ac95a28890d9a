"""The bands of a call, and where in the network they begin and end, such that it keeps within so
many bytes.

Nothing is known of the network but what its calls do. So they are rehearsed: on tensors without
numbers, whose bytes and products are counted. One whole rehearsal says whether a call fits at once.
If not, modules are tried at whose call bands may begin (or end, of an encoder): one for each size
of what a module is given. The earlier bands begin, the more of the network each of them repeats
around its edges; the later, the more has to be kept. A short rehearsal tells how many rows an edge
costs and how many products that are; full ones tell bytes. The plan is the one with the fewest
products that fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..bands import Span, by_count
from ..memory_limits import SMALL_CARD
from .rehearsal import Call, Job, Rehearsal, metered, rehearse, shorter
from .seam import Seam
from .tensor import Banded, Unreadable

SHORT = {True: 2, False: 9}  # frames of a short rehearsal, by whether it decodes
MOST_BANDS = 64  # fewer, if a band would be less than half of what lies around it
LITTLE = 0.9  # of the bytes of one call: bands that need more, and do not fit, are not worth their work
WORTH = 0.05  # share of products for which no further module is rehearsed in full
MODULES = 6  # at most so many are tried


@dataclass(frozen=True)
class Band:
    """enters: the part of what is cut that a band is given. makes: its part of what comes out."""

    enters: Span
    makes: Span


@dataclass(frozen=True)
class Plan:
    """begin, end  names of the modules where bands begin and end; empty: the input, the result
    dim            the dimension that is cut, from the end
    bands          none: all at once
    shape          of the result
    peak           most bytes at a time on the device, without weights
    worst          the same with a workspace of every convolution
    products       multiplications, about; least: of all at once
    asked          whether stock's code asked how large the card is
    card           bytes of a card in all that it is told of; 0: its own
    """

    begin: str
    end: str
    dim: int
    bands: tuple[Band, ...]
    shape: tuple[int, ...]
    peak: int
    worst: int
    products: int
    least: int
    asked: bool = False
    card: int = 0

    @property
    def repeated(self) -> float:
        """The share of products that bands repeat."""
        return max(0.0, self.products / self.least - 1) if self.least else 0.0


def planned(call: Call, job: Job, room: int) -> Plan:
    """The plan for a call within so many bytes. `Unreadable`: there is none, and why."""
    dim = -1 if job.shape[-1] >= job.shape[-2] else -2
    seam = metered(job, dim)
    assert seam.meter is not None
    whole = rehearse(call, job, seam)
    most, worst, least = seam.meter.most, seam.meter.worst, seam.meter.products
    if most <= room:
        return Plan("", "", dim, (), whole.shape, most, worst, least, least, whole.asked, job.card)
    if whole.asked and not job.card:  # as few frames at a time as on the smallest card
        return planned(call, replace(job, card=SMALL_CARD), room)
    reasons: list[str] = []
    ways = []
    names, short = _candidates(call, shorter(job, SHORT[call.decodes]), dim)
    for name in names:
        way = _Way(call, job, dim, *((name, "") if call.decodes else ("", name)), whole, least)
        try:
            ways.append((way.guess(short), way))
        except Unreadable as error:
            reasons.append(f"{name or 'its input'}: {error}")
    found: Plan | None = None
    for guess, way in sorted(ways, key=lambda each: each[0]):
        if found is not None and found.peak <= room and guess >= found.repeated - WORTH:
            break
        try:
            plan = way.smallest(room)
        except Unreadable as error:
            reasons.append(f"{way.name}: {error}")
            continue
        if found is None or _worth(plan, room) < _worth(found, room):
            found = plan
    if found is not None and found.peak > max(room, LITTLE * most):
        reasons.append("bands save too little")
        found = None
    if found is None:
        raise Unreadable("; ".join(dict.fromkeys(reasons)) or "it is one module")
    return found


def _worth(plan: Plan, room: int) -> tuple[bool, int]:
    """Of plans that fit the fewest products, and of others the fewest bytes count."""
    fits = plan.peak <= room
    return not fits, plan.products if fits else plan.peak


def _candidates(call: Call, job: Job, dim: int) -> tuple[list[str], int]:
    """The input or the result, and modules of modules. Of those that are given something of one
    size it is the last where bands begin, and the first where they end. And the products of the
    call."""
    seen: dict[tuple[int, ...], str] = {}

    def enter(name: str, args: Any) -> None:
        x = args[0] if args else None
        if isinstance(x, Banded) and x.ndim >= 4:
            size = (x.ndim, x.shape[1], *x.shape[-2:]) if call.decodes else (x.ndim, *x.shape[1:])
            seen[size] = name if call.decodes else seen.get(size, name)

    hooks = [
        module.register_forward_pre_hook(lambda _module, args, name=name: enter(name, args))
        for name, module in call.net.named_modules()
        if name and any(True for _ in module.children()) and sum(1 for _ in module.modules()) > 2
    ]
    seam = metered(job, dim)
    try:
        rehearse(call, job, seam)
    finally:
        for hook in hooks:
            hook.remove()
    names = list(dict.fromkeys(seen.values()))
    assert seam.meter is not None
    return ["", *names[-MODULES:]], seam.meter.products


class _Way:
    """Bands that begin and end at these modules."""

    def __init__(self, call: Call, job: Job, dim: int, begin: str, end: str, whole: Rehearsal, least: int) -> None:
        self.call, self.job, self.dim, self.begin, self.end = call, job, dim, begin, end
        self.shape, self.least, self.name = whole.shape, least, begin or end or "its input"
        self._before = self._after = 0

    def guess(self, products: int) -> float:
        """About the share of products that two bands repeat; learns how far an edge reaches.

        products: of a short call
        """
        short = shorter(self.job, SHORT[self.call.decodes])
        seam = self._begun(short)
        meter = seam.meter
        assert meter is not None
        before, meter.products = meter.products, 0
        given = seam.entering(short.shape)
        middle = given // 2
        first = self._made(seam, short, (0, middle))
        last = self._made(seam, short, (middle, given))
        made = seam.leaving(self.shape)
        unit = max(1, given // made)
        if given % unit or made * unit % given:
            raise Unreadable("its sizes do not go into each other")
        self._sides, self._made_size, self._unit = given, made, unit
        # Rows that are lost at a cut, in those that enter.
        self._after = _up(middle - first[1] * given / made, unit)
        self._before = _up(last[0] * given / made - middle, unit)
        around = 1 + (self._before + self._after) / given
        return (before + meter.products * around) / max(1, products) - 1

    def bands(self, count: int) -> tuple[Band, ...]:
        """So many, as equal as possible."""
        found = []
        parts = by_count(self._sides // self._unit, count)
        for low, high in ((first * self._unit, last * self._unit) for first, last in parts):
            enters = max(0, low - self._before), min(self._sides, high + self._after)
            makes = low * self._made_size // self._sides, high * self._made_size // self._sides
            found.append(Band(enters, makes))
        return tuple(found)

    def smallest(self, room: int) -> Plan:
        """The plan with the fewest bands that fits; if none does, with the most bands."""
        seam = self._begun(self.job)
        meter = seam.meter
        assert meter is not None
        before, kept, worst, products = meter.most, meter.now, meter.worst, meter.products
        around = self._before + self._after
        most = min(MOST_BANDS, self._sides // self._unit, 2 * self._sides // max(1, around))
        if most < 2:
            raise Unreadable("it is too small for two bands")
        count, room = 2, max(room, before)  # no band is to be smaller than what is whole
        while True:
            bands = self.bands(count)
            widths = [band.enters[1] - band.enters[0] for band in bands]
            widest = bands[widths.index(max(widths))]
            meter.begin()
            made = self._made(seam, self.job, widest.enters)
            if made[0] > widest.makes[0] or made[1] < widest.makes[1]:
                raise Unreadable("a band makes less than was foreseen")
            if meter.most <= room or count == most:
                break
            # Bytes of a band grow with its width.
            wanted = (room - kept) / max(1, meter.most - kept) * max(widths) - around
            count = min(most, max(count + 1, int(self._sides / wanted))) if wanted > 0 else most
        peak, worst = max(before, meter.most), max(worst, meter.worst)
        products += meter.products * sum(widths) // max(widths)
        if self.end:
            seam.free()
            meter.begin()
            rehearse(self.call, self.job, seam, "behind")
            peak, worst, products = max(peak, meter.most), max(worst, meter.worst), products + meter.products
        sizes = self.shape, peak, worst, products, self.least
        return Plan(self.begin, self.end, self.dim, bands, *sizes, card=self.job.card)

    def _begun(self, job: Job) -> Seam:
        net = self.call.net
        begin, end = (net.get_submodule(name) if name else None for name in (self.begin, self.end))
        seam = metered(job, self.dim, begin, end)
        if begin is not None:
            rehearse(self.call, job, seam, "before")
        return seam

    def _made(self, seam: Seam, job: Job, enters: Span) -> Span:
        span = rehearse(self.call, job, seam, "band", enters).span
        return seam.left if self.end else span


def _up(lost: float, unit: int) -> int:
    """Whole units that hold so many rows."""
    return -int(-lost // unit) * unit if lost > 0 else 0
