"""An estimate as plain values, from a MODEL, a latent, steps and guidance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from ..families import FAMILIES
from ..fused.block import policy_of_model
from ..fused.quality import (
    AsStored,
    as_stored,
    rates_of_policy,
    resolved,
)
from ..report.gathering import noting, stream_of, title
from ..sampling import measured
from ..sampling.step_timer import Sampled
from ..sparse.model import sparse_of
from .card import card_of
from .fit import Fit, Verdict, fit_of
from .sums import Blocks, step_seconds

TIERS = ("precise", "fast", "turbo")
FEW_STEPS = 4  # of a model with a LoRA that was made for few
WORTH = 0.97  # of the time: what saves less is not told
SMALLER = 2 / 3  # of a side
LEAST_SIDE = 32  # of a latent that a smaller one is told for
MULTIPLE = 2  # of a latent's sides: what patches need


@dataclass(frozen=True)
class Work:
    """shape: of the latent. prompts: of each step."""

    shape: tuple[int, ...]
    steps: int
    prompts: int


@dataclass(frozen=True)
class Change:
    """Something else that one could do. what: its kind and its values, for words. seconds: of a step; None: nobody knows."""

    what: str
    values: tuple[Any, ...]
    work: Work
    fit: Fit | None
    seconds: float | None

    @property
    def total(self) -> float | None:
        return None if self.seconds is None else self.seconds * self.work.steps


@dataclass(frozen=True)
class Estimate:
    """
    title, card, kernels  the model, the device and the policy, in words
    auto                  what the quality `auto` comes to; None: another quality
    pixels                frames, height and width of what the latent stands for; 0 frames: of a picture
    fit                   None: the model does not stream, and ComfyUI's own memory management has its weights
    seconds, source       of a step; None: nobody knows
    by                    the sampling that it rests on, where it rests on one
    assumed_bus           whether the rate of the bus was assumed
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

    @property
    def total(self) -> float | None:
        return None if self.seconds is None else self.seconds * self.work.steps


def estimate(model: Any, shape: Sequence[int], steps: int, guidance: float) -> Estimate:
    """shape: of the latent, [batch, channels, ...]. guidance: with 1 a step computes one prompt. What cannot be found out becomes a
    gap."""
    gaps: list[str] = []
    work = Work(_for_model(model, shape), steps, 1 if guidance == 1.0 else 2)
    found = Estimate("model", "", "", work, (0, 0, 0))
    with noting(gaps, "model"):
        told = title(model)
        found = replace(found, title=told["title"], card=told["device"], pixels=pixels_of(model, work.shape))
    if stream_of(model) is not None:
        with noting(gaps, "estimate"):
            found = _streamed(found, _Case(model, found.card))
    return replace(found, gaps=tuple(gaps))


def _for_model(model: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """As stock makes an empty latent fit the model: its channels, and a dimension for frames."""
    wanted = model.model.latent_format
    fitted = list(shape)
    if len(fitted) == 4 and wanted.latent_dimensions == 3:
        fitted.insert(2, 1)
    return (fitted[0], int(wanted.latent_channels), *fitted[2:])


def pixels_of(model: Any, shape: Sequence[int]) -> tuple[int, int, int]:
    wanted = model.model.latent_format
    height, width = (int(side * wanted.spacial_downscale_ratio) for side in shape[-2:])
    frames = (shape[2] - 1) * wanted.temporal_downscale_ratio + 1 if len(shape) == 5 else 0
    return int(frames), height, width


def shape_of(model: Any, pixels: tuple[int, int, int], batch: int = 1, more: int = 0) -> tuple[int, ...]:
    """Of the latent for frames, height and width; 0 frames: for a picture. more: of its frames, beyond those."""
    wanted = model.model.latent_format
    frames, *sides = pixels
    shape = (batch, int(wanted.latent_channels), *(int(side // wanted.spacial_downscale_ratio) for side in sides))
    if wanted.latent_dimensions == 3:
        count = max(frames - 1, 0) // wanted.temporal_downscale_ratio + 1 + more
        shape = (*shape[:2], int(count), *shape[2:])
    return shape


# ------------------------------------------------------------------------------------------------------------ one model


class _Case:
    """A streamed MODEL on its card: what a step takes under any work and precision."""

    def __init__(self, model: Any, card: str) -> None:
        self.model, self.stream = model, model.stream
        self.card_name = card
        self.card: Card | None = card_of(model.load_device)
        self.net = model.model.diffusion_model
        self.family = _family(self.stream.family)
        policy = policy_of_model(model)
        is_off = policy is None or policy.is_off or self.family is None
        self.who = STOCK if is_off or policy is None else rates_of_policy(model, policy)
        self.has_int8 = not is_off and policy is not None and as_stored(model, policy) is AsStored.INT8
        self.kernels = measured.kernels_key(model)
        self.is_sparse = sparse_of(model.model_options.get("transformer_options", {})) is not None
        self.bus, self.assumed_bus = self._bus()

    def _bus(self) -> tuple[float | None, bool]:
        """Bytes per second, as far as this process has seen; else None: the card's row has one, or it is assumed."""
        rate = self.stream.residency.ledger.rate()
        return (rate, False) if rate else (None, self.card is not None)

    def cost(self, work: Work) -> Cost | None:
        if self.family is None or self.family.cost is None:
            return None
        return self.family.cost(self.net, work.shape)

    def sums(self, work: Work, fit: Fit, who: str) -> tuple[float, Source] | None:
        """Seconds of a step by adding up; None: this model or this card nobody has counted."""
        cost = self.cost(work)
        rates = None if self.card is None or cost is None else rates_of(self.card, who, cost.width)
        if rates is None or cost is None or self.is_sparse:
            return None
        speed, passes, source = rates
        speed = speed if self.bus is None else replace(speed, bus=self.bus)
        blocks = Blocks(fit.sizes, fit.stored, fit.held)
        return work.shape[0] * step_seconds(cost, speed, passes, blocks, work.prompts, fit.forwards), source

    def operations(self, work: Work) -> float | None:
        """Of a step: by these a run at one size tells of another, on a card of which no rates are known."""
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
        found = replace(found, by=None, assumed_bus=source is Source.PREDICTED and case.assumed_bus)
    return replace(found, changes=tuple(_changes(found, case, fit, who)))


def _seconds(case: _Case, work: Work, fit: Fit, before: Sampled | None) -> tuple[float | None, Source | None]:
    """Of a step, by the best that there is."""
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
    """How many times as long a step takes as under the other work and the model's own precision."""
    then_fit = then_fit or fit_of(case.model, then.shape, then.prompts)
    here, there = case.sums(work, fit, who), case.sums(then, then_fit, case.who)
    if here is not None and there is not None:
        return here[0] / there[0]
    ours, theirs = case.operations(work), case.operations(then)
    if ours is None or theirs is None or who != case.who:
        return None
    return ours / theirs


# ---------------------------------------------------------------------------------------------------- what would change it


def _changes(found: Estimate, case: _Case, fit: Fit, who: str) -> Iterator[Change]:
    """What would be faster, or fit."""
    for what, values, work, tier in _others(found, case, who):
        other = fit_of(case.model, work.shape, work.prompts, is_automatic=what == "budget")
        ratio = None if found.seconds is None else _ratio(case, work, other, tier, found.work, fit)
        seconds = None if ratio is None or found.seconds is None else found.seconds * ratio
        change = Change(what, values, work, other, seconds)
        if _is_worth(change, found):
            yield change


def _is_worth(change: Change, found: Estimate) -> bool:
    helps = found.fit is not None and found.fit.verdict in (Verdict.NOT, Verdict.TIGHT) and change.fit is not None
    if helps and change.fit is not None and found.fit is not None and change.fit.verdict.name != found.fit.verdict.name:
        return change.fit.verdict is not Verdict.NOT
    if change.total is None or found.total is None:
        return change.what != "quality"
    return change.total < WORTH * found.total


def _faster_tiers(case: _Case, who: str) -> tuple[str, ...]:
    """The qualities beyond this one, each by whose rates it is reckoned. With an INT8 file `auto` is one: it multiplies bytes."""
    if who == STORED:
        return TIERS[-1:]
    beyond = TIERS[TIERS.index(who) + 1 :] if who in TIERS else ()
    return (STORED, *beyond) if beyond and case.has_int8 else beyond


def _others(found: Estimate, case: _Case, who: str) -> Iterator[tuple[str, tuple[Any, ...], Work, str]]:
    work = found.work
    for tier in () if case.is_sparse else _faster_tiers(case, who):
        yield "quality", ("auto" if tier == STORED else tier,), work, tier
    if case.stream.residency.ceiling is not None and found.fit is not None and found.fit.passes:
        yield "budget", (), work, who
    if found.work.steps > FEW_STEPS:
        yield "few steps", (FEW_STEPS,), replace(work, steps=FEW_STEPS, prompts=1), who
    if len(work.shape) == 5 and work.shape[2] > 2:
        fewer = (*work.shape[:2], (work.shape[2] + 1) // 2, *work.shape[3:])
        yield "frames", pixels_of(case.model, fewer)[:1], replace(work, shape=fewer), who
    smaller = tuple(max(MULTIPLE, round(side * SMALLER / MULTIPLE) * MULTIPLE) for side in work.shape[-2:])
    if min(smaller) >= LEAST_SIDE:
        shape = (*work.shape[:-2], *smaller)
        yield "size", pixels_of(case.model, shape)[1:], replace(work, shape=shape), who
