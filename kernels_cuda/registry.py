"""What an operation is: a name, a reference, and candidates that may compute it.

    op(tensors, options, policy)      tensors: a fixed tuple, None where an optional one is absent
                                      options: a tuple of plain values

The first call with a new signature resolves it: every candidate is asked whether it can serve (None, or the reason in
words), the policy's mode and the known winners decide, and the chosen candidate prepares a plan. Later calls find
the plan by one dictionary lookup. Shapes, strides, dtypes, devices, alignment and options are all in the key, so a plan
never meets an input it was not made for.

    auto   the fastest of our candidates and stock's: known, or found out at the calls themselves (autotune.py)
    on     our first candidate that can; KernelRefused with every reason if none can
    off    what stock ComfyUI runs
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .call import Begun, Call, Candidate, Options, Plan, Tensors
from .errors import CodeUnavailable, KernelError, KernelRefused
from .launcher import Card, card, forced_class
from .ledger import LEDGER, Choice
from .policy import STANDARD, KernelPolicy
from .tune import autotune

GRADIENT = "a gradient is wanted, and the kernels are for inference"
MOST_TACTICS = 4  # that are tried, of each candidate
MOST_BESIDE = 2**25  # bytes: what stock's operations write only to read it again, of a candidate that races
MOST_PLANS = 4096  # per op and thread: a session meets a few hundred signatures, and each plan is about a kilobyte


# Bound once: these run at every call.
_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling


def _wants_gradient(tensors: Tensors) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


class OneWay:
    """A candidate that there is only one way to run, and nothing to wait for."""

    def tactics(self: Candidate, call: Call) -> Sequence[Candidate]:  # noqa: ARG002
        return (self,)

    def begin(self, call: Call) -> Begun | None:  # noqa: ARG002
        return None


@dataclass(frozen=True)
class StockCandidate(OneWay):
    """What stock ComfyUI computes, in torch's own operations: called as run(*tensors, *options)."""

    run: Callable[..., Any]
    name: str = "stock"
    ours: bool = False
    plan: Callable[[Call], Plan | None] = lambda _: None  # of a call for which stock's way is shorter than `run`
    begins: Callable[[Call], Begun | None] = lambda _: None  # see Candidate.begin
    beside: Callable[[Call], int] = lambda _: 0  # bytes that `run` takes beside what it is given and what it makes

    def refuse(self, call: Call) -> str | None:  # noqa: ARG002 - stock serves whatever stock serves
        return None

    def prepare(self, call: Call) -> Plan:
        run, options = self.run, call.options
        return self.plan(call) or (lambda *tensors: run(*tensors, *options))

    def begin(self, call: Call) -> Begun | None:
        return self.begins(call)


@dataclass(frozen=True)
class CudaCandidate:
    """A kernel of ours. What every kernel needs is checked here, the rest is the op's:

    obstacles  yields reasons why not; only the first is asked for, so a check may rely on those before it
    plan       (call, card, tactic) -> plan. Tactic None: choose by rule
    ways       call -> tactics, best known first; one that cuts the work in a single way has none
    begins     see Candidate.begin: of one that is torch's in part
    unit       of its kernels: an op with a single unit fills it in
    runs       (call, card, tactic) -> whether the card's code has this way, of those that not every class has
    """

    name: str
    obstacles: Callable[[Call], Iterator[str]]
    plan: Callable[[Call, Card, Any], Plan]
    ways: Callable[[Call], Sequence[Any]] = lambda _: ()
    unit: str = ""
    runs: Callable[[Call, Card, Any], bool] | None = None
    tactic: Any = None
    ours: bool = True
    begins: Callable[[Call], Begun | None] = lambda _: None

    def refuse(self, call: Call) -> str | None:
        if call.device.type != "cuda":
            return f"tensor is on the {call.device.type.upper()}"
        for t in call.present:
            if t.device != call.device:
                return f"tensors are on {call.device} and {t.device}"
        if _grad_enabled() and _wants_gradient(call.tensors):
            return GRADIENT
        try:
            found = self._card(call)
        except CodeUnavailable as error:
            return str(error)
        if self.unit and not found.has(self.unit):
            return f"no kernel of {self.unit} is made for {found.words}"
        reason = next(self.obstacles(call), None)
        if reason is None and self.runs is not None and self.ways(call) and not self._ways(call):
            return f"no kernel that computes so is made for {found.words}"
        return reason

    def _ways(self, call: Call) -> list[Any]:
        ways, runs = self.ways(call), self.runs
        if runs is None:
            return list(ways)
        found = self._card(call)
        return [way for way in ways if runs(call, found, way)]

    def tactics(self, call: Call) -> Sequence[Candidate]:
        ways = [replace(self, name=f"{self.name} {way}", tactic=way) for way in self._ways(call)]
        return ways or (self,)

    def begin(self, call: Call) -> Begun | None:
        return self.begins(call)

    def prepare(self, call: Call) -> Plan:
        return self.plan(call, self._card(call), self.tactic)

    @staticmethod
    def _card(call: Call) -> Card:
        return card(call.device.index, call.policy.isa or forced_class())


class _PlansOfThread(threading.local):
    """Plans hold arguments of launches that are written at every call, so each thread has its own."""

    def __init__(self) -> None:
        self.plans: dict[Any, Plan] = {}


@dataclass
class Op:
    """An operation. Calling it is the hot path: no loops or lookups beyond the ones below.

    schema       torch.library schema without the name; its last argument is `str policy`
    reference    the oracle, run(*tensors, *options) in plain torch: fp32, or float64 for float64 inputs. Serves the CPU
    fake         run(*tensors, *options) -> empty outputs, for torch.compile
    candidates   ours first, best first; then stock's
    kernels      unit -> every kernel the plans may launch: the archive is checked for them
    others_race  whether the others take turns where none of ours can serve, and not only stock's own choice among them
    shape_class  a coarse name of the call: a winner is chosen once per class. Where the policy decides who may compute, its tier
                 is in the name
    validate     raises ValueError for shapes that make no sense together: in every mode, before any candidate is asked.
                 The message names the operand, its shape and what was expected; the op's name is put before it
    """

    name: str
    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    candidates: Sequence[Candidate]
    shape_class: Callable[[Call], str]
    kernels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    validate: Callable[[Call], None] = lambda _: None
    others_race: bool = False

    def __post_init__(self) -> None:
        if len(self.kernels) == 1:
            [unit] = self.kernels
            self.candidates = [
                replace(one, unit=unit) if isinstance(one, CudaCandidate) else one for one in self.candidates
            ]
        self._thread = _PlansOfThread()
        self.writes = tuple(i for i, word in enumerate(self.schema.partition("->")[0].split(",")) if "!)" in word)
        self.traced = _register(self)
        OPS[self.name] = self

    def __call__(self, tensors: Tensors, options: Options, policy: KernelPolicy) -> Any:
        if _is_compiling() or type(tensors[0]) is not Tensor:
            return self.traced(*tensors, *options, policy.token)
        return self.run(tensors, options, policy)

    def run(self, tensors: Tensors, options: Options, policy: KernelPolicy) -> Any:
        """The eager path, also what a compiled graph ends up in."""
        # Contiguous tensors of one shape differ at most in the strides of dimensions of one, which nobody uses.
        key = (
            policy.token,
            options,
            _grad_enabled() and _wants_gradient(tensors),
            *[
                None
                if t is None
                else (t.shape, t.is_contiguous() or t.stride(), t.dtype, t.get_device(), t.data_ptr() & 15)
                for t in tensors
            ],
        )
        plans = self._thread.plans
        plan = plans.get(key)
        if plan is None:
            plan = self.resolve(Call(self.name, tensors, options, policy), partial(plans.__setitem__, key))
            if len(plans) >= MOST_PLANS:
                plans.clear()
            plans[key] = plan
        return plan(*tensors)

    def resolve(self, call: Call, settle: Callable[[Plan], None] = lambda _: None) -> Plan:
        """The plan for a new signature. One that chooses while it serves gives `settle` the one that serves after it."""
        try:
            self.validate(call)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
        mode = call.policy.mode(self.name)
        if mode == "off":
            return self._without_ours(call).prepare(call)
        refusals = self._refusals(call, until_ours=mode == "on")
        able = [candidate for candidate, reason in refusals if reason is None]
        reasons = {candidate.name: reason for candidate, reason in refusals if reason is not None}
        ours = [candidate for candidate in able if candidate.ours]
        if mode == "on" and not ours:
            why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise KernelRefused(f"{self.name} is forced on but cannot serve {call.describe()}: {why}")
        runners: Sequence[Candidate]
        if mode == "on":
            runners = ours[:1]
            LEDGER.chose(Choice(self.name, self.shape_class(call), ours[0].name, "forced on"))
        elif not ours and not (self.others_race and call.device.type == "cuda"):
            on_cpu = call.device.type == "cpu"
            runners = [StockCandidate(self.reference, "the reference") if on_cpu else self._without_ours(call)]
        else:
            modest = racing(call, able)
            runners = [way for candidate in modest for way in candidate.tactics(call)[:MOST_TACTICS]]
            if len(runners) == 1 < len(able):
                LEDGER.chose(
                    Choice(self.name, self.shape_class(call), runners[0].name, "no other way takes so little memory")
                )
        if len(runners) > 1:
            plan, name = autotune.tuner().plan(self, call, runners, settle)
        else:
            plan, name = runners[0].prepare(call), runners[0].name
        for refused, reason in reasons.items():
            LEDGER.refused(self.name, refused, reason, call.describe(), name)
        return plan

    def _refusals(self, call: Call, *, until_ours: bool) -> list[tuple[Candidate, str | None]]:
        """Each candidate and why it cannot serve, None if it can. until_ours: none behind the first of ours that can, because
        nobody would hear what they say."""
        found: list[tuple[Candidate, str | None]] = []
        for candidate in self.candidates:
            found.append((candidate, candidate.refuse(call)))
            if until_ours and candidate.ours and found[-1][1] is None:
                break
        return found

    def bind(self, tensors: Tensors, options: Options, policy: KernelPolicy = STANDARD) -> Plan:
        """The plan for this signature, to call as plan(*tensors) without the lookup.

        The caller promises shapes, strides, dtypes, device and 16-byte alignment of the example, and one thread.
        With FUSESTREAM_CHECK_BOUND set, as in the tests, a broken promise is a KernelError.
        """
        call = Call(self.name, tensors, options, policy)
        plan = self.resolve(call)
        return _checked(call, plan) if os.environ.get("FUSESTREAM_CHECK_BOUND") else plan

    def into(self, name: str, *, at: int = 0, stock: Callable[[Call], Plan | None] = lambda _: None) -> Op:
        """The op that writes the same to an operand `out`, of the result's shape, instead of making it.

        at     where `out` stands among the tensors; obstacles and plans find it there
        stock  see StockCandidate.plan

        The type of `out` takes the place of the last option, if that is the type of the result.
        """
        arguments = self.schema[1 : self.schema.index(")")].split(", ")
        typed = "ScalarType? out_dtype" in arguments
        kept = [argument for argument in arguments if argument != "ScalarType? out_dtype"]

        def writing(make: Callable[..., Any]) -> Callable[..., None]:
            def run(*arguments: Any) -> None:
                out = arguments[at]
                out.copy_(make(*arguments[:at], *arguments[at + 1 :], *((out.dtype,) if typed else ())))

            return run

        return replace(
            self,
            name=name,
            schema=f"({', '.join((*kept[:at], 'Tensor(a!) out', *kept[at:]))}) -> ()",
            reference=writing(self.reference),
            fake=nothing,
            candidates=[
                replace(one, run=writing(one.run), plan=stock) if isinstance(one, StockCandidate) else one
                for one in self.candidates
            ],
        )

    def forget(self) -> None:
        """Drop this thread's plans: for tests that change what candidates find."""
        self._thread.plans.clear()

    def _without_ours(self, call: Call) -> Candidate:
        """What stock runs, or the reference where stock has nothing for this input."""
        theirs = (candidate for candidate in self.candidates if not candidate.ours and candidate.refuse(call) is None)
        return next(theirs, StockCandidate(self.reference, "the reference"))


def overwriting(make: Callable[..., Any], count: int = 1) -> Callable[..., None]:
    """`make`, whose results are written over the first `count` operands that are there."""

    def run(*arguments: Any) -> None:
        made = make(*arguments)
        results = [made] if isinstance(made, Tensor) else made
        for t, result in zip([t for t in arguments[:count] if t is not None], results, strict=True):
            # What nothing was done to may come back as it is. Torch refuses to copy it onto itself
            # if it has other strides, such as those of a dimension of one.
            if result.data_ptr() != t.data_ptr():
                t.copy_(result)

    return run


def nothing(*_: Any) -> None:
    """The fake of an op that returns nothing."""


def racing(call: Call, able: Sequence[Candidate]) -> Sequence[Candidate]:
    """Those of these candidates that are worth a turn. Stock's operations one after the other are not, where they make large copies
    on the way and another way makes none: they would be slower, and the copies what a small card has no room for. Of a table of
    words they are a gigabyte and a half each."""
    modest = [c for c in able if not (isinstance(c, StockCandidate) and c.beside(call) > MOST_BESIDE)]
    return modest or able


def _checked(call: Call, plan: Plan) -> Plan:
    """A bound plan that looks at what it is given."""
    expected, aligned = call.describe(), call.aligned

    def run(*tensors: Tensor | None) -> Any:
        now = replace(call, tensors=tensors)
        if now.describe() != expected or (aligned and not now.aligned):
            raise KernelError(f"{call.op} was bound to {expected}, and called with {now.describe()}")
        return plan(*tensors)

    return run


OPS: dict[str, Op] = {}


def check_policy(policy: KernelPolicy) -> None:
    """Raise ValueError for an override that names no op: a typing error must not pass as `default`."""
    unknown = [name for name, _ in policy.ops if name not in OPS]
    if unknown:
        raise ValueError(f"kernel policy: no op is called {', '.join(unknown)}; there are {', '.join(sorted(OPS))}")


def _library() -> torch.library.Library:
    """A torch.library namespace of our own. A second copy of the pack in one process gets a numbered one."""
    name = "fusestream"
    for number in itertools.count(2):
        with contextlib.suppress(RuntimeError):  # "only a single TORCH_LIBRARY can be used to register the namespace"
            return torch.library.Library(name, "DEF")  # type: ignore[no-untyped-call]
        name = f"fusestream{number}"
    raise AssertionError("unreachable")


_LIBRARY = _library()


def _register(op: Op) -> Callable[..., Any]:
    """Make the op known to torch, so that compiled graphs keep it as one node."""
    _LIBRARY.define(op.name + op.schema)  # type: ignore[no-untyped-call]
    count = op.schema.count("Tensor", 0, op.schema.index("->"))

    def run(*arguments: Any) -> Any:
        return op.run(arguments[:count], arguments[count:-1], KernelPolicy.parse(arguments[-1]))

    def fake(*arguments: Any) -> Any:
        return op.fake(*arguments[:-1])

    _LIBRARY.impl(op.name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{_LIBRARY.ns}::{op.name}", fake, lib=_LIBRARY)
    packet: Callable[..., Any] = getattr(getattr(torch.ops, _LIBRARY.ns), op.name).default
    return packet


__all__ = ["OPS", "CudaCandidate", "Op", "StockCandidate", "check_policy"]
