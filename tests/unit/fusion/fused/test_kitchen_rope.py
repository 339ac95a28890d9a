"""RoPE by comfy-kitchen's functions: ours in a call of a model of ours, where kitchen's own would be eager, and no one else's."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fusestream.fusion.base.hooks import KITCHEN_BACKEND
from fusestream.fusion.fused import kitchen_rope
from fusestream.fusion.fused.kitchen_calls import FUNCTIONS, STREAMS, in_place
from fusestream.fusion.fused.kitchen_rope import turning
from fusestream.kernels_cuda import LEDGER, KernelPolicy

kitchen = pytest.importorskip("comfy_kitchen")
constraints = pytest.importorskip("comfy_kitchen.constraints")
eager = pytest.importorskip("comfy_kitchen.backends.eager.rope")

AUTO, OFF = KernelPolicy.of("auto"), KernelPolicy.of("off")
HALF, BF16, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
B, S, H, D = 2, 9, 3, 32
RUNS_ON = kitchen_rope.runs_on


class Calls:
    """How often our op was asked; `interrupt` is run before it computes."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.interrupt: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self.threads)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Our op serves tensors on the CPU, too, by its reference."""
    made, op = Calls(), kitchen_rope.rms_rope_

    def counted(*given: Any, **named: Any) -> None:
        made.threads.append(threading.get_ident())
        made.interrupt()
        op(*given, **named)

    monkeypatch.setattr(kitchen_rope, "rms_rope_", counted)
    monkeypatch.setattr(kitchen_rope, "runs_on", lambda *_: True)
    with torch.inference_mode():
        yield made
    assert getattr(kitchen.registry._thread_local, "backend_override", None) is None


class Shapes(NamedTuple):
    """Of q, of k and of the table's leading dimensions. packed: q and k are views of one buffer."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    table: tuple[int, ...]
    packed: bool = False


SHAPES = {
    "heads within tokens": Shapes((B, S, H, D), (B, S, H, D), (1, S, 1)),
    "tokens within heads": Shapes((B, H, S, D), (B, H, S, D), (1, 1, S)),
    "a table for each": Shapes((B, S, H, D), (B, S, H, D), (B, S, 1)),
    "one rotation for all": Shapes((B, H, S, D), (B, H, S, D), (1, 1, 1)),
    "each head its own": Shapes((B, S, H, D), (B, S, H, D), (1, S, H)),
    "fewer heads of k": Shapes((B, 2 * H, S, D), (B, H, S, D), (1, 1, S)),
    "one of both": Shapes((1, 1, S, D), (1, 1, S, D), (1, 1, S)),
    "of one projection": Shapes((B, S, H, D), (B, S, H, D), (1, S, 1), packed=True),
    "of one projection, each head its own": Shapes((B, S, H, D), (B, S, H, D), (1, S, H), packed=True),
    "as many heads as tokens": Shapes((B, S, S, D), (B, S, S, D), (1, S, 1)),
    "without batches": Shapes((H, S, D), (H, S, D), (S,)),
}


def turns(*leading: int, part: int = D, dtype: torch.dtype = SINGLE, seed: int = 1) -> Tensor:
    angles = 3 * torch.rand(*leading, part // 2, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
    c, s = angles.cos(), angles.sin()
    return torch.stack([c, -s, s, c], -1).unflatten(-1, (2, 2)).to(dtype)


def operands(name: str, shapes: Shapes, dtype: torch.dtype, table: Tensor) -> dict[str, Any]:
    """Arguments of a function, by name."""
    made = torch.Generator().manual_seed(0)
    if shapes.packed:
        b, s, h, d = shapes.q
        q, k, _ = torch.randn(b, s, 3, h, d, generator=made).to(dtype).unbind(2)
    else:
        q, k = (torch.randn(shape, generator=made).to(dtype) for shape in (shapes.q, shapes.k))
    weights = [(1 + torch.randn(D, generator=made) / 4).to(dtype) for _ in range(2)]
    known = {
        "xq": q, "xk": k, "q": q, "k": k, "x": q, "freqs_cis": table, "q_scale": weights[0], "k_scale": weights[1],
        "scale": weights[0], "epsilon": 1e-5, "rot_dim": 0,
    }  # fmt: skip
    return {one: known[one] for one in FUNCTIONS[name]}


def copied(given: dict[str, Any]) -> dict[str, Any]:
    """The same values in other memory of the same strides."""

    def copy(x: Tensor) -> Tensor:
        fresh = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        return fresh.copy_(x)

    return {name: copy(one) if isinstance(one, Tensor) else one for name, one in given.items()}


def called(name: str, given: dict[str, Any]) -> list[Tensor]:
    found = getattr(kitchen, name)(**given)
    return [found] if isinstance(found, Tensor) else [*found]


def exact(name: str, given: dict[str, Any]) -> list[Tensor]:
    wide = {one: value.double() if isinstance(value, Tensor) else value for one, value in given.items()}
    found = getattr(eager, name.rstrip("_"))(**wide)
    return [found] if isinstance(found, Tensor) else [*found]


def no_further(ours: list[Tensor], theirs: list[Tensor], wanted: list[Tensor]) -> bool:
    """Whether our error is no larger than theirs."""

    def error(found: list[Tensor]) -> float:
        return sum(float((one.double() - best).square().sum()) for one, best in zip(found, wanted, strict=True)) ** 0.5

    return error(ours) <= 1.02 * error(theirs)


def is_ours(name: str, given: dict[str, Any], calls: Calls, times: int = 1) -> None:
    """Ours serves the call, writes what it should and nothing else, and is as near as kitchen's."""
    wanted, theirs, before = exact(name, given), called(name, copied(given)), copied(given)
    assert not calls
    with turning(AUTO):
        ours = called(name, given)
    assert len(calls) == times
    assert no_further(ours, theirs, wanted)
    streams = [given[one] for one in STREAMS if one in given]
    for found, their, x in zip(ours, theirs, streams, strict=True):
        assert found.shape == their.shape and found.dtype is their.dtype
        assert (found is x) == in_place(name)
    for one, value in before.items():
        if isinstance(value, Tensor) and not (in_place(name) and one in STREAMS):
            assert torch.equal(given[one], value)


def outcome(name: str, given: dict[str, Any], policy: KernelPolicy | None) -> Any:
    """What a function makes of copies, results and what was written over; or the kind of its error."""
    given = copied(given)
    with turning(policy):
        try:
            found = called(name, given)
        except Exception as error:
            return type(error)
    return [*found, *(given[one] for one in STREAMS if one in given)]


def is_kitchens(name: str, given: dict[str, Any], calls: Calls, policy: KernelPolicy | None = AUTO) -> None:
    """Kitchen's own choice serves the call to the bit, or has its own error for it."""
    theirs, ours = outcome(name, given, None), outcome(name, given, policy)
    assert not calls
    if isinstance(theirs, list):
        assert all(torch.equal(one.nan_to_num(7), other.nan_to_num(7)) for one, other in zip(ours, theirs, strict=True))
    else:
        assert ours is theirs


# ------------------------------------------------------------------------------------------------------------ functions


def test_kitchen_has_no_function_that_is_not_known() -> None:
    with turning(AUTO):
        backends = kitchen.list_backends()
    theirs = {name for name in backends["eager"]["capabilities"] if "rope" in name}
    assert theirs == FUNCTIONS.keys() == set(backends[KITCHEN_BACKEND]["capabilities"])
    assert theirs == {name for name in kitchen.__all__ if "rope" in name}
    for name, arguments in FUNCTIONS.items():
        assert tuple(inspect.signature(getattr(kitchen, name)).parameters) == arguments


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_turns_as_near_as_kitchen_does(name: str, shapes: Shapes, dtype: torch.dtype, calls: Calls) -> None:
    given = operands(name, shapes, dtype, turns(*shapes.table))
    if len(shapes.q) == 3:
        is_served = name.startswith("apply_rope")  # kitchen norms none of these
    else:
        # Heads that lie between other things' are no tokens of one head.
        is_served = not (shapes.packed and shapes.table[2] == H and in_place(name))
    (is_ours if is_served else is_kitchens)(name, given, calls)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tables_of_the_models_type(name: str, calls: Calls) -> None:
    shapes = SHAPES["heads within tokens"]
    is_ours(name, operands(name, shapes, BF16, turns(*shapes.table, dtype=BF16)), calls)


@pytest.mark.parametrize("end", ["", "_"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_part_of_each_head_turns(end: str, packed: bool, calls: Calls) -> None:
    """The norm is over all of it. That is two passes."""
    shapes = SHAPES["heads within tokens"]._replace(packed=packed)
    given = operands(f"rms_rope_split_half{end}", shapes, BF16, turns(*shapes.table, part=20))
    is_ours(f"rms_rope_split_half{end}", {**given, "rot_dim": 20}, calls, times=2)


@pytest.mark.parametrize("name", ["apply_rope", "apply_rope_", "rms_rope", "rms_rope_"])
def test_of_a_longer_table_the_first_rotations_are_taken(name: str, calls: Calls) -> None:
    """For q and k of different lengths, too."""
    shapes = Shapes((B, H, S, D), (B, H, S - 2, D), (1, 1, S + 5))
    is_ours(name, operands(name, shapes, BF16, turns(*shapes.table)), calls)


@pytest.mark.parametrize("name", ["rms_rope", "rms_rope_split_half_"])
def test_without_a_weight_of_its_own_k_has_qs(name: str, calls: Calls) -> None:
    shapes = SHAPES["tokens within heads"]
    is_ours(name, {**operands(name, shapes, BF16, turns(*shapes.table)), "k_scale": None}, calls)


def test_new_tensors_have_the_strides_that_a_compiled_graph_expects(calls: Calls) -> None:
    shapes = SHAPES["of one projection"]
    given = operands("apply_rope", shapes, BF16, turns(1, 1, S))
    given = {**given, **{one: given[one].transpose(1, 2) for one in ("xq", "xk")}}
    with turning(AUTO):
        found = called("apply_rope", given)
    assert len(calls) == 1
    assert [one.stride() for one in found] == [torch.empty_like(given[one]).stride() for one in ("xq", "xk")]


def test_a_compiled_graph_asks_at_each_of_its_calls(calls: Calls) -> None:
    """It keeps kitchen's functions as they are, in place or not."""
    table, weight = turns(1, S, 1), torch.ones(D).to(BF16)

    def attend(x: Tensor) -> Tensor:
        q, k = kitchen.apply_rope(x[..., :D], x[..., D:], table)
        written = q + k
        kitchen.rms_rope_split_half1_(written, table, weight)
        return written

    torch._dynamo.reset()
    compiled, x = torch.compile(attend, backend="aot_eager"), torch.randn(B, S, H, 2 * D).to(BF16)
    theirs = attend(x)
    assert torch.equal(compiled(x), theirs) and not calls
    with turning(AUTO):
        ours = attend(x)
        assert torch.equal(compiled(x), ours) and len(calls) == 4
    assert torch.equal(compiled(x), theirs) and len(calls) == 4


# ----------------------------------------------------------------------------------------------- what is kitchen's own


Change = Callable[[Any], Any]
PLAIN = SHAPES["heads within tokens"]


def plain(name: str, **others: Any) -> dict[str, Any]:
    """Arguments that ours would serve, and others in the place of some of them."""
    return {**operands(name, PLAIN, BF16, turns(*PLAIN.table)), **others}


def halved(x: Tensor) -> Tensor:
    """The same values, in every second place of memory."""
    return x.repeat_interleave(2, -1)[..., ::2]


# Which arguments are changed, and how.
OTHERS: dict[str, tuple[tuple[str, ...], Change]] = {
    "fp32": (STREAMS, Tensor.float),
    "two types": (("xk", "k"), Tensor.half),
    "elements that are apart": (STREAMS, halved),
    "heads of two sizes": (("xk", "k"), lambda x: x[..., :16].contiguous()),
    "batches of two sizes": (("xk", "k"), lambda x: x[:1]),
    "nothing": (STREAMS, lambda x: x[:0]),
    "tokens of five dimensions": (STREAMS, lambda x: x[None]),
    "a table in FP16 beside BF16": (("freqs_cis",), Tensor.half),
    "a table in FP64": (("freqs_cis",), Tensor.double),
    "rotations that are apart": (("freqs_cis",), halved),
    "a table that is too short": (("freqs_cis",), lambda t: t[:, :-1]),
    "a table that is too long": (("freqs_cis",), lambda t: torch.cat([t, t], 1)),
    "a table of another batch": (("freqs_cis",), lambda t: t.repeat(3, 1, 1, 1, 1, 1)),
    "a table of smaller heads": (("freqs_cis",), lambda t: t[:, :, :, :-2]),
    "a table of more heads": (("freqs_cis",), lambda t: t.repeat(1, 1, H + 1, 1, 1, 1)),
    "a table of five dimensions": (("freqs_cis",), lambda t: t[0]),
    "weights in two types": (("k_scale",), Tensor.float),
    "weights in FP16 beside BF16": (("q_scale", "k_scale"), Tensor.half),
    "weights of a token": (("q_scale",), lambda w: w.repeat(H)),
    "an epsilon that is no number": (("epsilon",), lambda _: float("nan")),
    "an odd part": (("rot_dim",), lambda _: 7),
    "a part that the table does not turn": (("rot_dim",), lambda _: 12),
}
LEFT = [
    pytest.param(name, other, id=f"{name}, {other}")
    for name in ("apply_rope", "apply_rope_split_half_", "rms_rope_", "rms_rope_split_half")
    for other, (arguments, _) in OTHERS.items()
    if set(arguments) & set(FUNCTIONS[name])
]


@pytest.mark.parametrize(("name", "other"), LEFT)
def test_what_our_op_does_not_serve_is_kitchens(name: str, other: str, calls: Calls) -> None:
    arguments, change = OTHERS[other]
    given = plain(name)
    is_kitchens(name, {**given, **{one: change(given[one]) for one in arguments if one in given}}, calls)


@pytest.mark.parametrize("name", ["apply_rope_split_half", "apply_rope_split_half_"])
def test_without_a_cut_a_longer_table_is_an_error_as_ever(name: str, calls: Calls) -> None:
    shapes = Shapes((B, H, S, D), (B, H, S, D), (1, 1, S + 5))
    is_kitchens(name, operands(name, shapes, BF16, turns(*shapes.table)), calls)


@pytest.mark.parametrize("in_order", [False, True])
def test_heads_that_turn_differently_must_follow_each_other(in_order: bool, calls: Calls) -> None:
    """In a copy they do if a token's are in order."""
    q = torch.randn(B, S, H, D).to(BF16) if in_order else torch.randn(B, H, S, D).to(BF16).transpose(1, 2)
    given = {"x": q, "freqs_cis": turns(1, S, H)}
    (is_ours if in_order else is_kitchens)("apply_rope1", given, calls)


def test_gradients_are_kitchens(calls: Calls) -> None:
    with torch.inference_mode(False), torch.enable_grad(), turning(AUTO):
        given = plain("apply_rope1")
        given["x"].requires_grad_()
        kitchen.registry.get_implementation("apply_rope1", kwargs=given)(**given).sum().backward()
        assert given["x"].grad is not None
        given = plain("rms_rope1_")
        given["scale"].requires_grad_()
        with torch.no_grad(), pytest.raises(RuntimeError, match="inference-only"):
            kitchen.rms_rope1_(**given)
    assert not calls


@pytest.mark.parametrize(
    "written",
    [
        lambda x: {"xq": x[:, :-1], "xk": x[:, 1:]},
        lambda x: {"xq": x[:, :1].expand(-1, S - 1, -1, -1), "xk": x[:, 1:].clone()},
    ],
    ids=["each other", "itself"],
)
def test_what_overlaps_is_not_written(written: Change, calls: Calls) -> None:
    x = torch.randn(B, S, H, D).to(BF16)
    before = x.clone()
    with turning(AUTO), pytest.raises(ValueError, match="overlap"):
        kitchen.apply_rope_(**written(x), freqs_cis=turns(1, S - 1, 1))
    assert not calls and torch.equal(x, before)


class Whole:
    """A backend in the place of kitchen's own kernels, on the CPU."""

    def __init__(self, patch: pytest.MonkeyPatch, *names: str, serves: bool = True) -> None:
        self.called: list[str] = []
        result, registry = constraints.ValidationResult, kitchen.registry
        answer = result.ok() if serves else result.fail("x", "not today")
        rules = constraints.FunctionConstraints(call_rules=(lambda _: answer,))
        functions = {name: self._counted(name) for name in names}
        patch.setitem(registry._backends, "cuda", SimpleNamespace(**functions))
        patch.setitem(registry._capabilities, "cuda", set(names))
        for name in names:
            patch.setitem(registry._constraints, ("cuda", name), rules)
        patch.setattr(registry, "_disabled", set())

    def _counted(self, name: str) -> Callable[..., Any]:
        def run(**given: Any) -> Any:
            self.called.append(name)
            return getattr(eager, name)(**given)

        return run


def test_where_kitchens_own_kernel_serves_it_stays(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    whole = Whole(monkeypatch, "apply_rope")
    is_kitchens("apply_rope", plain("apply_rope"), calls)
    assert whole.called == ["apply_rope", "apply_rope"]
    is_ours("rms_rope", plain("rms_rope"), calls)  # it has no such function
    kitchen.disable_backend("cuda")
    calls.threads.clear()
    is_ours("apply_rope", plain("apply_rope"), calls)


def test_where_kitchens_own_kernel_does_not_take_a_call_ours_does(
    monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    whole = Whole(monkeypatch, "apply_rope", serves=False)
    is_ours("apply_rope", plain("apply_rope"), calls)
    assert not whole.called


def test_on_the_cpu_all_is_kitchens(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    monkeypatch.setattr(kitchen_rope, "runs_on", RUNS_ON)
    for name in FUNCTIONS:
        is_kitchens(name, plain(name), calls)


# ------------------------------------------------------------------------------------------------------------- policies


@pytest.mark.parametrize("policy", [None, OFF, KernelPolicy.of("auto", rms_rope_="off")], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_without_the_op_all_is_kitchens(name: str, policy: KernelPolicy | None, calls: Calls) -> None:
    is_kitchens(name, plain(name), calls, policy)


def test_a_policy_is_of_its_call_alone(calls: Calls) -> None:
    """Also of one within another, and of one that raises."""
    for policy in (None, OFF):
        with turning(AUTO):
            is_kitchens("apply_rope", plain("apply_rope"), calls, policy)
    with turning(OFF):
        is_ours("apply_rope", plain("apply_rope"), calls)
    calls.threads.clear()
    with pytest.raises(KeyError), turning(AUTO):
        raise KeyError
    is_kitchens("apply_rope", plain("apply_rope"), calls, None)


def test_a_call_goes_on_under_its_policy_after_one_within(calls: Calls) -> None:
    with turning(AUTO):
        for policy in (None, OFF, AUTO):
            with turning(policy):
                pass
            called("apply_rope", plain("apply_rope"))
    assert len(calls) == 3


def test_outside_of_a_call_the_backend_serves_nobody_who_names_it(calls: Calls) -> None:
    with turning(AUTO):
        pass
    theirs = called("apply_rope", plain("apply_rope"))
    with kitchen.use_backend(KITCHEN_BACKEND):
        assert all(map(torch.equal, called("apply_rope", plain("apply_rope")), theirs))
    assert not calls


def test_another_choice_of_backend_is_as_it_was_afterwards(calls: Calls) -> None:
    with kitchen.use_backend("eager"):
        with turning(AUTO):
            called("apply_rope", plain("apply_rope"))
        assert kitchen.registry._thread_local.backend_override == "eager"
    assert len(calls) == 1


def test_other_threads_are_not_touched(calls: Calls) -> None:
    def elsewhere() -> None:
        with torch.inference_mode():
            called("apply_rope", plain("apply_rope"))

    with turning(AUTO):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert not calls
        called("apply_rope", plain("apply_rope"))
    assert calls.threads == [threading.get_ident()]


def test_the_backend_is_in_nobodys_list_and_can_be_switched_off(calls: Calls) -> None:
    with turning(AUTO):
        pass
    assert KITCHEN_BACKEND not in kitchen.registry._priority
    kitchen.disable_backend(KITCHEN_BACKEND)
    try:
        is_kitchens("apply_rope", plain("apply_rope"), calls)
    finally:
        kitchen.enable_backend(KITCHEN_BACKEND)
    is_ours("apply_rope", plain("apply_rope"), calls)


@pytest.fixture
def anew() -> Iterator[None]:
    """As if no call had been before."""
    kitchen_rope._registered.cache_clear()
    yield
    kitchen_rope._registered.cache_clear()


def test_a_registry_of_another_kind_is_left_alone(monkeypatch: pytest.MonkeyPatch, anew: None, calls: Calls) -> None:
    monkeypatch.setattr(type(kitchen.registry), "register", lambda self, backend: pytest.fail("registered"))
    LEDGER.clear()
    is_kitchens("apply_rope", plain("apply_rope"), calls)
    assert kitchen_rope.UNKNOWN in LEDGER.messages


def test_without_comfy_kitchen_nothing_is_asked(monkeypatch: pytest.MonkeyPatch, anew: None) -> None:
    monkeypatch.delattr("comfy.quant_ops.ck")
    with turning(AUTO):
        assert getattr(kitchen.registry._thread_local, "backend_override", None) is None


def test_a_function_with_other_arguments_is_kitchens(monkeypatch: pytest.MonkeyPatch, anew: None, calls: Calls) -> None:
    pair, one = plain("apply_rope"), plain("apply_rope1")
    monkeypatch.setitem(FUNCTIONS, "apply_rope", ("xq", "xk", "freqs_cis", "more"))
    is_kitchens("apply_rope", pair, calls)
    is_ours("apply_rope1", one, calls)
    assert KITCHEN_BACKEND in kitchen.list_backends()
    monkeypatch.undo()
    kitchen_rope._registered.cache_clear()
    with turning(AUTO):
        assert set(kitchen.list_backends()[KITCHEN_BACKEND]["capabilities"]) == FUNCTIONS.keys()
