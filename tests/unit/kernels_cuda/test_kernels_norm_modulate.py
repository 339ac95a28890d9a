"""norm_modulate without a GPU: rows, frames, and what holds a row."""

from __future__ import annotations

import pytest
import torch

from fusestream.kernels_cuda import KernelPolicy, norm_modulate
from fusestream.kernels_cuda.ops.norm.norm_modulate import best_tactic, tactics, threads_for
from fusestream.kernels_cuda.ops.views.rows import rows, tokens_per_frame

EPS = 1e-6
OFF = KernelPolicy.of("off")


def test_frames_are_spread_as_stock_does():
    assert tokens_per_frame(12, 3, "scale") == 4
    assert tokens_per_frame(13, 3, "scale") == 5  # repeat_e rounds up and cuts
    assert tokens_per_frame(13, 13, "scale") == 1
    assert tokens_per_frame(7, 1, "scale") == 7
    with pytest.raises(ValueError, match="8 rows of modulation cannot be spread over 5 tokens"):
        tokens_per_frame(5, 8, "scale")


def test_row_views():
    x = torch.zeros(2, 3, 4, 8)
    assert rows(x).tokens == 12
    assert rows(x[:, :, :2]) == "dimensions (3, 2) with strides (32, 8) do not fold into rows"
    assert rows(x[:, :, 1:2]).row_stride == 32
    assert "not adjacent" in rows(x.transpose(-1, -2))
    assert rows(torch.zeros(3)) == "a tensor of rank 1 has no rows"


@pytest.mark.parametrize(
    ("d", "packs", "threads"),
    [(1, 2, 32), (1536, 3, 64), (3072, 3, 128), (4096, 4, 128), (5120, 4, 160), (8192, 4, 256), (9216, 2, 576)],
)
def test_a_row_fits_its_block(d, packs, threads):
    assert threads_for(d, packs) == threads
    if d <= 8192:
        assert best_tactic(d).packs == packs
    assert all(threads_for(d, t.packs) <= 384 and threads_for(d, t.packs) * t.packs * 8 >= d for t in tactics(d))


def test_off_is_stock_to_the_bit():
    x = torch.randn(1, 4, 16).half()
    assert torch.equal(
        norm_modulate(x, eps=EPS, policy=KernelPolicy.of("off")), torch.nn.functional.layer_norm(x, (16,), eps=EPS)
    )
