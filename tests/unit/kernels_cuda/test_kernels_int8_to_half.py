"""int8_to_half without a GPU: the way there and back, stock's own library, what is refused."""

from __future__ import annotations

import pytest
import torch

from fusestream.kernels_cuda import KernelPolicy, KernelRefused, int8_to_half, rows_to_int8
from fusestream.kernels_cuda.build import matrix as sources
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.quant import int8_to_half as op
from fusestream.kernels_cuda.ops.quant.rotation import GROUPS

OFF = KernelPolicy.of("off")
ON = KernelPolicy.of("on")


def whole(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8)


@pytest.mark.parametrize("group", [0, *GROUPS])
def test_there_and_back(group):
    weight = torch.randn(64, 1024).half()
    back = int8_to_half(*rows_to_int8(weight, rotation=group), rotation=group)
    assert (back - weight).float().norm() / weight.float().norm() < 0.012


def test_stocks_own_library_agrees():
    eager = pytest.importorskip("comfy_kitchen.backends.eager.quantization")
    weight = torch.randn(64, 1024)
    for group in (64, 256):
        numbers, scales = eager.quantize_int8_convrot_weight(weight, group)
        want = eager.dequantize_int8_convrot_weight(numbers, scales, group)
        torch.testing.assert_close(int8_to_half(numbers, scales, rotation=group).float(), want, rtol=2**-11, atol=1e-5)
    numbers, scale = eager.quantize_int8_tensorwise(weight)
    assert torch.equal(int8_to_half(numbers, scale), eager.dequantize_int8_simple(numbers, scale).half())


@pytest.mark.parametrize("policy", [KernelPolicy(), OFF], ids=["reference", "stock"])
def test_what_halves_cannot_hold(policy):
    x = torch.tensor([[127, -128, 0, 1] * 2], dtype=torch.int8)
    assert int8_to_half(x, torch.tensor(1e4), policy=policy)[0, :4].tolist() == [65504, -65504, 0, 10000]
    found = int8_to_half(x, torch.tensor(torch.inf), policy=policy)[0, :4]
    assert found[0].isposinf() and found[1].isneginf() and found[2].isnan()
    assert int8_to_half(x, torch.tensor(torch.nan), policy=policy).isnan().all()


def test_every_obstacle_is_spoken():
    x, one = whole(4, 64), torch.ones(1)
    for tensors, words in (
        ((x.float(), one), "x is float32"),
        ((x, one.half()), "scale is float16"),
        ((whole(4, 12), one), "k is 12, the kernel takes multiples of 8"),
        ((whole(4, 72)[:, :64], one), "x is not contiguous"),
        ((whole(257)[1:].view(4, 64), one), "x is not contiguous, or does not start at a multiple of 8 bytes"),
        ((x, torch.ones(8)[::2]), "scale is not contiguous"),
        ((x, one, torch.zeros(4, 80).half()[:, :64]), "out is not contiguous"),
        ((torch.empty(2**18, 2**18, dtype=torch.int8, device="meta"), one), "elements are more than"),
    ):
        assert words in next(op.obstacles(Call("int8_to_half", tensors, (0,))), "nothing"), words
    assert next(op.obstacles(Call("int8_to_half", (x, one), (64,))), None) is None
    with pytest.raises(KernelRefused, match="tensor is on the CPU"):
        int8_to_half(x, one, policy=ON)


def test_numbers_of_the_source():
    source = (sources.SOURCES / "int8_to_half.cu").read_text(encoding="utf-8")
    threads, at_once = (
        int(source.split(f"constexpr int {name} = ")[1].split(";")[0]) for name in ("kThreads", "kAtOnce")
    )
    assert threads * at_once == op.CHUNK and threads == op.CHUNK // 4
