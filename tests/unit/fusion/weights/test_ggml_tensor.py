"""What newer ComfyUIs ask of a quantised tensor's layout, asked of a packed matrix of a GGUF file's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import pytest
import torch
from comfy.quant_ops import QuantizedLayout, QuantizedTensor
from torch.nn import functional

from fusestream.fusion.weights.ggml_tensor import PackedLayout, held, is_held
from fusestream.memory import Extent

ACTS = {"silu": functional.silu, "swiglu": lambda x: functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]}


@pytest.fixture(autouse=True)
def as_comfyui_runs() -> Iterator[None]:
    with torch.inference_mode():
        yield


def packed(rows: int = 8, columns: int = 64) -> tuple[Any, torch.Tensor]:
    """A matrix, and the numbers that it is."""
    numbers = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).numpy()
    raw = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.Q8_0)
    stored = torch.from_numpy(raw).flatten()
    weight = held(stored, Extent("w", "Q8_0", (rows, columns), 0, stored.numel()), torch.float32)
    return weight, torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0))


def linear_input_act(weight: Any, x: torch.Tensor, bias: Any, act: str) -> torch.Tensor:
    """As newer stock does it: by the layout, or where that has none, the activation and then the product."""
    if hasattr(QuantizedTensor, "linear_input_act"):
        out = weight.linear_input_act(x, bias, act)
    else:
        out = PackedLayout.linear_input_act(weight, x, bias, act, None, 0.0, None, None)
    return functional.linear(ACTS[act](x), weight, bias) if out is NotImplemented else out


def optimize_for_gemv(weight: Any, storage: torch.Tensor) -> Any:
    if hasattr(QuantizedTensor, "optimize_for_gemv"):
        return weight.optimize_for_gemv(storage)
    return PackedLayout.optimize_for_gemv(weight, storage)


def test_it_has_all_that_any_layout_has() -> None:
    lacking = set(dir(QuantizedLayout)) - set(dir(PackedLayout))
    assert not lacking
    assert PackedLayout.get_requirements()["fast_matmul_supported"] is False


@pytest.mark.parametrize("act", ACTS)
def test_an_activation_before_the_product(act: str) -> None:
    weight, numbers = packed()
    x, bias = torch.randn(3, 64 * (2 if act == "swiglu" else 1)), torch.randn(8)
    got = linear_input_act(weight, x, bias, act)
    torch.testing.assert_close(got, functional.linear(ACTS[act](x), numbers, bias), atol=2e-2, rtol=2e-3)


def test_a_weight_that_stays_is_multiplied_as_before() -> None:
    """Its bytes are no other way round afterwards."""
    weight, numbers = packed()
    before, x = weight._qdata.clone(), torch.randn(1, 64)
    wanted = functional.linear(x, weight)
    found = optimize_for_gemv(weight, weight._qdata)
    assert is_held(found) and torch.equal(found._qdata, before)
    assert torch.equal(functional.linear(x, found), wanted)
    torch.testing.assert_close(wanted, functional.linear(x, numbers), atol=2e-2, rtol=2e-3)


def test_it_goes_through_what_tensors_go_through() -> None:
    """Copies, types, and its parts by name."""
    weight, _ = packed()
    numbers = weight.dequantize()
    for other in (weight.clone(), weight.detach(), weight.to("cpu"), weight.contiguous()):
        assert is_held(other) and torch.equal(other.dequantize(), numbers)
    assert weight.to(torch.float16).dequantize().dtype is torch.float16
    target = torch.empty_like(weight)
    target.copy_(weight)
    assert torch.equal(target.dequantize(), numbers)
    names, told = weight.__tensor_flatten__()
    assert torch.equal(
        QuantizedTensor.__tensor_unflatten__({n: getattr(weight, n) for n in names}, told, None, None).dequantize(),
        numbers,
    )
