"""dequantise without a GPU: every type against the gguf package and against blocks made by hand."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf import dequantize as by_gguf

from fusestream.kernels_cuda import dequantise
from fusestream.kernels_cuda.ops.quant.packed_blocks import BLOCK_TYPES, IQ4_VALUES, unpacked

ENCODINGS = list(BLOCK_TYPES)


def blocks_of(encoding, *shape, seed=0):
    """Any bytes at all: scales that are Inf, NaN and denormal among them."""
    make = torch.Generator().manual_seed(seed)
    return torch.randint(256, (*shape[:-1], shape[-1] * BLOCK_TYPES[encoding].bytes), generator=make, dtype=torch.uint8)


def gguf_half(packed, encoding):
    with np.errstate(all="ignore"):
        return torch.from_numpy(by_gguf(packed.numpy(), GGMLQuantizationType[encoding]).astype(np.float16))


def assert_same_bits(got, want):
    assert got.dtype is want.dtype is torch.float16 and got.shape == want.shape
    assert torch.equal(got.isnan(), want.isnan())
    known = ~want.isnan()
    assert torch.equal(got[known].view(torch.int16), want[known].view(torch.int16))


def half(value):
    return struct.pack("<e", value)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_sizes_are_those_of_the_package(encoding):
    kind = BLOCK_TYPES[encoding]
    assert (kind.elements, kind.bytes) == GGML_QUANT_SIZES[GGMLQuantizationType[encoding]]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_type_at_many_blocks(encoding):
    packed = blocks_of(encoding, 501)
    assert_same_bits(dequantise(packed, encoding), gguf_half(packed, encoding))


@pytest.mark.parametrize("encoding", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_the_package_quantised(encoding):
    """Real weights: every value is back within half a step of its block."""
    weights = torch.randn(8, 256) * 0.02
    packed = by_gguf_quantised(weights, encoding)
    got = dequantise(packed, encoding)
    assert_same_bits(got, gguf_half(packed, encoding))
    steps = {"Q8_0": 127, "Q5_0": 16, "Q5_1": 15, "Q4_0": 8, "Q4_1": 7}[encoding]
    largest = weights.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True)
    error = (got.float() - weights).unflatten(1, (-1, 32)).abs()
    assert (error <= largest / steps * 1.01).all() and error.max() > 0


def by_gguf_quantised(weights, encoding):
    from gguf import quantize

    return torch.from_numpy(quantize(weights.numpy(), GGMLQuantizationType[encoding]))


def values(encoding, data):
    return dequantise(torch.tensor(list(data), dtype=torch.uint8), encoding).tolist()


def test_nibbles_by_hand():
    """Low nibbles are the first sixteen elements, high ones the others."""
    nibbles = bytes(i | (15 - i) << 4 for i in range(16))
    both = [*range(16), *range(15, -1, -1)]
    assert values("Q4_0", half(0.5) + nibbles) == [0.5 * (q - 8) for q in both]
    assert values("Q4_1", half(0.5) + half(-3) + nibbles) == [0.5 * q - 3 for q in both]
    assert values("IQ4_NL", half(2) + nibbles) == [2 * IQ4_VALUES[q] for q in both]
    fifth = struct.pack("<I", 0x8000_0001)  # of the first element and of the last
    five = [both[0] + 16, *both[1:-1], both[-1] + 16]
    assert values("Q5_0", half(0.25) + fifth + nibbles) == [0.25 * (q - 16) for q in five]
    assert values("Q5_1", half(0.25) + half(1) + fifth + nibbles) == [0.25 * q + 1 for q in five]
    assert values("Q8_0", half(0.125) + bytes(range(112, 144))) == [
        0.125 * (q - 256 * (q > 127)) for q in range(112, 144)
    ]


def test_groups_by_hand():
    """K types: which scale, which min and which bits an element has. Group 7 alone is not zero."""
    scales = bytes([0, 0, 0, 0x40, 0, 0, 0, 0x80, 0, 0, 0, 0x35])  # scale 5 + 16, min 3 + 32
    quants = bytes(96) + bytes([0xA1] * 32)
    want = [0.0] * 224 + [0.5 * 21 * 10 - 0.25 * 35] * 32
    assert values("Q4_K", half(0.5) + half(0.25) + scales + quants) == want
    high = bytes([0x80] * 32)
    want = [0.0] * 224 + [0.5 * 21 * 26 - 0.25 * 35] * 32
    assert values("Q5_K", half(0.5) + half(0.25) + scales + high + quants) == want
    # The last 16 elements: high nibble of the last low bytes, upper two bits of the last high ones.
    low, high = bytes(112) + bytes([0x70] * 16), bytes(48) + bytes([0xC0] * 16)
    want = [0.0] * 240 + [0.5 * -3 * (0x37 - 32)] * 16
    assert values("Q6_K", low + high + bytes(15) + b"\xfd" + half(0.5)) == want
    two = bytes(48) + bytes([0xC0] * 16)
    want = [0.0] * 240 + [0.5 * 9 * 3 - 0.25 * 4] * 16
    assert values("Q2_K", bytes(15) + b"\x49" + two + half(0.5) + half(0.25)) == want


def test_overflow_is_infinite_as_in_numpy():
    assert values("Q8_0", half(60000) + b"\x02" * 32) == [torch.inf] * 32


def test_float64_is_exact():
    """The oracle of products: no rounding at all, so the fp32 values are its roundings."""
    for encoding in ENCODINGS:
        packed = blocks_of(encoding, 50)
        assert torch.equal(
            unpacked(packed, encoding, torch.float64).float().nan_to_num(), unpacked(packed, encoding).nan_to_num()
        )
