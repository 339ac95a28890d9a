"""How an op chooses: modes, reasons, measuring, plans per thread, gradients, the bound path."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusestream.kernels_cuda import (
    LEDGER,
    KernelError,
    KernelPolicy,
    KernelRefused,
    registry,
)
from fusestream.kernels_cuda.call import Call, round_up
from fusestream.kernels_cuda.errors import CodeUnavailable
from fusestream.kernels_cuda.registry import CudaCandidate, Op, StockCandidate
from fusestream.kernels_cuda.tune import autotune, selection
from fusestream.kernels_cuda.tune.autotune import Tuner
from fusestream.kernels_cuda.tune.selection import Choosing
from fusestream.kernels_cuda.tune.time_budget import Purse
from fusestream.kernels_cuda.tune.winners import WinnersFile

numbers = itertools.count()  # op names, once each: torch keeps a registration for good


class Clock:
    """A device on which a candidate takes what `times` says, and everybody knows at once."""

    def __init__(self):
        self.times, self.ran, self.now = {}, [], 0.0

    def run(self, name):
        self.ran.append(name)
        self.now += self.times.get(name, 0.0)

    def lap(self, _device, _before):
        start = self.now
        end = []
        return SimpleNamespace(waited=False, host=0.0, end=lambda: end.append(self.now), seconds=lambda: end[0] - start)


clock = Clock()


@dataclasses.dataclass(frozen=True)
class Fast:
    """A candidate of ours that needs no GPU."""

    name: str = "fast"
    ours: bool = True
    reason: str | None = None
    prepared: list = dataclasses.field(default_factory=list, compare=False)

    def refuse(self, call):
        return self.reason

    def tactics(self, call):
        return (self,)

    def begin(self, call):
        return None

    def prepare(self, call):
        self.prepared.append(call)
        plus = call.options[0]

        def run(x, y):
            clock.run(self.name)
            return x + (y if y is not None else 0) + plus

        return run


def reference(x, y, plus):
    return x + (y if y is not None else 0) + plus


@pytest.fixture
def make():
    """Makes ops that are forgotten after the test."""
    made = []

    def make(*candidates, **more):
        name = f"test_op_{next(numbers)}"
        op = Op(
            name=name,
            schema="(Tensor x, Tensor? y, float plus, str policy) -> Tensor",
            reference=reference,
            fake=lambda x, y, plus: torch.empty_like(x),
            candidates=candidates,
            shape_class=lambda call: f"{round_up(call.tensors[0].numel())}",
            **more,
        )
        made.append(name)
        return op

    LEDGER.clear()
    yield make
    for name in made:
        del registry.OPS[name]


@pytest.fixture
def tuner(tmp_path, monkeypatch):
    """A tuner that reads times from a dict instead of a GPU, and need not save."""
    made = Tuner(WinnersFile(tmp_path / "w.json"), clock.lap, lambda call: "this card", Purse(1e9))
    monkeypatch.setattr(autotune, "_tuner", made)
    clock.times, clock.ran = {}, []
    made.times = clock.times
    return made


def stock(x, y, plus):
    clock.run("stock")
    return reference(x, y, plus)


def settled(op, tensors, options, policy, tuner):
    """The op's answer once it has chosen, and after how many calls it had."""
    begun = tuner.undecided
    while True:
        before = tuner.undecided
        result = op(tensors, options, policy)
        if tuner.undecided == before:
            return result, before - begun


STOCK = StockCandidate(stock)
x = torch.ones(3)


@pytest.mark.parametrize(
    ("times", "winner"),
    [
        ({"fast": 1.0, "stock": 2.0}, "fast"),
        ({"fast": 2.0, "stock": 1.0}, "stock"),
        ({"fast": 1.0, "stock": 1.015}, "stock"),  # within the noise of a race
        ({"fast": 1.0, "stock": 1.03}, "fast"),
    ],
)
def test_auto_keeps_the_fastest(make, tuner, times, winner):
    """Ours when it is clearly faster, stock's otherwise: never slower than stock. Each call is made once, and right."""
    op, policy = make(Fast(), STOCK), KernelPolicy()
    tuner.times.update(times)
    result, calls = settled(op, (x, None), (1.0,), policy, tuner)
    assert torch.equal(result, x + 1) and len(clock.ran) == calls + 1 and set(clock.ran) == set(times)
    ((chosen),) = LEDGER.choices
    assert (chosen.op, chosen.winner, chosen.why) == (op.name, winner, autotune.CHOSEN)
    assert chosen.seconds == pytest.approx(times)


def test_once_chosen_a_call_is_one_lookup(make, tuner):
    """The plan of the winner stands in the place of the one that chose."""
    fast = Fast()
    op = make(fast, STOCK)
    tuner.times.update(fast=1.0, stock=2.0)
    settled(op, (x, None), (0.0,), KernelPolicy(), tuner)
    (plan,) = op._thread.plans.values()
    assert not isinstance(plan, Choosing) and len(fast.prepared) == 1


def test_a_shape_class_chooses_once(make, tuner):
    op = make(Fast(), STOCK)
    tuner.times.update(fast=1.0, stock=2.0)
    settled(op, (torch.ones(5), None), (0.0,), KernelPolicy(), tuner)
    for n in (6, 7, 8):
        assert settled(op, (torch.ones(n), None), (0.0,), KernelPolicy(), tuner)[1] == 0
    assert settled(op, (torch.ones(9), None), (0.0,), KernelPolicy(), tuner)[1] > 0


def test_two_signatures_of_a_class_agree(make, tuner):
    """Who was chosen at one serves the other too, whatever was known there."""
    op = make(Fast(), STOCK)
    tuner.times.update(fast=1.0, stock=2.0)
    op((torch.ones(6), None), (0.0,), KernelPolicy())
    settled(op, (torch.ones(5), None), (0.0,), KernelPolicy(), tuner)
    before = tuner.undecided
    op((torch.ones(6), None), (0.0,), KernelPolicy())
    assert tuner.undecided == before


def test_a_new_candidate_is_tried(make, tuner):
    """A remembered winner counts only if every candidate of today was in the race."""
    tuner.times.update(fast=1.0, stock=2.0, faster=0.5)
    op = make(Fast(), STOCK)
    settled(op, (x, None), (0.0,), KernelPolicy(), tuner)
    op.candidates = (Fast("faster"), Fast(), STOCK)
    op.forget()
    settled(op, (x, None), (0.0,), KernelPolicy(), tuner)
    assert LEDGER.choices[-1].winner == "faster"


class Faulty(Fast):
    """Fails while `fault` says so: when it is prepared, or when it runs."""

    fault = None
    at = "run"

    def prepare(self, call):
        if self.fault is not None and self.at == "prepare":
            raise self.fault
        plan = super().prepare(call)

        def run(*tensors):
            if self.fault is not None:
                raise self.fault
            return plan(*tensors)

        return run


FAULTS = [
    torch.OutOfMemoryError("CUDA out of memory.\nSee the manual"),
    KernelError("the moon is full"),
    RuntimeError("cuBLAS"),
]


@pytest.mark.parametrize("at", ["prepare", "run"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("after", range(7))
def test_a_candidate_that_fails_costs_no_result(make, tuner, tmp_path, monkeypatch, at, fault, after):
    """At whatever call: the next one serves it. It is said once, and what failed today is not remembered."""
    monkeypatch.setattr(Faulty, "at", at)
    fast = Faulty()
    op = make(fast, STOCK)
    tuner.times.update(fast=1.0, stock=1.1)
    for call in range(60):
        if call == after:
            monkeypatch.setattr(Faulty, "fault", fault)
            if at == "prepare":
                op.forget()
        assert torch.equal(op((x, None), (1.0,), KernelPolicy()), x + 1)
    assert LEDGER.choices[-1].winner == "stock" and not (tmp_path / "w.json").exists()
    assert [m.split(": ", 1)[1] for m in LEDGER.messages] == [
        f"fast failed while kernels were being chosen: {str(fault).splitlines()[0]}"
    ]


def test_where_all_fail_the_caller_is_told_and_may_try_again(make, tuner, monkeypatch):
    """A step that runs out of memory frees some and runs again."""
    op = make(Faulty("a"), Faulty("b"))
    tuner.times.update(a=1.0, b=2.0)
    monkeypatch.setattr(Faulty, "fault", torch.OutOfMemoryError("full"))
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            op((x, None), (0.0,), KernelPolicy())
    monkeypatch.setattr(Faulty, "fault", None)
    assert torch.equal(settled(op, (x, None), (1.0,), KernelPolicy(), tuner)[0], x + 1)
    assert LEDGER.choices[-1].winner == "a"


def test_one_that_was_too_large_is_not_tried_at_what_is_no_smaller(make, tuner, monkeypatch):
    op = make(Faulty(), STOCK)
    tuner.times.update(fast=1.0, stock=2.0)
    monkeypatch.setattr(Faulty, "fault", torch.OutOfMemoryError("full"))
    settled(op, (torch.ones(100), None), (0.0,), KernelPolicy(), tuner)
    monkeypatch.setattr(Faulty, "fault", None)
    assert settled(op, (torch.ones(300), None), (0.0,), KernelPolicy(), tuner)[1] == 0
    assert LEDGER.choices[-1].winner == "stock"
    settled(op, (torch.ones(10), None), (0.0,), KernelPolicy(), tuner)
    assert LEDGER.choices[-1].winner == "fast"


@pytest.mark.parametrize("stop", range(10))
def test_an_interruption_is_nobodys_fault(make, tuner, monkeypatch, stop):
    class Stopped(BaseException):
        pass

    op = make(Faulty(), STOCK)
    tuner.times.update(fast=1.0, stock=2.0)
    for call in range(40):
        monkeypatch.setattr(Faulty, "fault", Stopped() if call == stop else None)
        with contextlib.suppress(Stopped):
            op((x, None), (0.0,), KernelPolicy())
    assert LEDGER.choices[-1].winner == "fast" and not LEDGER.messages
    assert settled(op, (x, None), (0.0,), KernelPolicy(), tuner)[1] == 0


def test_no_call_keeps_its_tensors(make, tuner):
    """A plan is kept for as long as the process runs."""
    op = make(Fast(), STOCK)
    tuner.times.update(fast=1.0, stock=2.0)
    kept = []
    for _ in range(4):
        t = torch.ones(3)
        kept.append(weakref.ref(t))
        op((t, None), (0.0,), KernelPolicy())
        op.candidates[0].prepared.clear()
    del t
    assert isinstance(next(iter(op._thread.plans.values())), Choosing)
    assert not [ref for ref in kept if ref() is not None]


def test_every_tactic_is_in_the_race(make, tuner, monkeypatch):
    """Up to a limit; `on` takes the first without trying others."""
    monkeypatch.setattr(CudaCandidate, "refuse", lambda self, call: None)
    monkeypatch.setattr(CudaCandidate, "_card", staticmethod(lambda call: None))
    used = []

    def plan(call, card, tactic):
        return lambda x, y: used.append(tactic) or clock.run(tactic) or x

    op = make(CudaCandidate("cuda", lambda call: iter(()), plan, lambda call: ["a", "b", "c", "d", "e"]), STOCK)
    tuner.times.update(a=3.0, b=1.0, c=2.0, d=4.0, stock=5.0)
    settled(op, (x, None), (0.0,), KernelPolicy(), tuner)
    assert set(used) == set("abcd") and used[-1] == "b"
    op((x, None), (0.0,), KernelPolicy.of("on"))
    assert used[-1] is None
    assert LEDGER.choices[0].winner == "cuda"  # forced on, over the same class
    assert registry.MOST_TACTICS == 4


@pytest.mark.parametrize(("beside", "races"), [(registry.MOST_BESIDE, True), (registry.MOST_BESIDE + 1, False)])
def test_stocks_way_does_not_race_where_it_takes_much_beside(make, tuner, beside, races):
    """It serves all the same where it is alone, or where the policy wants it."""
    sprawls = dataclasses.replace(STOCK, beside=lambda call: beside if call.tensors[0].numel() == 3 else 0)
    op = make(Fast(), sprawls)
    tuner.times.update(fast=2.0, stock=1.0)
    settled(op, (x, None), (0.0,), KernelPolicy(), tuner)
    assert LEDGER.choices[-1].winner == ("stock" if races else "fast") and ("stock" in clock.ran) is races
    clock.ran.clear()
    op((x, None), (0.0,), KernelPolicy.of("off"))
    make(sprawls)((x, None), (0.0,), KernelPolicy())
    assert clock.ran[0] == "stock"


def test_on_forces_ours(make, tuner):
    fast = Fast()
    op = make(fast, STOCK)
    op((x, None), (0.0,), KernelPolicy.of("on"))
    assert len(fast.prepared) == 1 and not tuner.undecided
    assert LEDGER.choices[-1].why == "forced on"


def test_on_takes_the_first_of_ours_that_can(make, tuner):
    unable, best, second = Fast("unable", reason="x is too long"), Fast("best"), Fast("second")
    make(unable, best, second, STOCK)((x, None), (0.0,), KernelPolicy.of("on"))
    assert (len(unable.prepared), len(best.prepared), len(second.prepared)) == (0, 1, 0)


def test_on_asks_nobody_behind_the_one_that_serves(make, tuner):
    """An answer may cost time and memory, and nobody would hear it."""

    class Unasked(Fast):
        def refuse(self, call):
            raise torch.OutOfMemoryError("a mask of every query and key")

    op = make(Fast("unable", reason="x is too long"), Fast("best"), Unasked("second"))
    assert torch.equal(op((x, None), (1.0,), KernelPolicy.of("on")), x + 1)
    assert [(r.candidate, r.served_by) for r in LEDGER.refusals] == [("unable", "best")]


def test_on_refuses_with_every_reason(make, tuner):
    op = make(Fast("a", reason="x is too long"), Fast("b", reason="the moon is full"), STOCK)
    with pytest.raises(KernelRefused) as refused:
        op((x, None), (2.0,), KernelPolicy.of("on"))
    assert str(refused.value) == (
        f"{op.name} is forced on but cannot serve (float32[3], -; 2.0) on cpu: a: x is too long; b: the moon is full"
    )


def test_off_forces_stock(make, tuner):
    fast = Fast()
    op = make(fast, STOCK)
    assert torch.equal(op((x, x), (0.0,), KernelPolicy.of("off")), x + x)
    assert not fast.prepared and not LEDGER.refusals


def test_every_refusal_is_recorded(make, tuner):
    """With the reason, the first input that met it, and who served instead."""
    op = make(Fast(reason="x is too long"), STOCK)
    for n in (3, 4):
        op((torch.ones(n), None), (0.0,), KernelPolicy())
        op((torch.ones(n), None), (0.0,), KernelPolicy())
    assert [(r.reason, r.example, r.served_by, r.times) for r in LEDGER.refusals] == [
        ("x is too long", "(float32[3], -; 0.0) on cpu", "the reference", 2)
    ]


def test_one_of_several_refuses(make, tuner):
    op = make(Fast("a", reason="x is too long"), Fast("b"), STOCK)
    tuner.times.update(b=1.0, stock=2.0)
    settled(op, (x, None), (0.0,), KernelPolicy(), tuner)
    assert [(r.candidate, r.served_by) for r in LEDGER.refusals] == [("a", "what is chosen")]
    LEDGER.clear()
    op.forget()
    op((x, None), (0.0,), KernelPolicy())
    assert [(r.candidate, r.served_by) for r in LEDGER.refusals] == [("a", "b")]


def test_two_models_with_opposite_toggles(make, tuner):
    """Policies travel with the call, so two models in one graph cannot touch each other."""
    fast = Fast()
    op = make(fast, STOCK)
    on, off = KernelPolicy.of("on"), KernelPolicy.of("off")
    for _ in range(3):
        op((x, None), (0.0,), on)
        op((x, None), (0.0,), off)
    assert len(fast.prepared) == 1


@given(
    st.lists(
        st.tuples(
            st.integers(1, 4),
            st.booleans(),
            st.sampled_from([torch.float16, torch.float32]),
            st.booleans(),
            st.sampled_from([0.0, 1.0]),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_a_plan_never_meets_another_signature(calls):
    """Whatever order inputs come in, each finds a plan made for its shape, strides, dtype, alignment and options."""

    class Strict(Fast):
        def prepare(self, call):
            def plan(x, y):
                assert facts(x, y) == made_for
                return reference(x, y, *call.options)

            def facts(x, y):
                strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
                return x.shape, strides, x.dtype, x.data_ptr() % 16, y is None

            made_for = facts(*call.tensors)
            return plan

    op = Op(
        name=f"test_op_strict_{next(numbers)}",
        schema="(Tensor x, Tensor? y, float plus, str policy) -> Tensor",
        reference=reference,
        fake=reference,
        candidates=(Strict(),),
        shape_class=lambda call: "",
    )
    try:
        for n, transposed, dtype, shifted, plus in calls:
            room = torch.arange(2 * n * n + 1).to(dtype)
            t = (room[1:] if shifted else room[:-1]).view(n, 2 * n)
            t = t.t() if transposed else t
            assert torch.equal(op((t, None), (plus,), KernelPolicy()), t + plus)
    finally:
        del registry.OPS[op.name]


def test_each_thread_has_its_own_plans(make, tuner):
    fast = Fast()
    op = make(fast, STOCK)
    policy = KernelPolicy.of("on")
    threads = [threading.Thread(target=lambda: op((x, None), (0.0,), policy)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    op((x, None), (0.0,), policy)
    assert len(fast.prepared) == 4


def test_plans_are_bounded(make, tuner, monkeypatch):
    monkeypatch.setattr(registry, "MOST_PLANS", 8)
    op = make(Fast(), STOCK)
    for n in range(1, 40):
        op((torch.ones(n), None), (0.0,), KernelPolicy.of("on"))
        assert len(op._thread.plans) <= 8


def test_a_gradient_is_not_dropped_in_silence(make, tuner):
    """The kernels are for inference: `auto` falls back to torch, which differentiates, and says so."""
    cuda = CudaCandidate("cuda", lambda call: iter(()), lambda call, card, tactic: None)
    wants = torch.ones(3, requires_grad=True)
    on_gpu = dataclasses.replace(Call("op", (wants, None), (0.0,)))
    assert cuda.refuse(on_gpu) == "tensor is on the CPU"
    op = make(cuda, STOCK)
    assert op((wants, None), (0.0,), KernelPolicy()).requires_grad
    with torch.no_grad():
        assert not op((wants, None), (0.0,), KernelPolicy()).requires_grad


def test_bind_skips_the_lookup(make, tuner):
    fast = Fast()
    op = make(fast, STOCK)
    bound = op.bind((x, x), (1.0,), KernelPolicy.of("on"))
    assert torch.equal(bound(x, 2 * x), 3 * x + 1)
    assert len(fast.prepared) == 1 and not op._thread.plans


def test_a_bound_plan_can_check_its_promise(make, tuner, monkeypatch):
    monkeypatch.setenv("FUSESTREAM_CHECK_BOUND", "1")
    bound = make(Fast(), STOCK).bind((x, x), (1.0,), KernelPolicy.of("on"))
    assert torch.equal(bound(2 * x, x), 3 * x + 1)
    for wrong in (torch.ones(4), torch.ones(6)[::2], torch.ones(3).double()):
        with pytest.raises(
            KernelError, match=r"was bound to \(float32\[3\], float32\[3\]; 1.0\) on cpu, and called with"
        ):
            bound(wrong, x)


def test_meta_and_fake_tensors_take_the_registered_road(make, tuner):
    op = make(Fast(), STOCK)
    with torch._subclasses.FakeTensorMode():
        assert op((torch.ones(3), None), (0.0,), KernelPolicy()).shape == (3,)


class Elsewhere:
    """As much of a call as a candidate of ours asks, on a GPU that is not there."""

    def __init__(self, *tensors, on="cuda:0"):
        self.device, self.tensors, self.present = torch.device(on), tensors, [t for t in tensors if t is not None]
        self.policy = KernelPolicy()


def test_a_kernel_is_refused_for_the_first_reason_there_is(monkeypatch):
    """Where the tensors are, whether a gradient is wanted, whether there is code for the card, then the op's own reasons."""
    gpu = torch.device("cuda:0")
    on_gpu, other, plain = (
        SimpleNamespace(device=torch.device(d), requires_grad=False) for d in ("cuda:0", "cuda:1", "cpu")
    )
    wants = SimpleNamespace(device=gpu, requires_grad=True)
    asked = []

    def obstacles(call):
        asked.append(call)
        yield "x is too long"
        yield "and too wide"

    def no_code(call):
        raise CodeUnavailable("there is no code for this card")

    candidate = CudaCandidate("cuda", obstacles, lambda call, card, tactic: None)
    assert candidate.refuse(Elsewhere(plain, on="cpu")) == "tensor is on the CPU"
    assert candidate.refuse(Elsewhere(on_gpu, None, other)) == "tensors are on cuda:0 and cuda:1"
    assert candidate.refuse(Elsewhere(on_gpu, None, wants)) == registry.GRADIENT
    monkeypatch.setattr(CudaCandidate, "_card", staticmethod(no_code))
    with torch.no_grad():
        assert candidate.refuse(Elsewhere(on_gpu, wants)) == "there is no code for this card"
    assert not asked
    monkeypatch.setattr(CudaCandidate, "_card", staticmethod(lambda call: None))
    assert candidate.refuse(Elsewhere(on_gpu, None)) == "x is too long" and len(asked) == 1
    assert dataclasses.replace(candidate, obstacles=lambda call: iter(())).refuse(Elsewhere(on_gpu, None)) is None


def test_the_code_is_of_the_class_that_the_policy_or_the_environment_names(monkeypatch):
    """Else of the card's own."""
    asked = []
    monkeypatch.setattr(registry, "card", lambda index, isa: asked.append((index, isa)))
    monkeypatch.setattr(registry, "forced_class", lambda: "sm_80")
    call = Elsewhere(on="cuda:1")
    CudaCandidate._card(call)
    call.policy = KernelPolicy(isa="sm_75")
    CudaCandidate._card(call)
    assert asked == [(1, "sm_80"), (1, "sm_75")]


def test_a_kernel_that_cuts_its_work_in_one_way_runs_as_it_is(monkeypatch):
    monkeypatch.setattr(CudaCandidate, "_card", staticmethod(lambda call: "the card"))
    one = CudaCandidate("cuda", lambda call: iter(()), lambda call, card, tactic: (card, tactic))
    assert list(one.tactics(None)) == [one] and one.prepare(None) == ("the card", None)
    several = dataclasses.replace(one, ways=lambda call: ["wide", "narrow"])
    assert [(way.name, way.prepare(None)) for way in several.tactics(None)] == [
        ("cuda wide", ("the card", "wide")),
        ("cuda narrow", ("the card", "narrow")),
    ]


class CardWithout:
    """A card whose class has no code of some units, nor of some ways."""

    words = "compute capability 6.1"

    def has(self, unit):
        return unit != "halves"


def test_what_a_cards_class_has_no_code_of_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(CudaCandidate, "_card", staticmethod(lambda call: CardWithout()))
    call = Elsewhere(on="cuda:0")
    one = CudaCandidate("cuda", lambda call: iter(()), lambda *_: None, unit="bytes")
    assert one.refuse(call) is None
    assert dataclasses.replace(one, unit="halves").refuse(call) == (
        "no kernel of halves is made for compute capability 6.1"
    )
    some = dataclasses.replace(one, ways=lambda call: ["wide", "narrow"], runs=lambda call, card, way: way == "narrow")
    assert some.refuse(call) is None and [way.tactic for way in some.tactics(call)] == ["narrow"]
    none = dataclasses.replace(some, runs=lambda *_: False)
    assert none.refuse(call) == "no kernel that computes so is made for compute capability 6.1"


def test_who_runs_alone_is_not_timed(make, tuner):
    op = make(Fast(), dataclasses.replace(STOCK, name="stock"))
    op.candidates = (Fast(),)
    assert torch.equal(op((x, None), (1.0,), KernelPolicy()), x + 1)
    assert not tuner.undecided and not LEDGER.refusals


def test_stock_may_have_a_shorter_way_of_its_own(make):
    """And where stock itself cannot, the reference computes."""
    short = dataclasses.replace(STOCK, plan=lambda call: (lambda x, y: "short") if call.options[0] else None)
    op, off = make(short), KernelPolicy.of("off")
    assert op((x, None), (1.0,), off) == "short"
    assert torch.equal(op((x, x), (0.0,), off), 2 * x)

    class Never(Fast):
        def prepare(self, call):
            raise AssertionError("it has refused")

    refuses = Never("stock", ours=False, reason="stock knows no such type")
    assert torch.equal(make(refuses)((x, None), (3.0,), off), x + 3)


def test_while_a_graph_is_captured_the_best_so_far_serves_and_nothing_is_timed(make, tuner, monkeypatch):
    """The choice goes on after it."""
    op, policy = make(Fast(), STOCK), KernelPolicy()
    tuner.times.update(fast=2.0, stock=1.0)
    monkeypatch.setattr(tuner, "_lap", lambda *_: pytest.fail("timed"))
    monkeypatch.setattr(selection, "capturing", lambda: True)
    for _ in range(3):
        op((x, None), (0.0,), policy)
    assert clock.ran == ["fast"] * 3 and tuner.undecided == 3 and LEDGER.choices[-1].why == autotune.CHOOSING
    op.forget()
    monkeypatch.setattr(tuner, "_lap", clock.lap)
    monkeypatch.setattr(selection, "capturing", lambda: False)
    for _ in range(5):
        op((x, None), (0.0,), policy)
    monkeypatch.setattr(selection, "capturing", lambda: True)
    before = tuner.undecided
    op((x, None), (0.0,), policy)
    assert clock.ran[-1] == "stock" and tuner.undecided == before
    monkeypatch.setattr(selection, "capturing", lambda: False)
    settled(op, (x, None), (0.0,), policy, tuner)
    assert LEDGER.choices[-1].winner == "stock"


def test_a_plan_knows_how_far_from_alignment_its_bytes_lie(make):
    fast = Fast()
    op, room = make(fast), torch.zeros(64, dtype=torch.uint8)
    start = -room.data_ptr() % 16
    for shift in range(17):
        op((room[start + shift :][:8], None), (0,), KernelPolicy.of("on"))
    assert len(fast.prepared) == 16, "one for each; whole steps of sixteen are the same"


@pytest.mark.parametrize(("first", "second", "fits"), [(0, 1, False), (1, 0, True), (1, 2, True), (0, 4, True)])
def test_a_bound_plan_for_aligned_operands_is_for_those_alone(make, tuner, monkeypatch, first, second, fits):
    monkeypatch.setenv("FUSESTREAM_CHECK_BOUND", "1")
    room = torch.zeros(64)
    room = room[(-room.data_ptr() % 16) // 4 :]
    bound = make(Fast()).bind((room[first : first + 8], None), (1.0,), KernelPolicy.of("on"))
    with contextlib.nullcontext() if fits else pytest.raises(KernelError, match="was bound to"):
        assert torch.equal(bound(room[second : second + 8], None), torch.ones(8))


def test_a_gradient_wanted_of_any_operand_makes_another_plan(make, tuner):
    fast, wants = Fast(), torch.ones(3, requires_grad=True)
    op, on = make(fast), KernelPolicy.of("on")
    op((x, x), (0.0,), on)
    op((x, wants), (0.0,), on)
    with torch.no_grad():
        op((x, wants), (0.0,), on)
    assert len(fast.prepared) == 2


def test_shapes_that_make_no_sense_are_told_before_anybody_is_asked(make, tuner):
    def validate(call):
        raise ValueError("x has 3 rows and y 4")

    op = make(Fast(), STOCK, validate=validate)
    for mode in ("auto", "on", "off"):
        with pytest.raises(ValueError, match=rf"^{op.name}: x has 3 rows and y 4$"):
            op((x, None), (0.0,), KernelPolicy.of(mode))


def test_an_override_that_names_no_op_is_an_error(make):
    op = make(STOCK)
    registry.check_policy(KernelPolicy(ops=((op.name, "on"),)))
    with pytest.raises(ValueError, match=rf"no op is called lineer; there are .*{op.name}"):
        registry.check_policy(KernelPolicy(ops=((op.name, "on"), ("lineer", "on"))))


def test_a_second_copy_of_the_pack_has_a_namespace_of_its_own():
    """Torch gives each only once in a process."""
    second = registry._library()
    third = registry._library()
    try:
        first = int(registry._LIBRARY.ns.removeprefix("fusestream") or 1)
        assert (second.ns, third.ns) == (f"fusestream{first + 1}", f"fusestream{first + 2}")
    finally:
        second._destroy()
        third._destroy()


def test_torch_compiles_an_op_as_one_node(make, tuner):
    """By its name: three operands and an option go in, and the policy as text."""
    op = make(Fast(), STOCK)
    tuner.times.update(fast=1.0, stock=2.0)
    assert torch.equal(op.traced(x, None, 2.0, KernelPolicy().token), x + 2)
    assert torch.equal(op.traced(x, x, 2.0, KernelPolicy.of("off").token), 2 * x + 2)
    with torch._subclasses.FakeTensorMode():
        assert op.traced(torch.ones(5), None, 2.0, KernelPolicy().token).shape == (5,)
