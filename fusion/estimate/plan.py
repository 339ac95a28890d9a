"""An estimate as plain values, from a MODEL, a latent, steps and guidance."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..base.card_rates import (
    STOCK,
    STORED,
    Card,
    Source,
    rates_of,
)
from ..base.cost import Cost
from ..base.family import Family, Role
from ..base.format import DRAFT
from ..base.policy import policy_on
from ..families import FAMILIES
from ..fused.quality import (
    AsStored,
    as_stored,
    rates_of_policy,
    resolved,
)
from ..load.draft_quality import at_quality
from ..report.gathering import noting, pixels_of, stream_of, title
from ..sampling import measured
from ..sampling.step_timer import Sampled
from ..sparse.model import sparse_of
from ..sparse.settings import Settings as Sparsity
from ..step_cache.model import step_cache_of
from .card import card_of
from .fit import Fit, Verdict, fit_of
from .ram import RamFit, ram_fit
from .sums import Blocks, step_seconds

TIERS = ("precise", "fast", "turbo")
FEW_STEPS = 4  # of a model with a LoRA for few steps
WORTH = 0.97  # share of the time: changes that save less are not told
SMALLER = 2 / 3  # share of a side
LEAST_SIDE = 32  # of a latent; a smaller size is not proposed
FEW_FRAMES = 2  # of a latent; fewer are not proposed
MULTIPLE = 2  # of a latent's sides, as patches need


@dataclass(frozen=True)
class Work:
    """The work of a sampling. shape: of the latent. prompts: of each step."""

    shape: tuple[int, ...]
    steps: int
    prompts: int


@dataclass(frozen=True)
class Change:
    """A possible change. what: its kind; values: for its words. seconds: of a step; None: not
    known. is_most: as of an estimate."""

    what: str
    values: tuple[Any, ...]
    work: Work
    fit: Fit | None
    seconds: float | None
    is_most: bool = False

    @property
    def total(self) -> float | None:
        return None if self.seconds is None else self.seconds * self.work.steps


@dataclass(frozen=True)
class Estimate:
    """
    title, card, kernels  the model, the device and the policy, in words
    auto                  how the quality `auto` computes here; None: another quality
    pixels                frames, height and width that the latent stands for; 0 frames: a picture
    fit                   None: the model does not stream, and ComfyUI manages its weights
    seconds, source       of a step; None: not known
    by                    the sampling that it rests on, if any
    assumed_bus           whether the rate of the bus was assumed
    ram                   what RAM holds of the workflow's files
    is_most               whether it takes less time, because work is left out as it runs: how much
                          less is not known before
    assumed               what the work rests on that nobody said, in a sentence
    """

    title: str
    card: str
    kernels: str
    work: Work
    pixels: tuple[int, int, int]
    fit: Fit | None = None
    seconds: float | None = None
    source: Source | None = None
    by: Sampled | None = None
    assumed_bus: bool = False
    changes: tuple[Change, ...] = ()
    gaps: tuple[str, ...] = ()
    auto: AsStored | None = None
    ram: RamFit | None = None
    is_most: bool = False
    assumed: str = ""

    @property
    def total(self) -> float | None:
        return None if self.seconds is None else self.seconds * self.work.steps


def estimate(
    model: Any, shape: Sequence[int], steps: int, prompts: int, files: Mapping[str, int] | None = None
) -> Estimate:
    """The estimate for a MODEL. shape: of the latent, [batch, channels, ...]. prompts: of each step.
    files: the workflow's, by their paths, with their bytes. Errors become gaps."""
    gaps: list[str] = []
    work = Work(_for_model(model, shape), steps, prompts)
    found = Estimate("model", "", "", work, (0, 0, 0))
    with noting(gaps, "model"):
        told = title(model)
        found = replace(found, title=told["title"], card=told["device"], pixels=pixels_of(model, work.shape))
    if stream_of(model) is not None:
        with noting(gaps, "estimate"):
            found = _streamed(found, _Case(model, found.card))
        with noting(gaps, "RAM"):
            found = replace(found, ram=_in_ram(found, model, files or {}))
    return replace(found, gaps=tuple(gaps))


def _in_ram(found: Estimate, model: Any, files: Mapping[str, int]) -> RamFit | None:
    if found.fit is None:
        return None
    own = {str(header.path) for header in model.stream.residency.source.files}
    beside = tuple(nbytes for path, nbytes in files.items() if path not in own)
    return ram_fit(found.fit, model.stream.residency.source.nbytes, beside)


def _for_model(model: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """The latent's shape, fitted to the model as stock fits an empty latent: its channels, and a
    dimension for frames."""
    wanted = model.model.latent_format
    fitted = list(shape)
    if len(fitted) == 4 and wanted.latent_dimensions == 3:
        fitted.insert(2, 1)
    return (fitted[0], int(wanted.latent_channels), *fitted[2:])


def prompts_of(guidance: float) -> int:
    """Of each step: with a guidance of 1 stock leaves the negative one out."""
    return 1 if guidance == 1.0 else 2


def shape_of(model: Any, pixels: tuple[int, int, int], batch: int = 1, more: int = 0) -> tuple[int, ...]:
    """Shape of the latent for these frames, height and width; 0 frames: for a picture. more:
    additional frames of the latent. To a model of pictures frames are a batch."""
    wanted = model.model.latent_format
    frames, *sides = pixels
    if wanted.latent_dimensions < 3:
        batch *= max(1, frames)
    shape = (batch, int(wanted.latent_channels), *(int(side // wanted.spacial_downscale_ratio) for side in sides))
    if wanted.latent_dimensions == 3:
        count = max(frames - 1, 0) // wanted.temporal_downscale_ratio + 1 + more
        shape = (*shape[:2], int(count), *shape[2:])
    return shape


# ------------------------------------------------------------------------------------------------------------ one model


class _Case:
    """A streamed MODEL on its card: the seconds of a step under any work and precision."""

    def __init__(self, model: Any, card: str) -> None:
        self.model, self.stream = model, model.stream
        self.card_name = card
        self.card: Card | None = card_of(model.load_device)
        self.net = model.model.diffusion_model
        self.family = _family(self.stream.arrivals.family)
        policy = policy_on(model)
        is_off = policy is None or policy.is_off or self.family is None
        self.who = STOCK if is_off or policy is None else rates_of_policy(model, policy)
        self.has_int8 = not is_off and policy is not None and as_stored(model, policy) is AsStored.INT8
        self.kernels = measured.kernels_key(model)
        self._sparse = sparse_of(model.model_options.get("transformer_options", {}))
        self._foretells = step_cache_of(model) is not None
        self.bus, self.assumed_bus = self._bus()

    def _bus(self) -> tuple[float | None, bool]:
        """Bytes per second of the bus that this process has seen, and whether the rate is assumed.
        None: the card's row has one, or it is assumed."""
        rate = self.stream.residency.ledger.rate()
        return (rate, False) if rate else (None, self.card is not None)

    def cost(self, work: Work) -> Cost | None:
        if self.family is None or self.family.cost is None:
            return None
        return self.family.cost(self.net, work.shape)

    def is_sparse(self, work: Work) -> bool:
        """Whether some attentions of this work may be sparse: how much of them is not known beforehand."""
        if self._sparse is None:
            return False
        cost, asked = self.cost(work), self._sparse.settings
        return cost is None or not isinstance(asked, Sparsity) or cost.tokens >= asked.least_tokens

    def leaves_out(self, work: Work) -> bool:
        """Whether attentions are sparse, or steps are foretold, as it turns out while it runs."""
        return self.is_sparse(work) or (self._foretells and work.steps > FEW_STEPS)

    def draft_leaves_out(self, work: Work) -> bool:
        """Whether the quality Draft leaves out work that this model computes."""
        if self._sparse is not None or self._foretells:
            return False
        return _Case(at_quality(self.model, DRAFT), self.card_name).leaves_out(work)

    def sums(self, work: Work, fit: Fit, who: str) -> tuple[float, Source] | None:
        """Seconds of a step by adding up, with all of its work; None if there are no figures for this
        model or card."""
        cost = self.cost(work)
        rates = None if self.card is None or cost is None else rates_of(self.card, who, cost.width)
        if rates is None or cost is None:
            return None
        speed, passes, source = rates
        speed = speed if self.bus is None else replace(speed, bus=self.bus)
        blocks = Blocks(fit.sizes, fit.stored, fit.held)
        # A batch computes together, so the weights pass once for all of it.
        return step_seconds(cost, speed, passes, blocks, work.shape[0] * work.prompts, fit.forwards), source

    def operations(self, work: Work) -> float | None:
        """Operations of a step. They scale a run at one size to another, on a card without known
        rates."""
        cost = self.cost(work)
        return None if cost is None else work.shape[0] * work.prompts * (cost.gemm + cost.attention)


def _family(name: str | None) -> Family | None:
    found = (family for family in FAMILIES if family.role is Role.DIFFUSION and family.name == name)
    return next(found, None)


def _streamed(found: Estimate, case: _Case) -> Estimate:
    work, who = found.work, case.who
    fit = fit_of(case.model, work.shape, work.prompts)
    before = measured.find(case.card_name, case.stream.path.name, case.kernels, work.shape, work.prompts)
    seconds, source = _seconds(case, work, fit, before)
    found = replace(found, kernels=measured.kernels_words(case.model), auto=resolved(case.model))
    found = replace(found, fit=fit, seconds=seconds, source=source, by=before)
    if source in (Source.PREDICTED, Source.CARD):
        is_assumed = source is Source.PREDICTED and case.assumed_bus
        found = replace(found, by=None, assumed_bus=is_assumed, is_most=case.leaves_out(work))
    return replace(found, changes=tuple(_changes(found, case, fit, who)))


def _seconds(case: _Case, work: Work, fit: Fit, before: Sampled | None) -> tuple[float | None, Source | None]:
    """Seconds of a step, from the best source available."""
    added = case.sums(work, fit, case.who)
    if before is not None:
        if before.shape == work.shape and before.prompts == work.prompts:
            return before.seconds, Source.MEASURED
        then = Work(before.shape, before.steps, before.prompts)
        ratio = _ratio(case, work, fit, case.who, then)
        if ratio is not None:
            return before.seconds * ratio, Source.SCALED
    return added or (None, None)


def _ratio(case: _Case, work: Work, fit: Fit, who: str, then: Work, then_fit: Fit | None = None) -> float | None:
    """Seconds of a step, relative to a step of the other work at the model's own precision."""
    then_fit = then_fit or fit_of(case.model, then.shape, then.prompts)
    if not (case.is_sparse(work) or case.is_sparse(then)):
        here, there = case.sums(work, fit, who), case.sums(then, then_fit, case.who)
        if here is not None and there is not None:
            return here[0] / there[0]
    ours, theirs = case.operations(work), case.operations(then)
    if ours is None or theirs is None or who != case.who:
        return None
    return ours / theirs


# ---------------------------------------------------------------------------------------------------- what would change it


def _changes(found: Estimate, case: _Case, fit: Fit, who: str) -> Iterator[Change]:
    """Changes that would be faster, or would fit."""
    for what, values, work, tier in _others(found, case, who):
        other = fit_of(case.model, work.shape, work.prompts, is_automatic=what == "budget")
        ratio = None if found.seconds is None else _ratio(case, work, other, tier, found.work, fit)
        seconds = None if ratio is None or found.seconds is None else found.seconds * ratio
        change = Change(what, values, work, other, seconds, is_most=values == (DRAFT,) or found.is_most)
        if _is_worth(change, found):
            yield change


def _is_worth(change: Change, found: Estimate) -> bool:
    is_lacking = found.fit is not None and found.fit.is_lacking
    if is_lacking and found.fit is not None and change.fit is not None and change.fit.verdict is not found.fit.verdict:
        return change.fit.verdict is not Verdict.NOT
    if change.is_most and not found.is_most:  # how much less it takes is not known before
        return change.total is not None
    if change.total is None or found.total is None:
        return change.what != "quality"
    return change.total < WORTH * found.total


def _faster_tiers(case: _Case, who: str) -> tuple[str, ...]:
    """The qualities beyond this one, each named by the rates that it is reckoned at. For an INT8
    file `auto` is one of them, because it multiplies bytes."""
    if who == STORED:
        return TIERS[-1:]
    beyond = TIERS[TIERS.index(who) + 1 :] if who in TIERS else ()
    return (STORED, *beyond) if beyond and case.has_int8 else beyond


def _others(found: Estimate, case: _Case, who: str) -> Iterator[tuple[str, tuple[Any, ...], Work, str]]:
    work = found.work
    for tier in () if case.is_sparse(work) else _faster_tiers(case, who):
        yield "quality", ("auto" if tier == STORED else tier,), work, tier
    if who == TIERS[-1] and case.draft_leaves_out(work):
        yield "quality", (DRAFT,), work, who
    if case.stream.residency.ceiling is not None and found.fit is not None and found.fit.passes:
        yield "budget", (), work, who
    if found.work.steps > FEW_STEPS:
        yield "few steps", (FEW_STEPS,), replace(work, steps=FEW_STEPS, prompts=1), who
    is_lacking = found.fit is not None and found.fit.is_lacking
    fewer, smaller = list(_fewer_frames(work)), list(_smaller_sizes(work))
    if not is_lacking:
        fewer, smaller, both = fewer[:1], smaller[:1], []
    else:  # the most that fits
        fewer, smaller = _first_that_fits(case, fewer), _first_that_fits(case, smaller)
        both = [] if fewer or smaller else _first_that_fits(case, _fewer_and_smaller(work))
    for other in fewer:
        yield "frames", pixels_of(case.model, other.shape)[:1], other, who
    for other in smaller:
        yield "size", pixels_of(case.model, other.shape)[1:], other, who
    for other in both:
        yield "frames and size", pixels_of(case.model, other.shape), other, who


def _first_that_fits(case: _Case, works: Iterable[Work]) -> list[Work]:
    """The first that fits, if any: of works that become smaller, so that not all need be tried."""
    found = list(works)
    first = bisect_left(found, True, key=lambda work: not fit_of(case.model, work.shape, work.prompts).is_lacking)
    return found[first : first + 1]


def _fewer_frames(work: Work) -> Iterator[Work]:
    """With half of the frames, a quarter, .."""
    while len(work.shape) == 5 and work.shape[2] > FEW_FRAMES:
        work = replace(work, shape=(*work.shape[:2], (work.shape[2] + 1) // 2, *work.shape[3:]))
        yield work


def _smaller_sizes(work: Work) -> Iterator[Work]:
    """Two thirds of each side, four ninths, .."""
    while len(work.shape) >= 4:
        sides = tuple(max(MULTIPLE, round(side * SMALLER / MULTIPLE) * MULTIPLE) for side in work.shape[-2:])
        if min(sides) < LEAST_SIDE:
            return
        work = replace(work, shape=(*work.shape[:-2], *sides))
        yield work


def _fewer_and_smaller(work: Work) -> Iterator[Work]:
    """In turn, as long as there is either."""
    while True:
        fewer = next(_fewer_frames(work), None)
        smaller = next(_smaller_sizes(fewer or work), None)
        if fewer is None and smaller is None:
            return
        for one in (fewer, smaller):
            if one is not None:
                work = one
                yield work
