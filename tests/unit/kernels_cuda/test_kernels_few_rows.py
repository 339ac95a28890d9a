"""few_rows: what its kernels take, and which of them."""

from __future__ import annotations

import pytest
import torch
from contract.op_contract import Draw
from contract.op_samples import matmul

from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.matmul.few_rows import (
    STEPS,
    kernel_for,
    obstacles,
)


def weight_of(encoding: str, n: int, k: int) -> torch.Tensor:
    return matmul.weight_of(Draw(0), encoding, n, k)


X, W = torch.zeros(2, 256).half(), torch.zeros(3, 144, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("tensors", "encoding", "reason"),
    [
        ((X, weight_of("Q3_K", 3, 256), None, None, None), "Q3_K", "weights are Q3_K, the kernels take Q4_0"),
        ((X.float(), W, None, None, None), "Q4_K", "x is float32"),
        ((X, W, None, torch.ones(3).double(), None), "Q4_K", "bias is float64"),
        ((X, W, None, None, torch.ones(2, 3).double()), "Q4_K", "residual is float64"),
        ((X, torch.zeros(3, 288).byte()[:, ::2], None, None, None), "Q4_K", "weight is not contiguous"),
        ((torch.zeros(2, 264).half()[:, 8:], W, None, None, None), "Q4_K", "x is not contiguous"),
        ((torch.zeros(17, 256).half(), W, None, None, None), "Q4_K", "x has 17 rows, the kernels take up to 16"),
        (
            (X[:, :32].clone(), torch.zeros(3, 18).byte(), None, None, None),
            "Q4_0",
            "rows are 32 long, no multiple of 256",
        ),
        ((X[:1], torch.zeros(145).byte()[1:].view(1, 144), None, None, None), "Q4_K", "weight does not start"),
    ],
)
def test_what_the_kernels_do_not_take(tensors, encoding, reason):
    assert next(obstacles(Call("few_rows", tensors, (encoding, 1.0, False, None)))).startswith(reason)


def test_what_the_kernels_take():
    for encoding, step in STEPS.items():
        tensors = torch.zeros(16, step.elements).half(), weight_of(encoding, 5, step.elements), None, None, None
        assert not list(obstacles(Call("few_rows", tensors, (encoding, 1.0, False, None))))
        assert tensors[1].nbytes == 5 * step.bytes


@pytest.mark.parametrize(
    ("m", "n", "steps", "kernel"),
    [
        (1, 9728, 10, (2, 264)),
        (2, 2560, 38, (2, 160)),
        (2, 16, 8, (2, 1)),
        (2, 151936, 10, (2, 264)),
        (3, 9728, 10, (8, 608)),
        (2, 9729, 10, (8, 609)),
        (2, 9728, 7, (8, 608)),
        (9, 9728, 10, (16, 608)),
        (8, 17, 10, (8, 2)),
    ],
)
def test_which_kernel_and_how_many_blocks(m: int, n: int, steps: int, kernel: tuple[int, int]) -> None:
    """A token's blocks stay, as many as run at once on 132 multiprocessors; it takes whole tiles, of which each warp has a part."""
    assert kernel_for(m, n, steps, 132) == kernel
