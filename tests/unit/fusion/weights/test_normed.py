"""A norm writes what the weights behind it are multiplied with: halves, or integers of their rotation and size."""

from __future__ import annotations

from typing import Any

import comfy.ops
import int8_files
import pytest
import torch
from torch import Tensor, nn

from fusestream.fusion.weights import normed, products
from fusestream.fusion.weights.normed import Normed, kept_weights
from fusestream.fusion.weights.products import Part, feed_forward, gated_feed_forward, product, product_in_parts
from fusestream.kernels_cuda import (
    IntegerMatrix,
    KernelPolicy,
    linear_int8,
    mlp,
    norm_modulate,
    norm_to_int8,
)
from fusestream.kernels_cuda.registry import Op

pytestmark = pytest.mark.usefixtures("as_comfyui_runs")
HALF = torch.float16
PRECISE, TURBO = KernelPolicy(precision="precise"), KernelPolicy.of(precision="turbo")
EPS = 1e-6
K, N = 256, 48
OPS: Any = comfy.ops.mixed_precision_ops({}, HALF)
TURNED, PLAIN = int8_files.Kind(True, 64), int8_files.Kind(False)


half = int8_files.drawn


def of_file(kind: int8_files.Kind, n: int = N, k: int = K, seed: int = 1, *, bias: bool = True) -> Any:
    return int8_files.linear_of_file(kind, n, k, seed=seed, bias=bias)


def of_halves(n: int = N, seed: int = 1) -> Any:
    return int8_files.linear_of_numbers(n, K, seed=seed)


def a_norm(batch: int = 2, tokens: int = 9) -> Normed:
    """Of rows whose modulation belongs to a frame of three tokens."""
    rows = [half(batch, tokens // 3, 6, K, seed=5)[:, :, i] for i in range(2)]
    return Normed(half(batch, tokens, K) * 3 + 1, *rows, eps=EPS)


def halves_of(x: Normed) -> Tensor:
    return norm_modulate(x.x, x.scale, x.shift, x.weight, x.bias, eps=x.eps, kind=x.kind, out_dtype=HALF)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that compute or round a norm, as they are called."""
    ran: list[str] = []
    run = Op.run

    def noted(op: Op, *given: Any) -> Any:
        if op.name.startswith(("norm_", "rows_")):
            ran.append(op.name)
        return run(op, *given)

    monkeypatch.setattr(Op, "run", noted)
    return ran


@pytest.mark.parametrize("policy", [PRECISE, TURBO], ids=lambda policy: policy.precision)
def test_weights_of_halves_get_halves(policy: KernelPolicy, asked: list[str]) -> None:
    x, several = a_norm(), [of_halves(), of_halves(seed=3)]
    wanted = [product(halves_of(x), one, policy) for one in several]
    asked.clear()
    found = [product(x, several[0], policy), *products.products(x, several, policy)]
    assert asked == ["norm_modulate"] * 2
    assert all(torch.equal(a, b) for a, b in zip(found, [wanted[0], *wanted], strict=True))


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_a_weight_of_integers_gets_what_the_norm_has_rounded(dtype: torch.dtype, asked: list[str]) -> None:
    own = of_file(TURNED)
    x = Normed((half(2, 9, K) * 3 + 1).to(dtype), half(2, 1, K, seed=3), eps=EPS, kind="rms")
    found = product(x, own, TURBO)
    assert asked == ["norm_to_int8"]
    rows = norm_to_int8(x.x, x.scale, eps=EPS, kind="rms", rotation=64)
    scales = own.weight._params.scale.reshape(-1)
    assert torch.equal(found, linear_int8(rows, own.weight._qdata, scales, own.bias))
    from_halves = product(halves_of(x), own, TURBO)
    assert 0 < (found - from_halves).double().norm() / from_halves.double().norm() < 0.005


def test_each_rounding_is_written_once(asked: list[str]) -> None:
    kinds = (TURNED, PLAIN, TURNED, int8_files.KINDS["convrot_w4a4"])
    several, x = [of_file(kind, seed=2 * i) for i, kind in enumerate(kinds)], a_norm()
    wanted = [product(x, one, TURBO) for one in several]
    asked.clear()
    found = products.products(x, several, TURBO)
    assert asked == ["norm_to_int8"] * 2 + ["norm_to_int4"]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_beside_a_weight_of_halves_all_come_from_halves(asked: list[str]) -> None:
    some, x = [of_file(TURNED), of_halves()], a_norm()
    wanted = products.products(halves_of(x), some, TURBO)
    asked.clear()
    found = products.products(x, some, TURBO)
    assert asked == ["norm_modulate", "rows_to_int8"]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_two_of_a_pair_that_want_it_differently_get_halves(asked: list[str]) -> None:
    x, last = a_norm(), of_file(PLAIN, n=N, k=N, bias=False)
    gate, alike, unlike = (
        of_file(kind, seed=seed, bias=False) for kind, seed in ((TURNED, 1), (TURNED, 3), (PLAIN, 5))
    )
    gated_feed_forward(x, gate, alike, last, TURBO)
    assert asked == ["norm_to_int8"]
    wanted = gated_feed_forward(halves_of(x), gate, unlike, last, TURBO)
    asked.clear()
    assert torch.equal(gated_feed_forward(x, gate, unlike, last, TURBO), wanted)
    assert asked[0] == "norm_modulate" and "norm_to_int8" not in asked


@pytest.mark.parametrize("shape", [(1, 1536), (3, 300)], ids=str)
def test_of_pieces_the_norm_is_written_whole(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    """Pieces of tokens, or of the batch: the same numbers, and the residual's place may be the norm's input."""
    x, first, second = a_norm(*shape), of_file(TURNED, n=96), of_file(PLAIN, n=K, k=96, seed=5)
    whole = torch.empty(*shape, 96, dtype=HALF)
    product_in_parts(x, first, TURBO, [Part(whole[..., :48]), Part(whole[..., 48:], "gelu_tanh")])
    wanted = feed_forward(x, first, second, TURBO, residual=x.x)
    monkeypatch.setattr(products, "CHUNK_BYTES", 1)
    asked.clear()
    cut = torch.empty_like(whole)
    product_in_parts(x, first, TURBO, [Part(cut[..., :48]), Part(cut[..., 48:], "gelu_tanh")])
    assert torch.equal(cut, whole) and asked == ["norm_to_int8"]
    found = feed_forward(x, first, second, TURBO, residual=x.x, out=x.x, pieces=1)
    assert torch.equal(found, wanted) and found.data_ptr() == x.x.data_ptr()
    assert asked == ["norm_to_int8"] * 2


def test_a_feed_forward_of_rounded_rows_without_a_place() -> None:
    """In chunks: the type is that of halves."""
    x, matrix = a_norm(1, 1536), IntegerMatrix(torch.ones(32, K, dtype=torch.int8), torch.ones(1) / K, 0)
    rows, out = norm_to_int8(x.x, eps=EPS), half(16, 32)
    found = mlp(rows, matrix, out, chunk_bytes=1)
    assert found.dtype is HALF and torch.equal(found, mlp(rows, matrix, out))
    assert torch.equal(mlp(type(rows)(*(t[0] for t in rows)), matrix, out, chunk_bytes=1), found[0])


def test_what_stands_for_a_result_takes_no_room() -> None:
    x = a_norm()
    wide = Normed(x.x.float(), eps=EPS)
    assert x.like is x.x and wide.like.shape == x.x.shape and wide.like.dtype is HALF
    assert wide.like.untyped_storage().nbytes() == 2


def test_a_norms_weights_outlast_the_buffer_they_were_brought_in(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = comfy.ops.disable_weight_init.LayerNorm(K, dtype=HALF)
    norm.weight, norm.bias = (nn.Parameter(half(K, seed=seed), requires_grad=False) for seed in (1, 2))
    x = half(2, 9, K).float()
    assert all(own is there for own, there in zip(kept_weights(norm, x, TURBO), (norm.weight, norm.bias), strict=True))
    monkeypatch.setattr(normed, "is_here", lambda *_: False)
    for own, there in zip(kept_weights(norm, x, TURBO), (norm.weight, norm.bias), strict=True):
        assert own is not None and torch.equal(own, there) and own.data_ptr() != there.data_ptr()
    norm.weight = norm.bias = None
    assert kept_weights(norm, x, TURBO) == (None, None)
