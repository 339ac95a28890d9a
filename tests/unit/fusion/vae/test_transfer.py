"""Decoded frames on their way, as far as no card is needed."""

from __future__ import annotations

from mmap import PAGESIZE

import pytest
import torch

from fusestream.fusion.vae.transfer import Outbox, touch


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("width", [1, 1000, 1024, 5000])
def test_every_page_of_a_part_is_touched(width, dtype):
    """And what lies beside the part is not."""
    out = torch.ones(2, 3, 40, width, dtype=dtype)
    touch(out[1:, :, 8:24])
    assert out[0].all() and out[:, :, :8].all() and out[:, :, 24:].all()
    for plane in out[1, :, 8:24].flatten(1):
        at = (plane == 0).nonzero().flatten()
        gaps = torch.diff(torch.cat((torch.tensor([0]), at, torch.tensor([plane.numel()]))))
        assert int(gaps.max()) * out.element_size() <= PAGESIZE


def test_pieces_that_are_there_are_copied():
    out = torch.zeros(1, 2, 8, 4)
    box, piece = Outbox(out), torch.randn(1, 2, 3, 4)
    box.put((slice(0, 1), slice(None), slice(2, 5)), piece)
    box.flush()
    assert torch.equal(out[:, :, 2:5], piece) and not out[:, :, 5:].any() and not out[:, :, :2].any()
