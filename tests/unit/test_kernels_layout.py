"""split_projection, concat_tokens and swap_heads without a GPU: the copies, the boxes the kernel walks, compile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusestream.kernels_cuda import (
    LEDGER,
    OPS,
    KernelPolicy,
    KernelRefused,
    concat_tokens,
    split_projection,
    swap_heads,
)
from fusestream.kernels_cuda.ops.boxes import Box, divisor

OFF = KernelPolicy.of("off")


@settings(max_examples=300, deadline=None)
@given(n=st.integers(0, 2**31 - 1), by=st.integers(1, 2**31 - 1), near=st.integers(-1, 1))
def test_a_division_is_a_multiplication(n, by, near):
    d = divisor(by)
    assert d.multiplier < 2**32
    for each in (n, min(max(n // by * by + near, 0), 2**31 - 1), 2**31 - 1):
        assert each * d.multiplier < 2**64
        assert each * d.multiplier >> (31 + d.shift) == each // by


def walk(box, unit, source, target):
    """What the kernel does, in Python."""
    part = box.part(unit)
    for index in range(part.count):
        row, column = divmod(index, part.units_per_row.value)
        ab, c = divmod(row, part.c.value)
        a, b = divmod(ab, part.b.value)
        for i in range(unit):
            to = a * part.to_a + b * part.to_b + c * part.to_c + column * unit + i
            target[to] = source[a * part.from_a + b * part.from_b + c * part.from_c + column * unit + i]


@settings(max_examples=30, deadline=None)
@given(sizes=st.tuples(*[st.integers(1, 4)] * 3), packs=st.booleans(), gap=st.integers(0, 1))
def test_a_box_is_walked_whole(sizes, packs, gap):
    width, unit = (16, 8) if packs else (3, 1)
    a, b, c = sizes
    x = torch.arange(a * c * b * (width + 8 * gap)).view(a, c, b, -1)
    box = Box(sizes, width, (x.stride(0), x.stride(2), x.stride(1)), (b * c * width, c * width, width))
    assert box.in_packs == packs
    target = [-1] * (box.rows * width)
    walk(box, unit, x.flatten().tolist(), target)
    assert target == x[..., :width].transpose(1, 2).flatten().tolist()


@pytest.mark.parametrize("policy", [KernelPolicy(), OFF])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int16])
def test_the_copies(dtype, policy):
    x = torch.randint(-99, 99, (2, 5, 24)).to(dtype)
    parts = split_projection(x, (8, 3, 13), policy=policy)
    assert [part.shape[-1] for part in parts] == [8, 3, 13]
    assert all(part.is_contiguous() for part in parts)
    assert torch.equal(torch.cat(parts, -1), x)
    assert torch.equal(concat_tokens(x, x[:, 1:3], policy=policy), torch.cat((x, x[:, 1:3]), 1))
    heads = x.view(2, 5, 3, 8)
    swapped = swap_heads(heads, policy=policy)
    assert swapped.is_contiguous()
    assert torch.equal(swapped, heads.transpose(1, 2))
    assert torch.equal(swap_heads(swapped, policy=policy), heads)


@pytest.mark.parametrize("policy", [KernelPolicy(), OFF])
def test_never_an_alias(policy):
    x = torch.randn(1, 1, 1, 8).half()
    assert swap_heads(x, policy=policy).data_ptr() != x.data_ptr()
    assert split_projection(x, (8,), policy=policy)[0].data_ptr() != x.data_ptr()
    assert concat_tokens(x[0], x[0, :, :0], policy=policy).data_ptr() != x.data_ptr()


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [((), (0,)), ((24,), (24,)), ((1, 2, 3, 4, 24), (24,)), ((5, 24), (8, 8)), ((5, 24), (24, 1)), ((0, 24), (8, 8))],
)
def test_a_projection_that_does_not_split(shape, sizes):
    for policy in (KernelPolicy(), OFF):
        with pytest.raises(ValueError, match=r"^split_projection: x: .* does not split into"):
            split_projection(torch.zeros(shape).half(), sizes, policy=policy)
    with pytest.raises(ValueError, match=r"^split_projection: sizes: "):
        OPS["split_projection"]((torch.zeros(5, 24).half(),), (12, -1, 12, -1), OFF)


@pytest.mark.parametrize(
    ("operand", "a", "b"),
    [
        ("a", (5, 24), (5, 24)),
        ("a", (1, 2, 5, 24), (2, 5, 24)),
        ("b", (2, 5, 24), (5, 24)),
        ("b", (2, 5, 24), (1, 5, 24)),
        ("b", (2, 5, 24), (2, 5, 1)),
        ("b", (2, 0, 24), (2, 5, 23)),
    ],
)
def test_tokens_that_do_not_join(operand, a, b):
    for policy in (KernelPolicy(), OFF):
        with pytest.raises(ValueError, match=rf"^concat_tokens: {operand}: "):
            concat_tokens(torch.zeros(a).half(), torch.zeros(b).half(), policy=policy)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4), (1, 2, 3, 4, 5)])
def test_heads_that_do_not_swap(shape):
    for policy in (KernelPolicy(), OFF):
        with pytest.raises(ValueError, match=r"^swap_heads: x: .* is not \[b, s, h, d\]"):
            swap_heads(torch.zeros(shape).half(), policy=policy)


def test_forms_that_serve():
    for policy in (KernelPolicy(), OFF):
        for lead in ((5,), (2, 5), (2, 3, 5), (0, 5)):
            parts = split_projection(torch.zeros(*lead, 24).half(), (8, 0, 16), policy=policy)
            assert [t.shape for t in parts] == [(*lead, 8), (*lead, 0), (*lead, 16)]
        x = torch.zeros(2, 5, 24).half()
        assert concat_tokens(x, x[:, :0], policy=policy).shape == (2, 5, 24)
        assert concat_tokens(x[:, :1], x, policy=policy).shape == (2, 6, 24)
        assert swap_heads(torch.zeros(2, 0, 3, 4).half(), policy=policy).shape == (2, 3, 0, 4)


def test_errors_and_empty():
    x = torch.zeros(2, 5, 24).half()
    for sizes in ((8, 8), (24, 1), (), (6, 6, 6, 3, 3), (25, -1)):
        with pytest.raises(ValueError, match=r"sizes|does not split"):
            split_projection(x, sizes)
    for other in (x[:1], x[..., :8], x.float(), x[0]):
        with pytest.raises(ValueError, match=r"b: .* is not float16 \[2, tokens, 24\]"):
            concat_tokens(x, other)
    with pytest.raises(ValueError, match=r"not \[b, s, h, d\]"):
        swap_heads(x)
    assert [t.shape for t in split_projection(x[:, :0], (8, 16))] == [(2, 0, 8), (2, 0, 16)]
    assert concat_tokens(x[:, :0], x[:, :0]).shape == (2, 0, 24)
    assert swap_heads(x[:0].view(0, 5, 3, 8)).shape == (0, 3, 5, 8)


def test_modes():
    x = torch.zeros(2, 5, 3, 8).half()
    LEDGER.clear()
    OPS["swap_heads"].forget()
    swap_heads(x)
    assert [(r.op, r.reason) for r in LEDGER.refusals] == [("swap_heads", "tensor is on the CPU")]
    with pytest.raises(KernelRefused, match="on the CPU"):
        split_projection(x, (8,), policy=KernelPolicy.of("on"))


def test_compile_and_registration():
    x = torch.randn(2, 5, 24).half()

    def block(x):
        q, k, v = split_projection(x, (8, 8, 8))
        return swap_heads(concat_tokens(q + k, v).view(2, 10, 2, 4))

    torch.testing.assert_close(torch.compile(block, fullgraph=True, backend="aot_eager")(x), block(x), rtol=0, atol=0)
    token = KernelPolicy().token
    torch.library.opcheck(OPS["split_projection"].traced, (x, 8, 16, -1, -1, token))
    torch.library.opcheck(OPS["concat_tokens"].traced, (x, x, token))
    torch.library.opcheck(OPS["swap_heads"].traced, (x.view(2, 5, 3, 8), token))
