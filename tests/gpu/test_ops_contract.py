"""Every op's kernel keeps the contract of its op (tests/contract): near the definition, the same bits at every run, in a graph too.

Calls are drawn anew at every run. What a kernel does not take is served by torch under `auto`; in which words it is refused
stands among the golden launches.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from contract.op_contract import Contract, Draw, Sample, assert_near, into, same, samples, several, twins
from contract.op_samples import CONTRACTS
from gpu.support import on

from fusestream.kernels_cuda import KernelRefused
from fusestream.kernels_cuda.registry import Op

SLACK = 2e-5  # of the largest: sums in another order, and the card's own exponentials
# Kernels that round to fp16 on the way: ggml's numbers as they are unpacked, and sums of up to four taps, whatever these
# leave of each other.
ROUNDED = {"few_rows": 2**-11}
FOLDED = ("upsample_conv2d", "bordered_upsample_conv")
EACH = pytest.mark.parametrize(("name", "contract"), CONTRACTS.items(), ids=CONTRACTS)


@pytest.fixture
def isa(every_isa: str | None) -> str | None:
    return every_isa


def served(name: str, contract: Contract, isa: str | None, number: int, **draw: int) -> list[tuple[Sample, Sample]]:
    """Calls that a kernel serves, on the CPU and on the card: of odd sizes and strides many do not."""
    found = []
    for sample in samples(name, contract, number, **draw):
        there = sample.moved("cuda")
        try:
            there.run(on(isa))
        except KernelRefused:
            continue
        found.append((sample, there))
    return found


@EACH
def test_kernels_are_near_the_definition(isa: str | None, name: str, contract: Contract) -> None:
    for sample, there in served(name, contract, isa, 60):
        got, again = (there.run(on(isa)) for _ in range(2))
        for one, other, want in zip(got, again, sample.exact(), strict=True):
            assert same(one, other), f"{sample}: other bits"
            slack = max(contract.slack, ROUNDED.get(name, SLACK))
            assert_near(one.cpu(), want, slack, sample, contract.floor(sample.operands) + taps_rounded(name, sample))


def taps_rounded(name: str, sample: Sample) -> float:
    """What rounding the sums of taps costs at most: half a step of the magnitudes."""
    if name not in FOLDED:
        return 0.0
    plain = {"bias": None, "activation": "none", "folded": None}
    sizes = {one: sample.operands[one].abs() for one in ("x", "weight")}
    (most,) = replace(sample, operands={**sample.operands, **plain, **sizes}).exact()
    return 2.0**-11 * float(most.nan_to_num(0, 0, 0).amax())


@EACH
def test_of_nothing_comes_nothing(isa: str | None, name: str, contract: Contract) -> None:
    """Whichever of its sizes is 0."""
    draw = Draw(0)
    contract.draw(draw)
    for i in range(draw.sizes):
        for sample, there in served(name, contract, isa, 4, empty=i):
            assert [t.shape for t in there.run(on(isa))] == [t.shape for t in sample.exact()], sample


@EACH
def test_a_graph_replays_what_a_call_makes(isa: str | None, name: str, contract: Contract) -> None:
    for _, there in served(name, contract, isa, 20)[:4]:
        want, tensors = there.run(on(isa)), there.copied()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            returned = there.op(tensors, there.options, on(isa))
        for t in several(returned):
            t.zero_()
        graph.replay()
        written = [t for t in (tensors[i] for i in there.op.writes) if t is not None]
        for one, other in zip(contract.seen(*written, *several(returned)), want, strict=True):
            assert same(one, other), there


@EACH
def test_auto_serves_what_kernels_refuse(isa: str | None, name: str, contract: Contract) -> None:
    for sample in samples(name, contract, 20):
        there = sample.moved("cuda")
        try:
            there.run(on(isa))
        except KernelRefused:
            assert [t.shape for t in there.run()] == [t.shape for t in sample.exact()], sample


@pytest.mark.parametrize(("twin", "op", "at"), twins(), ids=[twin.name for twin, *_ in twins()])
def test_what_is_written_is_what_would_be_made(isa: str | None, twin: Op, op: Op, at: int) -> None:
    for _, there in served(op.name, CONTRACTS[op.name], isa, 40):
        want = op(there.tensors, there.options, on(isa))
        out = torch.full_like(want, torch.nan if want.is_floating_point() else 99)
        tensors, options = into(op, there, out, at)
        twin(tensors, options, on(isa))
        assert same(out, want), there
