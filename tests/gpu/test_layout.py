"""split_projection, concat_tokens and swap_heads on the GPU, in both instruction classes: bit for bit."""

from __future__ import annotations

import pytest
import torch
from gpu.support import on, padded_rows, shifted

from fusestream.kernels_cuda import KernelRefused, concat_tokens, split_projection, swap_heads

DTYPES = (torch.float16, torch.bfloat16)
WAYS = {
    "plain": lambda t: t,
    "shifted": lambda t: shifted(t, 3),
    "gaps": lambda t: padded_rows(t, 8),
    "odd gaps": lambda t: padded_rows(t, 3),
    "every other row": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "one batch for all": lambda t: t[:1].expand(t.shape),
}


def same(a, b):
    """The same bits: NaN equals NaN."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def random(*shape, dtype=torch.float16):
    """Every bit pattern, NaN and infinities included."""
    return torch.randint(-(2**15), 2**15, shape, device="cuda").to(torch.int16).view(dtype)


@pytest.mark.sanitize
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", [(64, 64, 64), (1536, 1536, 1536), (8, 16), (5, 3, 13, 1), (24,), (0, 8)])
def test_split(isa, sizes, way):
    for dtype in (torch.float16, torch.bfloat16):
        x = WAYS[way](random(2, 37, sum(sizes), dtype=dtype))
        parts = split_projection(x, sizes, policy=on(isa))
        assert len(parts) == len(sizes)
        for part, want in zip(parts, x.split(sizes, -1), strict=True):
            assert part.is_contiguous()
            assert same(part, want)


@pytest.mark.sanitize
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("s1", "s2", "d"), [(512, 1030, 128), (1, 3, 3072), (7, 5, 13), (0, 9, 64), (9, 0, 64), (3, 1, 1)]
)
def test_concat(isa, s1, s2, d, way):
    a, b = WAYS[way](random(2, s1, d)), WAYS[way](random(2, s2, d))
    for first, second in ((a, b), (a.contiguous(), b)):
        got = concat_tokens(first, second, policy=on(isa))
        assert got.is_contiguous()
        assert same(got, torch.cat((first, second), 1))


@pytest.mark.sanitize
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("b", "s", "h", "d"), [(2, 333, 12, 128), (1, 257, 3, 64), (3, 5, 7, 13), (1, 1, 1, 8), (2, 1, 9, 40)]
)
def test_swap(isa, b, s, h, d, way):
    for dtype in DTYPES:
        x = WAYS[way](random(b, s, h, d).view(dtype))
        got = swap_heads(x, policy=on(isa))
        assert got.is_contiguous()
        assert same(got, x.transpose(1, 2))
        assert same(swap_heads(got, policy=on(isa)), x)


def test_heads_of_a_packed_projection(isa):
    x = random(2, 77, 3 * 12 * 128)
    for part in x.split(12 * 128, -1):
        heads = part.unflatten(-1, (12, 128))
        assert same(swap_heads(heads, policy=on(isa)), heads.transpose(1, 2))


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 24 * 2**30, reason="needs 24 GB")
def test_products_beyond_32_bits():
    x = torch.zeros(1, 2**20 + 1, 3, 1032, device="cuda", dtype=torch.float16)
    x[:, -1] = random(3, 1032)
    got = swap_heads(x, policy=on(None))
    assert same(got[:, :, -1], x[:, -1])
    assert not got[:, :, :-1].any()
    del got
    apart = x.view(-1)[: 3 * 2**30 + 4096].as_strided((1, 3, 2, 128), (0, 2**30, 256, 1))
    apart[0, 2] = random(2, 128)
    assert same(swap_heads(apart, policy=on(None)), apart.transpose(1, 2))


def test_graph_capture_and_compile():
    x = random(2, 50, 3 * 64)

    def block(x):
        q, k, v = split_projection(x, (64, 64, 64), policy=on(None))
        return swap_heads(
            concat_tokens(q, concat_tokens(k, v, policy=on(None)), policy=on(None)).view(2, 150, 4, 16), policy=on(None)
        )

    want = block(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = block(x)
    got.fill_(7)
    graph.replay()
    assert same(got, want)
    assert same(torch.compile(block, fullgraph=True, backend="aot_eager")(x), want)


def test_refusals():
    x = random(2, 5, 3, 8)
    with pytest.raises(KernelRefused, match="elements are float32"):
        swap_heads(torch.zeros(2, 5, 3, 8, device="cuda"), policy=on(None))
    with pytest.raises(KernelRefused, match="elements of a row are 8 apart"):
        swap_heads(x.transpose(2, 3), policy=on(None))
