"""Every op's kernel keeps the contract of its op (tests/contract): near the definition, the same bits at every run."""

from __future__ import annotations

import pytest
import torch
from contract.op_contract import Contract, Sample, assert_near, into, same, samples, twins
from contract.op_samples import CONTRACTS
from gpu.support import on

from fusestream.kernels_cuda import KernelRefused
from fusestream.kernels_cuda.registry import Op

SLACK = 2e-5  # of the largest: sums in another order, and the card's own exponentials
# Kernels that round to fp16 on the way: ggml's numbers as they are unpacked, the sum of up to four taps.
ROUNDED = {"few_rows": 2**-11, "upsample_conv2d": 2**-9, "bordered_upsample_conv": 2**-9}


def served(name: str, contract: Contract, isa: str | None, number: int) -> list[tuple[Sample, Sample]]:
    """Calls that a kernel serves, on the CPU and on the card: of odd sizes and strides many do not."""
    found = []
    for sample in samples(name, contract, number):
        there = sample.moved("cuda")
        try:
            there.run(on(isa))
        except KernelRefused:
            continue
        found.append((sample, there))
    return found


@pytest.mark.parametrize(("name", "contract"), CONTRACTS.items(), ids=CONTRACTS)
def test_kernels_are_near_the_definition(isa: str | None, name: str, contract: Contract) -> None:
    for sample, there in served(name, contract, isa, 60):
        got, again = (there.run(on(isa)) for _ in range(2))
        for one, other, want in zip(got, again, sample.exact(), strict=True):
            assert same(one, other), f"{sample}: other bits"
            slack = max(contract.slack, ROUNDED.get(name, SLACK))
            assert_near(one.cpu(), want, slack, sample, contract.floor(sample.operands))


@pytest.mark.parametrize(("twin", "op", "at"), twins(), ids=[twin.name for twin, *_ in twins()])
def test_what_is_written_is_what_would_be_made(isa: str | None, twin: Op, op: Op, at: int) -> None:
    for _, there in served(op.name, CONTRACTS[op.name], isa, 40):
        want = op(there.tensors, there.options, on(isa))
        out = torch.full_like(want, torch.nan)
        tensors, options = into(op, there, out, at)
        twin(tensors, options, on(isa))
        assert same(out, want), there
