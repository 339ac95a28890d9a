"""dequantise without a GPU: every type against the gguf package and against blocks made by hand, sizes, operands."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf import dequantize as by_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from bed.depth import examples
from fusestream.kernels_cuda import LEDGER, OPS, KernelPolicy, KernelRefused, dequantise, dequantise_rows
from fusestream.kernels_cuda.ops.quant.packed_blocks import BLOCK_TYPES, IQ4_VALUES, unpacked

OFF = KernelPolicy.of("off")
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


@settings(max_examples=examples(60), deadline=None)
@given(
    encoding=st.sampled_from(ENCODINGS),
    rows=st.integers(1, 4),
    blocks=st.integers(1, 7),
    into=st.booleans(),
    policy=st.sampled_from([KernelPolicy(), OFF]),
    seed=st.integers(0, 2**31),
)
def test_the_same_bits_as_the_package(encoding, rows, blocks, into, policy, seed):
    packed = blocks_of(encoding, rows, blocks, seed=seed)
    out = torch.full((rows, blocks * BLOCK_TYPES[encoding].elements), 7.0).half() if into else None
    got = dequantise(packed, encoding, out=out, policy=policy)
    assert out is None or got is out
    assert got.is_contiguous()
    assert_same_bits(got, gguf_half(packed, encoding))


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


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_rows_of_a_table(encoding):
    table = blocks_of(encoding, 9, 3)
    index = torch.tensor([[8, 0, 3], [3, 3, 1]])
    for policy in (KernelPolicy(), OFF):
        got = dequantise_rows(table, encoding, index, policy=policy)
        assert_same_bits(got, gguf_half(table, encoding)[index])
        assert dequantise_rows(table, encoding, index[:0], policy=policy).shape == (0, 3, got.shape[-1])
        with pytest.raises(IndexError):
            dequantise_rows(table, encoding, torch.tensor([9]), policy=policy)


@pytest.mark.parametrize("shape", [(0,), (0, 144), (3, 0), (2, 3, 288)])
def test_empty_and_any_rank(shape):
    packed = torch.randint(256, shape, dtype=torch.uint8)
    got = dequantise(packed, "Q4_K")
    assert got.shape == (*shape[:-1], shape[-1] // 144 * 256)
    out = torch.empty_like(got)
    assert dequantise(packed, "Q4_K", out=out) is out
    assert_same_bits(out, got)


def test_float64_is_exact():
    """The oracle of products: no rounding at all, so the fp32 values are its roundings."""
    for encoding in ENCODINGS:
        packed = blocks_of(encoding, 50)
        assert torch.equal(
            unpacked(packed, encoding, torch.float64).float().nan_to_num(), unpacked(packed, encoding).nan_to_num()
        )


@pytest.mark.parametrize(
    ("packed", "encoding", "out", "message"),
    [
        (torch.zeros(144, dtype=torch.uint8), "Q9_K", None, "encoding is 'Q9_K', expected one of Q4_0"),
        (
            torch.zeros(145, dtype=torch.uint8),
            "Q4_K",
            None,
            r"packed: \[145\] has no rows of Q4_K blocks, of 144 bytes",
        ),
        (torch.zeros(3, 72, dtype=torch.uint8), "Q4_K", None, r"packed: \[3, 72\] has no rows"),
        (torch.zeros((), dtype=torch.uint8), "Q4_K", None, r"packed: \[\] has no rows"),
        (torch.zeros(144, dtype=torch.int8), "Q4_K", None, "packed: int8 .* is not uint8"),
        (torch.zeros(144, dtype=torch.uint8), "Q4_K", torch.zeros(256), "out: torch.float32 .* cannot take"),
        (torch.zeros(144, dtype=torch.uint8), "Q4_K", torch.zeros(1, 256).half(), r"out: .* cannot take \[256\]"),
    ],
)
def test_wrong_operands_are_named(packed, encoding, out, message):
    for policy in (KernelPolicy(), OFF):
        with pytest.raises(ValueError, match=message):
            dequantise(packed, encoding, out=out, policy=policy)


def test_rows_are_not_counted_from_the_end():
    with pytest.raises(IndexError, match="index -2 is not in a table of 3 rows"):
        dequantise_rows(blocks_of("Q4_K", 3, 1), "Q4_K", torch.tensor([0, -2]))


def test_wrong_tables_are_named():
    table = torch.zeros(2, 144, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"packed: \[144\] is not a table"):
        dequantise_rows(table[0], "Q4_K", torch.tensor([0]))
    with pytest.raises(ValueError, match=r"index: int32 \[1\] is not int64"):
        dequantise_rows(table, "Q4_K", torch.tensor([0], dtype=torch.int32))


def test_out_needs_a_place_of_its_own():
    room = torch.zeros(1024, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"out: .* overlaps packed"):
        dequantise(room[:144], "Q4_K", out=room[:512].view(torch.float16))


def test_modes():
    packed = blocks_of("Q6_K", 4)
    LEDGER.clear()
    OPS["dequantise"].forget()
    dequantise(packed, "Q6_K")
    assert [(r.op, r.reason) for r in LEDGER.refusals] == [("dequantise", "tensor is on the CPU")]
    for out in (None, torch.empty(1024).half()):
        with pytest.raises(KernelRefused, match="on the CPU"):
            dequantise(packed, "Q6_K", out=out, policy=KernelPolicy.of("on"))


def test_compile_and_registration():
    packed, index = blocks_of("Q4_K", 4, 2, seed=3), torch.tensor([1, 3])

    def load(packed, index, out):
        dequantise(packed, "Q4_K", out=out)
        return out[index] + dequantise(packed, "Q4_K")[index] + dequantise_rows(packed, "Q4_K", index)

    compiled = torch.compile(load, fullgraph=True, backend="aot_eager")
    got = [run(packed, index, torch.empty(4, 512).half()) for run in (compiled, load)]
    torch.testing.assert_close(*got, rtol=0, atol=0, equal_nan=True)
    token = KernelPolicy().token
    torch.library.opcheck(OPS["dequantise"].traced, (packed, "Q4_K", token))
    torch.library.opcheck(OPS["dequantise_into"].traced, (packed, torch.empty(4, 512).half(), "Q4_K", token))
    torch.library.opcheck(OPS["dequantise_rows"].traced, (packed, index, "Q4_K", token))
