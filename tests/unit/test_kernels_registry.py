"""How an op chooses: modes, reasons, measuring, plans per thread, gradients, the bound path."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusestream.kernels_cuda import LEDGER, OPS, KernelError, KernelPolicy, KernelRefused, autotune, registry
from fusestream.kernels_cuda.autotune import Tuner
from fusestream.kernels_cuda.call import Call, round_up
from fusestream.kernels_cuda.ops.sampling import first_tokens
from fusestream.kernels_cuda.registry import CudaCandidate, Op, StockCandidate
from fusestream.kernels_cuda.winners import WinnersFile

numbers = itertools.count()  # op names, once each: torch keeps a registration for good


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

    def prepare(self, call):
        self.prepared.append(call)
        return lambda x, y: x + (y if y is not None else 0) + call.options[0]


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
    """A tuner that reads times from a dict instead of a GPU."""
    times, asked = {}, []

    def measure(op, call, candidates):
        asked.append(call)
        return {c.name: times[c.name] for c in candidates}

    made = Tuner(WinnersFile(tmp_path / "w.json"), measure, lambda call: "this card")
    monkeypatch.setattr(autotune, "_tuner", made)
    made.times, made.asked = times, asked
    return made


STOCK = StockCandidate(reference)
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
    """Ours when it is clearly faster, stock's otherwise: never slower than stock."""
    op, policy = make(Fast(), STOCK), KernelPolicy()
    tuner.times.update(times)
    for _ in range(3):
        assert torch.equal(op((x, None), (1.0,), policy), x + 1)
    assert len(tuner.asked) == 1
    assert [(c.op, c.winner, c.why, c.seconds) for c in LEDGER.choices] == [(op.name, winner, "measured", times)]


def test_a_shape_class_is_measured_once(make, tuner):
    op = make(Fast(), STOCK)
    tuner.times.update(fast=1.0, stock=2.0)
    for n in (5, 6, 7, 8):
        op((torch.ones(n), None), (0.0,), KernelPolicy())
    assert len(tuner.asked) == 1
    op((torch.ones(9), None), (0.0,), KernelPolicy())
    assert len(tuner.asked) == 2


def test_a_new_candidate_is_measured(make, tuner):
    """A remembered winner counts only if every candidate of today was in the race."""
    tuner.times.update(fast=1.0, stock=2.0, faster=0.5)
    op = make(Fast(), STOCK)
    op((x, None), (0.0,), KernelPolicy())
    op.candidates = (Fast("faster"), Fast(), STOCK)
    op.forget()
    op((x, None), (0.0,), KernelPolicy())
    assert LEDGER.choices[-1].winner == "faster"


def test_out_of_memory_while_measuring_is_not_remembered(make, tuner, tmp_path):
    op = make(Fast(), STOCK)
    tuner.times.update(fast=1.0, stock=math.inf)
    op((x, None), (0.0,), KernelPolicy())
    assert LEDGER.choices[-1].winner == "fast"
    assert not (tmp_path / "w.json").exists()


def test_every_tactic_is_in_the_race(make, tuner, monkeypatch):
    """Up to a limit; `on` takes the first without measuring."""
    monkeypatch.setattr(CudaCandidate, "refuse", lambda self, call: None)
    monkeypatch.setattr(CudaCandidate, "_card", staticmethod(lambda call: None))
    used = []

    def plan(call, card, tactic):
        return lambda x, y: used.append(tactic) or x

    op = make(CudaCandidate("cuda", lambda call: iter(()), plan, lambda call: ["a", "b", "c", "d", "e"]), STOCK)
    tuner.times.update({"cuda a": 3.0, "cuda b": 1.0, "cuda c": 2.0, "cuda d": 4.0, "stock": 5.0})
    op((x, None), (0.0,), KernelPolicy())
    op((x, None), (0.0,), KernelPolicy.of("on"))
    assert used == ["b", None]
    assert LEDGER.choices[0].winner == "cuda"  # forced on, over the same class
    assert registry.MOST_TACTICS == 4


def test_on_forces_ours(make, tuner):
    fast = Fast()
    op = make(fast, STOCK)
    op((x, None), (0.0,), KernelPolicy.of("on"))
    assert len(fast.prepared) == 1 and not tuner.asked
    assert LEDGER.choices[-1].why == "forced on"


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


def test_a_very_long_call_is_measured_on_its_first_tokens():
    """Views of the operands: whole batches where several fit, else the first tokens of the first."""
    x, weight = torch.zeros(3, 9000, 8192, device="meta"), torch.zeros(8192, device="meta")
    gate, some, far = (torch.zeros(*shape, device="meta") for shape in ((3, 1, 8192), (1, 1, 8192), (3, 5, 8192)))
    assert first_tokens((x, weight, gate), (0,), (2,))[0].shape == (1, 4096, 8192)
    assert first_tokens((x, weight, gate), (0,), (2,), least=8192)[0].shape == (1, 8192, 8192)
    assert [t.shape[0] for t in first_tokens((x, gate, some), (0,), (1, 2))] == [1, 1, 1]
    narrow = torch.zeros(3, 9000, 1024, device="meta")
    assert first_tokens((narrow, None), (0, 1))[0].shape == (3, 9000, 1024), "27,000 tokens are fewer than 32,768"
    assert first_tokens((narrow,), (0,), width=2048)[0].shape == (1, 9000, 1024)
    assert first_tokens((x, far), (0,), (1,))[0] is x, "modulation that changes on the way needs all tokens"
    assert first_tokens((x[0],), (0,))[0].shape == x[0].shape


def test_measuring_writes_to_copies_and_keeps_operands_that_are_one(monkeypatch):
    call = Call(
        "linear_", (out := torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(3, 3), None, out, None), (), KernelPolicy()
    )
    apart = autotune._apart(OPS["linear_"], call)
    assert apart[0] is apart[4] and apart[0] is not out and apart[1] is call.tensors[1] and apart[3] is None
