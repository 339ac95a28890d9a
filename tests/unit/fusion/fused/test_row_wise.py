"""A module is row-wise if its own code makes each row of one row alone, whatever it is called."""

from __future__ import annotations

from typing import Any

import comfy.ldm.minimax.model as minimax
import comfy.ops
import pytest
import torch
from comfy.ldm.lumina.model import FeedForward as Clamped
from comfy.ldm.modules.attention import FeedForward as Gated
from torch import Tensor, nn
from torch.nn import functional

from fusestream.fusion.fused.row_wise import Rows, rows_of

OPS: Any = comfy.ops.manual_cast
STOCK: dict[str, Any] = {"operations": OPS}


class Fed(nn.Module):
    """A feed-forward of 8 elements and 32 hidden ones: what is between is `inner`'s."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.first, self.second, self.inner = OPS.Linear(8, 32), OPS.Linear(32, 8), inner
        self.norm, self.parts = OPS.LayerNorm(32), nn.ModuleList([nn.GELU(), nn.Dropout(0.1).eval()])

    def forward(self, x: Tensor) -> Any:
        return self.second(self.inner(self, self.first(x)))


def in_turn(module: Any, x: Tensor) -> Tensor:
    for part in module.parts:
        x = part(x)
    return x


def by_type(module: Any, x: Tensor) -> Tensor:
    return torch.tanh(x) * 2 if x.dtype == torch.float16 else x


ROW_WISE: dict[str, tuple[Any, int]] = {
    "nothing": (lambda module, x: x, 32),
    "activation": (lambda module, x: functional.gelu(x, approximate="tanh"), 64),
    "in place": (lambda module, x: functional.silu(x, inplace=True).mul_(2), 32),
    "operators": (lambda module, x: -x * torch.sigmoid(x) + 1 / (x**2 + 1), 32 * 8),
    "norm": (lambda module, x: module.norm(x), 64),
    "modules": (in_turn, 64),
    "by type": (by_type, 96),
}


@pytest.mark.parametrize("name", ROW_WISE)
def test_what_is_row_wise(name: str) -> None:
    inner, between = ROW_WISE[name]
    assert rows_of(Fed(inner)) == Rows(out=8, widest=32, between=between)


def swallowed(module: Any, x: Tensor) -> Tensor:
    """As stock's attention tries one function after another."""
    try:
        return x.cumsum(dim=-2)
    except Exception:
        return x


def kept(module: Any, x: Tensor) -> Tensor:
    module.last = x
    return x


NOT_ROW_WISE: dict[str, Any] = {
    "softmax": lambda module, x: x.softmax(dim=-2),
    "mean": lambda module, x: x - x.mean(dim=1, keepdim=True),
    "sums": lambda module, x: torch.cumsum(x, dim=1),
    "turned": lambda module, x: x.transpose(0, 1),
    "product of rows": lambda module, x: x @ x.mT @ x,
    "rows": lambda module, x: x[:, 1:],
    "number of rows": lambda module, x: x * x.shape[1],
    "question of rows": lambda module, x: x if x.shape[1] > 3 else x * 2,
    "question of numbers": lambda module, x: x if x.max() > 3 else x * 2,
    "parts of rows": lambda module, x: x.chunk(2, dim=1)[0],
    "table": lambda module, x: x + torch.ones(5, 32),
    "noise": lambda module, x: functional.dropout(x, training=True),
    "one way only": lambda module, x: x * 2 if x.dtype == torch.float16 else x.roll(1, 1),
    "the other way only": lambda module, x: x.roll(1, 1) if x.dtype == torch.float16 else x,
    "question without a trace": lambda module, x: x.roll(1, 1) if x.dtype is torch.float16 else x,
    "swallowed": swallowed,
    "kept": kept,
}


@pytest.mark.parametrize("name", NOT_ROW_WISE)
def test_what_is_not(name: str) -> None:
    assert rows_of(Fed(NOT_ROW_WISE[name])) is None


def test_nothing_is_kept_from_the_proof() -> None:
    """A module's own attributes are those from before, and nothing of another thread was touched."""
    module, called = Fed(kept), nn.Module.__call__
    before = dict(module.__dict__)
    rows_of(module)
    assert module.__dict__ == before and nn.Module.__call__ is called


def test_gates() -> None:
    """Of two halves of a row, of two products, and in a function of stock's that takes the product itself."""
    assert rows_of(Gated(8, glu=True, **STOCK).eval()) == Rows(out=8, widest=64, between=64 + 32 + 32)
    assert rows_of(minimax.MLP(8, 32, **STOCK)) == Rows(out=8, widest=64, between=64 + 32)
    clamped = Clamped(8, 32, 1, None, operation_settings=STOCK)
    assert rows_of(clamped) == Rows(out=8, widest=32, between=5 * 32), "as in fp16"


def test_weights_may_be_anywhere_and_of_any_storage() -> None:
    """They are not looked at."""
    module = nn.Sequential(OPS.Linear(8, 32, device="meta"), nn.SiLU(), OPS.Linear(32, 8, device="meta"))
    assert rows_of(module) == Rows(8, 32, 64)


def test_a_module_with_weights_of_its_own_or_with_hooks_is_not_followed() -> None:
    for change in (
        lambda module: module.register_parameter("scale", nn.Parameter(torch.ones(1))),
        lambda module: module.register_buffer("table", torch.ones(5, 32)),
        lambda module: module.register_forward_hook(lambda *_: None),
        lambda module: setattr(module.parts[0], "forward", lambda x: x.flip(1)),
        lambda module: setattr(module, "norm", OPS.LayerNorm((4, 32))),
    ):
        module = Fed(ROW_WISE["norm"][0])
        assert rows_of(module) is not None
        change(module)
        assert rows_of(module) is None


def test_a_call_takes_one_tensor() -> None:
    class Modulated(Fed):
        def forward(self, x: Tensor, scale: Tensor) -> Any:  # type: ignore[override]
            return super().forward(x * scale)

    class Two(Fed):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x

    assert rows_of(Modulated(ROW_WISE["nothing"][0])) is None
    assert rows_of(Two(ROW_WISE["nothing"][0])) is None
