"""dequantise on the GPU, in both instruction classes: the reference's bits, of any bytes."""

from __future__ import annotations

import os

import pytest
import torch
from gpu.support import on, shifted
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from fusestream.kernels_cuda import KernelRefused, dequantise
from fusestream.kernels_cuda.ops.quant.dequantise import CHUNK, reference
from fusestream.kernels_cuda.ops.quant.packed_blocks import BLOCK_TYPES

ENCODINGS = list(BLOCK_TYPES)


def packed_of(encoding, *shape):
    """Any bytes at all: scales that are Inf, NaN and denormal among them."""
    return torch.randint(256, (*shape[:-1], shape[-1] * BLOCK_TYPES[encoding].bytes), dtype=torch.uint8, device="cuda")


def assert_same_bits(got, want):
    """The reference is numpy's, bit for bit, on a CPU."""
    got, want = got.cpu(), want.cpu()
    assert got.dtype is want.dtype is torch.float16 and got.shape == want.shape
    assert torch.equal(got.isnan(), want.isnan())
    known = ~want.isnan()
    assert torch.equal(got[known].view(torch.int16), want[known].view(torch.int16))


def exact(packed, encoding):
    return reference(packed.cpu(), encoding)


@pytest.mark.sanitize
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_sizes(isa, encoding):
    chunk = CHUNK // BLOCK_TYPES[encoding].elements
    for blocks in (1, 3, chunk - 1, chunk, chunk + 5):
        packed = packed_of(encoding, blocks)
        assert_same_bits(dequantise(packed, encoding, policy=on(isa)), exact(packed, encoding))
    empty = packed_of(encoding, 3, 0)
    assert dequantise(empty, encoding, policy=on(isa)).shape == (3, 0)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_scale(isa, encoding):
    """Each fp16 number as d, with quants of all kinds; and many blocks with anything in them."""
    kind = BLOCK_TYPES[encoding]
    packed = packed_of(encoding, 65536, 1)
    at = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}.get(encoding, 0)
    packed[:, at : at + 2] = torch.arange(65536, dtype=torch.int32).to(torch.int16).cuda().view(torch.uint8).view(-1, 2)
    got = dequantise(packed, encoding, policy=on(isa))
    assert got.shape == (65536, kind.elements)
    assert_same_bits(got, exact(packed, encoding))


@given(
    encoding=st.sampled_from(ENCODINGS),
    rows=st.integers(1, 40),
    blocks=st.integers(1, 300),
    into=st.booleans(),
)
@seed(int(os.environ.get("FUSESTREAM_SEED") or 0))
@settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_the_definition(isa, encoding, rows, blocks, into):
    packed = packed_of(encoding, rows, blocks)
    want = exact(packed, encoding)
    out = torch.full(want.shape, torch.nan, device="cuda", dtype=torch.float16) if into else None
    got = dequantise(packed, encoding, out=out, policy=on(isa))
    assert out is None or got is out
    assert_same_bits(got, want)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_destination_is_filled_and_nothing_else(isa, encoding):
    """The scratch of a block: a view into a larger buffer, on a stream of its own, without allocation."""
    room = torch.full((60000,), torch.nan, device="cuda", dtype=torch.float16)
    for start, blocks in ((0, 1), (64, 7), (8, 150)):
        room.fill_(torch.nan)
        packed = packed_of(encoding, blocks)
        packed.view(blocks, -1)[:, 0::2] &= 0x3F  # scales that are finite
        packed.view(blocks, -1)[:, 1::2] &= 0x3F
        size = blocks * BLOCK_TYPES[encoding].elements
        out = room[start : start + size]
        dequantise(packed, encoding, out=torch.empty_like(room)[start : start + size], policy=on(isa))  # make the plan
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        before = torch.cuda.memory_allocated()
        with torch.cuda.stream(side):
            dequantise(packed, encoding, out=out, policy=on(isa))
        assert torch.cuda.memory_allocated() == before
        side.synchronize()
        assert_same_bits(out, exact(packed, encoding))
        assert room[:start].isnan().all()
        assert room[start + size :].isnan().all()


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 24 * 2**30, reason="needs 24 GB")
def test_products_beyond_32_bits():
    packed = torch.zeros(2**23 + 3, 210, device="cuda", dtype=torch.uint8)
    packed[-1] = packed_of("Q6_K", 1)
    got = dequantise(packed, "Q6_K", policy=on(None))
    assert_same_bits(got[-1], exact(packed[-1], "Q6_K"))
    assert not got[:-1].any()


def test_refusals():
    packed = packed_of("Q4_0", 4, 8)
    for bad, reason in ((packed[:, :72], "packed is not contiguous"), (shifted(packed, 2), "does not start at")):
        with pytest.raises(KernelRefused, match=reason):
            dequantise(bad, "Q4_0", policy=on(None))
        assert_same_bits(dequantise(bad, "Q4_0"), exact(bad, "Q4_0"))
    with pytest.raises(KernelRefused, match="out does not start at"):
        dequantise(packed, "Q4_0", out=shifted(torch.zeros(4, 256, device="cuda").half()), policy=on(None))
