"""Every op of the registry keeps its contract on the CPU: reference and stock's way against the definition in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from contract.op_contract import (
    Contract,
    Draw,
    Operands,
    Sample,
    assert_near,
    assert_special_as,
    into,
    layout,
    like,
    moved,
    same,
    samples,
    several,
    twins,
)
from contract.op_samples import CONTRACTS
from torch import Tensor

from bed.depth import examples
from fusestream import kernels_cuda
from fusestream.kernels_cuda import LEDGER, OPS, STANDARD, KernelPolicy, KernelRefused
from fusestream.kernels_cuda.registry import Op

OFF = KernelPolicy.of("off")
EACH = pytest.mark.parametrize(("name", "contract"), CONTRACTS.items(), ids=CONTRACTS)
TWINS = pytest.mark.parametrize(("twin", "op", "at"), twins(), ids=[twin.name for twin, *_ in twins()])


def test_every_op_has_samples() -> None:
    assert CONTRACTS.keys() | {twin.name for twin, *_ in twins()} == OPS.keys()


def check(sample: Sample) -> None:
    """Both ways are near, and what is only read is as it was."""
    before = [None if t is None else t.clone() for t in sample.tensors]
    want, contract = sample.exact(), sample.contract
    for policy, slack in ((STANDARD, contract.slack), (OFF, sample.stock)):
        got = sample.run(policy)
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            if slack is not None:
                assert_near(one, other, slack, f"{sample} {policy.default}", contract.floor(sample.operands))
    for t, copy in zip(sample.tensors, before, strict=True):
        assert t is None or copy is None or same(t, copy), sample


@EACH
def test_results_are_the_definitions(name: str, contract: Contract) -> None:
    for sample in samples(name, contract, examples(60)):
        check(sample)


@EACH
def test_one_of_everything_and_nothing(name: str, contract: Contract) -> None:
    """All sizes 1, and each of them 0."""
    draw = Draw(0)
    contract.draw(draw)
    for sample in (
        *samples(name, contract, 4, one=True),
        *(one for i in range(draw.sizes) for one in samples(name, contract, 2, empty=i)),
    ):
        check(sample)


@pytest.mark.every_other
@EACH
def test_fakes_make_what_comes_and_every_run_the_same_bits(name: str, contract: Contract) -> None:
    for sample in samples(name, contract, examples(20)):
        op, options = sample.op, sample.options
        faked = op.fake(*sample.copied(), *options)
        first, again = (op(sample.copied(), options, STANDARD) for _ in range(2))
        theirs = op(sample.copied(), options, OFF)
        returned = contract.function(**{key: moved(value, "cpu") for key, value in sample.operands.items()})
        if name != "choose_blocks":  # whose caller gets lists and means in tuples of their own
            assert all(same(one, other) for one, other in zip(several(returned), several(first), strict=True)), sample
        for one, *others in zip(*(several(found) for found in (first, again, theirs, faked)), strict=True):
            assert same(one, others[0]), sample
            for other in others[1:]:
                assert other.shape == one.shape and other.dtype is one.dtype and layout(other) == layout(one), sample


VALUES = (torch.nan, torch.inf, -torch.inf, 65504.0, -65504.0, 60000.0)


@pytest.mark.every_other
@EACH
def test_special_values_come_through(name: str, contract: Contract) -> None:
    for operand in contract.special:
        for sample in samples(name, contract, examples(20)):
            given = sample.operands.get(operand)
            if not isinstance(given, Tensor) or not given.dtype.is_floating_point or not given.numel():
                continue
            changed = like(given).copy_(given)
            # Of infinities torch's gates make NaN or not, as they compute many at once or few, and fp16 in between has less room.
            values = VALUES[:1] if contract.as_stock else VALUES
            value = values[int(torch.randint(len(values), ()))]
            changed[tuple(int(torch.randint(size, ())) for size in given.shape)] = value
            special = Sample.of(contract, {**sample.operands, operand: changed}, sample.seed)
            right = special.run(OFF) if contract.as_stock else special.exact()
            for one, other in zip(special.run(), right, strict=True):
                assert_special_as(one, other, f"{operand} {value}, {special}")


@pytest.mark.parametrize(
    ("contract", "words", "changes"),
    [
        pytest.param(contract, words, changes, id=f"{name}-{i}")
        for name, contract in CONTRACTS.items()
        for i, (words, changes) in enumerate(contract.wrong)
    ],
)
def test_wrong_operands_are_named(contract: Contract, words: str, changes: dict[str, Any]) -> None:
    sample = Sample.of(contract, {**contract.base, **changes})
    sample.op.forget()  # a plan is asked for once
    for policy in (STANDARD, OFF, KernelPolicy.of("on")):
        with pytest.raises(ValueError, match=f"^{sample.op.name}: {words}"):
            contract.function(**sample.operands, policy=policy)


@EACH
def test_modes(name: str, contract: Contract) -> None:
    (sample,) = samples(name, contract, 1)
    LEDGER.clear()
    sample.op.forget()
    sample.run()
    refused = {(found.op, found.reason, found.served_by) for found in LEDGER.refusals}
    assert (name, "tensor is on the CPU", "the reference") in refused
    with pytest.raises(KernelRefused, match=rf"^{name} is forced on but cannot serve \(.*tensor is on the CPU"):
        sample.run(KernelPolicy.of("on"))


def for_torchs_checks(sample: Sample) -> bool:
    """Whether they can compare its numbers: they cannot fp8, and to them NaN is not NaN."""
    floats = [t for t in (*sample.tensors, *sample.run()) if t is not None and t.dtype.is_floating_point]
    return all(t.dtype.itemsize > 1 and t.isfinite().all() for t in floats)


@pytest.mark.every_other
@EACH
def test_torch_finds_schema_and_fake_sound(name: str, contract: Contract) -> None:
    """What its other checks ask is how ops are registered, which is the same for all, and asked of one."""
    few = {} if name == "silu" else {"test_utils": ("test_schema", "test_faketensor")}
    sample = next(one for one in samples(name, contract, 20) if for_torchs_checks(one))
    torch.library.opcheck(sample.op.traced, (*sample.copied(), *sample.options, STANDARD.token), **few)
    for twin, op, at in twins():
        if op is sample.op:
            tensors, options = into(op, sample, op(sample.copied(), sample.options, STANDARD), at)
            torch.library.opcheck(twin.traced, (*tensors, *options, STANDARD.token), **few)


def test_torch_compile_keeps_every_op_whole() -> None:
    given = [samples(name, contract, 1)[0] for name, contract in CONTRACTS.items()]

    def run(calls: list[tuple[Tensor | None, ...]]) -> list[Any]:
        return [sample.op(tensors, sample.options, STANDARD) for sample, tensors in zip(given, calls, strict=True)]

    one, other = ([sample.copied() for sample in given] for _ in range(2))
    found, want = torch.compile(run, fullgraph=True, backend="aot_eager")(one), run(other)
    for sample, *pairs in zip(given, zip(found, want, strict=True), zip(one, other, strict=True), strict=True):
        for got, right in pairs:
            assert all(a is None or same(a, b) for a, b in zip(several(got), several(right), strict=True)), sample


# ---------------------------------------------------------------------------------------------- those that write to `out`


def called_for(twin: Op, op: Op) -> Callable[[Tensor, Operands, KernelPolicy], object]:
    """The function that writes to `out`: one of its own, or the op's with an argument for it."""
    own = getattr(kernels_cuda, twin.name, None)

    def call(out: Tensor, operands: Operands, policy: KernelPolicy) -> object:
        given = {name: value for name, value in operands.items() if name != "out_dtype"}
        return own(out, **given, policy=policy) if own else CONTRACTS[op.name].function(**given, out=out, policy=policy)

    return call


@TWINS
def test_what_is_written_is_what_would_be_made(twin: Op, op: Op, at: int) -> None:
    """The same bits, to a part of a wider buffer, whose rest stays; and `auto` finds no other obstacle than the CPU."""
    for sample in samples(op.name, CONTRACTS[op.name], examples(40)):
        for policy in (STANDARD, OFF):
            want = op(sample.tensors, sample.options, policy)
            room = torch.full((*want.shape[:-1], want.shape[-1] + 16) if want.ndim else (1,), 7.0, dtype=want.dtype)
            out = room[..., 8:-8] if want.ndim else room[0]
            tensors, options = into(op, sample, out, at)
            assert twin(tensors, options, policy) is None
            assert same(out, want), sample
            assert want.ndim == 0 or ((room[..., :8] == 7).all() and (room[..., -8:] == 7).all())
            again = torch.empty_like(want)
            called_for(twin, op)(again, sample.operands, policy)
            assert same(again, want), sample
            added = sample.operands.get("residual")
            if isinstance(added, Tensor) and added.dtype is want.dtype:  # where it lies
                over = replace(sample, tensors=tuple(added if t is added else t for t in sample.copied()))
                tensors, options = into(op, over, added, at)
                assert twin(tensors, options, policy) is None
                assert same(added, want), sample


@TWINS
def test_a_place_of_its_own(twin: Op, op: Op, at: int) -> None:
    for sample in samples(op.name, CONTRACTS[op.name], 20):
        want = op(sample.tensors, sample.options, STANDARD)
        if want.numel() < 2:
            continue
        longer = torch.empty(*want.shape[:-1], want.shape[-1] + 1, dtype=want.dtype)
        one = torch.empty(1, dtype=want.dtype).expand(want.shape)
        first = next(i for i, t in enumerate(sample.tensors) if t is not None and t.numel())
        over = sample.tensors[first]
        assert over is not None
        for out, words in ((longer, r"out: .*\[\d"), (one, "out: .* is written, and its elements share memory")):
            twin.forget()
            for policy in (STANDARD, OFF, KernelPolicy.of("on")):
                with pytest.raises(ValueError, match=f"^{twin.name}: {words}"):
                    twin(*into(op, sample, out, at), policy)
        size, read = want.numel() * want.element_size(), over.numel() * over.element_size()
        room = torch.zeros(max(size, read), dtype=torch.uint8)
        tensors = list(sample.tensors)
        tensors[first] = room[:read].view(over.dtype).view(over.shape)
        beside = replace(sample, tensors=tuple(tensors))
        overlapping, options = into(op, beside, room[:size].view(want.dtype).view(want.shape), at)
        with pytest.raises(ValueError, match=f"^{twin.name}: out: .* overlaps "):
            twin(overlapping, options, STANDARD)


def test_the_suite_sees_a_breach() -> None:
    """A result that is off by two roundings, in another format, or not a number where it should be one."""
    exact = torch.tensor([1.0, 2.0, torch.nan, 65504.0], dtype=torch.float64)
    assert_near(exact.half(), exact, 0.0, "")
    assert_special_as(exact.half(), exact, "")
    with pytest.raises(AssertionError, match="instead of"):
        assert_near(torch.tensor([1.001, 2.0, 0.0, 0.0]).half(), exact, 0.0, "")
    with pytest.raises(AssertionError, match="isnan elsewhere"):
        assert_special_as(torch.tensor([1.0, 2.0, 3.0, 4.0]).half(), exact, "")
