"""How stock's blocks are read: activations by what they make of numbers, sizes off the modules, whatever other nodes put there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comfy.clip_model
import comfy.ops
import pytest
import torch
from comfy.text_encoders import qwen35, qwen_vl, t5
from torch.nn import functional

from fusestream.fusion.base.subclassing import mix
from fusestream.fusion.text.encoder.described import described, gate_of

OPERATIONS = comfy.ops.manual_cast
NAMED: Any = {"device": "meta", "dtype": torch.float16}
KNOWN = [*t5.activations.items(), *comfy.clip_model.ACTIVATIONS.items()]


@pytest.mark.parametrize(("name", "function"), KNOWN, ids=[name for name, _ in KNOWN])
def test_every_activation_of_stocks_is_known(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    gate, x = gate_of(function), torch.linspace(-12, 12, 1001)
    assert gate is not None and torch.allclose(gate.function(x), function(x), atol=1e-6)
    assert (gate.name, gate.quick) == {
        "gelu_pytorch_tanh": ("gelu_tanh", False), "relu": ("relu", False), "gelu": ("gelu", False), "quick_gelu": ("none", True),
    }[name]  # fmt: skip


@pytest.mark.parametrize(
    "function",
    [
        functional.relu6,
        functional.leaky_relu,
        lambda x: x,
        lambda x: functional.gelu(x).clamp(max=100),
        lambda x: 1.001 * functional.gelu(x),
        lambda x: x * torch.sigmoid(1.7 * x),
    ],
)
def test_another_is_not(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert gate_of(function) is None


class Mixin:
    """As `fuse` mixes one in."""


BLOCKS = {
    "T5": (lambda: t5.T5Block(96, 128, 160, "relu", False, 2, True, operations=OPERATIONS, **NAMED), (2, 64, 1.0), 1, 3),
    "T5, gated": (
        lambda: t5.T5Block(96, 128, 160, "gelu_pytorch_tanh", True, 2, False, operations=OPERATIONS, **NAMED),
        (2, 64, 1.0), 2, 3,
    ),
    "CLIP": (
        lambda: comfy.clip_model.CLIPLayer(144, 2, 160, "quick_gelu", operations=OPERATIONS, **NAMED),
        (2, 72, 72**-0.5), 1, 3,
    ),
    "Qwen3-VL": (lambda: qwen35.Qwen35VisionBlock(144, 2, 160, ops=OPERATIONS, **NAMED), (2, 72, 72**-0.5), 1, 1),
    "Qwen2.5-VL": (lambda: qwen_vl.VisionBlock(160, 84, 2, ops=OPERATIONS, **NAMED), (2, 80, 80**-0.5), 2, 1),
}  # fmt: skip


@pytest.mark.parametrize(("build", "sizes", "inner", "matrices"), BLOCKS.values(), ids=BLOCKS)
def test_sizes_of_every_block(build: Any, sizes: Any, inner: int, matrices: int) -> None:
    block = build()
    for _ in range(2):
        found = described(block)
        assert (found.heads, found.head, found.scale) == sizes and found.obstacle is None
        assert (len(found.inner), len(found.qkv)) == (inner, matrices)
        mix(block, Mixin)
    another = OPERATIONS.Linear(8, 8, device="meta")
    name = next(name for name, module in block.named_modules() if module is found.outer)
    block.set_submodule(name, another)
    assert described(block).outer is another, "what another node puts there counts"
