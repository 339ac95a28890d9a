"""int8_to_half on the GPU, in both instruction classes: bit for bit."""

from __future__ import annotations

import pytest
import torch
from gpu.support import on

from fusestream.kernels_cuda import int8_to_half
from fusestream.kernels_cuda.ops.quant import int8_to_half as op
from fusestream.kernels_cuda.ops.quant.rotation import GROUPS


def operands(rows, k, per_row):
    numbers = torch.randint(-128, 128, (rows, k), dtype=torch.int8, device="cuda")
    return numbers, torch.rand(rows if per_row else 1, device="cuda") * 10


@pytest.mark.sanitize
@pytest.mark.parametrize(("rows", "k"), [(1, 8), (3, 8), (5, 16), (7, 48), (9, 192), (5, 512), (130, 264)])
def test_ends(isa, rows, k):
    for group in (0, *GROUPS):
        if group and k % group:
            continue
        for per_row in (False, True):
            x, scale = operands(rows, k, per_row)
            want = op.reference(x.cpu(), scale.cpu(), group)
            assert torch.equal(int8_to_half(x, scale, rotation=group, policy=on(isa)).cpu(), want), (group, per_row)


@pytest.mark.parametrize(("rows", "k"), [(1536, 8960), (5120, 5120), (4096, 13824)])
def test_weights(isa, rows, k):
    for group in (0, 256):
        x, scale = operands(rows, k, True)
        assert torch.equal(int8_to_half(x, scale, rotation=group, policy=on(isa)), op.reference(x, scale, group))


def test_into_memory_that_is_there(isa):
    x, scale = operands(40, 256, True)
    room = torch.full((42, 256), 7.0, device="cuda").half()
    int8_to_half(x, scale, rotation=64, out=room[1:41], policy=on(isa))
    assert torch.equal(room[1:41], op.reference(x, scale, 64))
    assert (room[0] == 7).all() and (room[41] == 7).all()


def test_special_values(isa):
    x, scale = operands(5, 256, True)
    scale[1], scale[2], scale[3] = torch.nan, torch.inf, 1e6
    got, want = int8_to_half(x, scale, policy=on(isa)), op.reference(x, scale, 0)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 24 * 2**30, reason="needs 24 GB")
def test_more_than_2_to_the_32_elements(isa):
    x = torch.randint(-128, 128, (2**20 + 3, 4096), dtype=torch.int8, device="cuda")
    scale = torch.rand(x.shape[0], device="cuda")
    got = int8_to_half(x, scale, rotation=256, policy=on(isa))
    for rows in (slice(0, 5), slice(-5, None)):
        assert torch.equal(got[rows], op.reference(x[rows], scale[rows], 256))
