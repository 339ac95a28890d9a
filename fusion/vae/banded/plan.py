"""The bands of a call, and where in the network they begin and end, such that it keeps within so
many bytes.

Nothing is known of the network but what its calls do. So they are rehearsed: on tensors without
numbers, whose bytes and products are counted. One whole rehearsal says whether a call fits at once.
If not, modules are tried at whose call bands may begin (or end, of an encoder): one for each size
of what a module is given. The earlier bands begin, the more of the network each of them repeats
around its edges; the later, the more has to be kept. A short rehearsal tells how many rows an edge
costs and how many products that are; full ones tell bytes. The plan is the one with the fewest
products that fits. One whose bands have group norms is approximate (`norms.py`), and the plan only if
none without fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..bands import Span, by_count
from .norms import same
from .reduced import Size, size_of
from .rehearsal import Call, Job, metered, rehearse, shorter
from .seam import Seam
from .tensor import Banded, Unreadable

SHORT = {True: 2, False: 9}  # frames of a short rehearsal, by whether it decodes
MOST_BANDS = 64  # fewer, if a band would be less than half of what lies around it
LITTLE = 0.9  # of the bytes of one call: bands that need more, and do not fit, are not worth their work
WORTH = 0.05  # share of products for which no further module is rehearsed in full
MODULES = 10  # at most so many are tried
SMALLER = 2.0  # times, at least, is the picture of which bands have their statistics: a quarter of the work
TRIES = 6  # sizes of it


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
    norms          group norms of a band, whose statistics are a smaller picture's; 0: it is exact
    smaller, unit  the size of that picture where bands begin, and what of it is not divided
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
    norms: int = 0
    smaller: Size = (0, 0)
    unit: int = 1

    @property
    def repeated(self) -> float:
        """The share of products that bands repeat."""
        return max(0.0, self.products / self.least - 1) if self.least else 0.0


def at_once(call: Call, job: Job) -> Plan:
    """The plan for a call without bands. `Unreadable`: there is none, and why."""
    dim = _sides(job)[0]
    seam = metered(job, dim)
    assert seam.meter is not None
    made = rehearse(call, job, seam)
    most, worst, least = seam.meter.most, seam.meter.worst, seam.meter.products
    return Plan("", "", dim, (), made.shape, most, worst, least, least, made.asked, job.card)


def in_bands(call: Call, job: Job, room: int, whole: Plan) -> Plan:
    """The plan for a call within so many bytes. whole: at once. `Unreadable`: there is none, and why."""
    reasons: list[str] = []
    for dim in _sides(job):
        found = _along(call, job, room, whole, dim, reasons)
        if found is not None:
            return found
    raise Unreadable("; ".join(dict.fromkeys(reasons)) or "it is one module")


def _sides(job: Job) -> tuple[int, int]:
    """The dimensions that may be cut, the longer one first."""
    return (-1, -2) if job.shape[-1] >= job.shape[-2] else (-2, -1)


def _along(call: Call, job: Job, room: int, whole: Plan, dim: int, reasons: list[str]) -> Plan | None:
    """The plan with bands along this dimension. whole: all at once. reasons: why a way is none, added."""
    ways = []
    names, short = _candidates(call, shorter(job, SHORT[call.decodes]), dim)
    for nested in names:
        for name in nested:
            way = _Way(call, job, dim, *((name, "") if call.decodes else ("", name)), whole)
            try:
                guess = way.guess(short, room / whole.peak)
            except Unreadable as error:
                reasons.append(f"{name or 'its input'}: {error}")
            else:
                ways.append((way.norms > 0, guess, way))
                break
    found: Plan | None = None
    for is_approximate, guess, way in sorted(ways, key=lambda each: each[:2]):
        if found is not None and found.peak <= room:
            if is_approximate and not found.norms:
                break
            if guess >= found.repeated - WORTH:
                continue
        try:
            plan = way.smallest(room)
        except Unreadable as error:
            reasons.append(f"{way.name}: {error}")
            continue
        if found is None or _worth(plan, room) < _worth(found, room):
            found = plan
    if found is not None and found.peak > max(room, LITTLE * whole.peak):
        reasons.append("bands save too little")
        return None
    return found


def _worth(plan: Plan, room: int) -> tuple[bool, bool, int]:
    """Of plans that fit an exact one, then the fewest products, and of others the fewest bytes count."""
    fits = plan.peak <= room
    return not fits, fits and plan.norms > 0, plan.products if fits else plan.peak


def _candidates(call: Call, job: Job, dim: int) -> tuple[list[tuple[str, ...]], int]:
    """The input or the result, and modules of modules. Of those that are given something of one
    size it is the last where bands begin, or else a module around it; and the first where they end.
    And the products of the call."""
    seen: dict[tuple[int, ...], list[str]] = {}

    def enter(name: str, args: Any) -> None:
        x = args[0] if args else None
        if isinstance(x, Banded) and x.ndim >= 4:
            size = (x.ndim, x.shape[1], *x.shape[-2:]) if call.decodes else (x.ndim, *x.shape[1:])
            seen.setdefault(size, []).append(name)

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
    found = list(dict.fromkeys(tuple(_around(names) if call.decodes else names[:1]) for names in seen.values()))
    assert seam.meter is not None
    return [("",), *found[-MODULES:]], seam.meter.products


def _around(names: list[str]) -> list[str]:
    """The last, and those in which it lies, from the innermost on."""
    last = names[-1]
    return sorted({name for name in names if name == last or last.startswith(f"{name}.")}, key=len, reverse=True)


class _Way:
    """Bands that begin and end at these modules."""

    def __init__(self, call: Call, job: Job, dim: int, begin: str, end: str, whole: Plan) -> None:
        self.call, self.job, self.dim, self.begin, self.end = call, job, dim, begin, end
        self.shape, self.least, self.name = whole.shape, whole.least, begin or end or "its input"
        self._unit = 1
        self._before = self._after = self.norms = 0

    def guess(self, products: int, fits: float) -> float:
        """About the share of products that two bands repeat; learns how far an edge reaches, and
        whether bands have group norms.

        products  of a short call
        fits      the share of its bytes that there are
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
        self.norms = len(seam.met)
        if seam.is_given_again:
            self._unit = max(1, given // int(short.shape[self.dim]))
        if self.norms:
            around += min(fits, SMALLER**-2)
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
        room = max(room, before)  # what is less than that which is whole saves nothing
        # A band that enters at the edge of the picture, but is not the first, makes all up to the edge.
        inner = max(2, self._sides // (max(self._before, self._after) + self._unit))
        most = min(MOST_BANDS, self._sides // self._unit, 2 * self._sides // max(1, around), inner)
        if most < 2:
            raise Unreadable("it is too small for two bands")
        count = 2
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
        if self.norms:
            self._record(seam, max(room, peak))
            peak, worst, products = max(peak, meter.most), max(worst, meter.worst), products + meter.products
        if self.end:
            seam.free()
            meter.begin()
            rehearse(self.call, self.job, seam, "behind")
            peak, worst, products = max(peak, meter.most), max(worst, meter.worst), products + meter.products
        taken = peak, worst, products, self.least
        norms = len(seam.met), seam.size, seam.unit
        return Plan(self.begin, self.end, self.dim, bands, self.shape, *taken, False, self.job.card, *norms)

    def _record(self, seam: Seam, room: int) -> None:
        """Rehearse the largest of the smaller pictures that fits; if none does, the smallest."""
        meter, factor = seam.meter, SMALLER
        assert meter is not None
        kept, (height, width), met = meter.now, seam.sides(self.job.shape), seam.met
        for _ in range(TRIES):
            seam.size = size_of(height, width, factor, seam.unit)
            meter.begin()
            rehearse(self.call, self.job, seam, "statistics")
            if meter.most <= room:
                break
            # Bytes grow with its area.
            factor *= max(1.05, 1.02 * math.sqrt((meter.most - kept) / max(1, room - kept)))
        if not same(met, seam.met):
            raise Unreadable("a band has other group norms than a smaller picture")

    def _begun(self, job: Job) -> Seam:
        net = self.call.net
        begin, end = (net.get_submodule(name) if name else None for name in (self.begin, self.end))
        seam = metered(job, self.dim, begin, end)
        seam.unit = self._unit
        if begin is not None:
            rehearse(self.call, job, seam, "before")
        return seam

    def _made(self, seam: Seam, job: Job, enters: Span) -> Span:
        span = rehearse(self.call, job, seam, "band", enters).span
        return seam.left if self.end else span


def _up(lost: float, unit: int) -> int:
    """Whole units that hold so many rows."""
    return -int(-lost // unit) * unit if lost > 0 else 0
