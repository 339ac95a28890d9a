"""Plans made of launches: which tensor's address goes into which pointer, and what a plan returns."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from fusestream.kernels_cuda import launcher
from fusestream.kernels_cuda.build.matrix import SOURCES
from fusestream.kernels_cuda.errors import KernelError
from fusestream.kernels_cuda.launcher import Kernel, Launch, Pointer, parameter_struct
from fusestream.kernels_cuda.ops.attention import attention_products
from fusestream.kernels_cuda.ops.conv import conv_torch
from fusestream.kernels_cuda.ops.norm import group_norm, group_norm_cut
from fusestream.kernels_cuda.ops.quant import codes_to_half, codes_to_int8, int8_to_half
from fusestream.kernels_cuda.plans import floats, plan_of, strides

Params = parameter_struct("Params", (Pointer, "x weight bias sums out"), (ctypes.c_int, "rows"))


class Card:
    """Keeps the pointers of what it is asked to launch."""

    index, name = 0, "fake"

    def __init__(self) -> None:
        self.calls, self.params, self.seen = self, dict[int, Any](), list[list[int]]()

    def allow_shared_bytes(self, *_: object) -> None:
        pass

    def check(self, status: int, *_: object) -> None:
        assert status == 0

    def launch_kernel(self, _config: object, _function: object, slots: Any, _: object) -> int:
        params = self.params[slots[0]]
        self.seen.append([getattr(params, name) for name in ("x", "weight", "bias", "sums", "out")])
        return 0

    def launch(self, params: ctypes.Structure | None = None) -> Launch:
        params = params or Params()
        self.params[ctypes.addressof(params)] = params
        kernel = Kernel(self, "unit", "name", ctypes.c_void_p(), {"parameters": ctypes.sizeof(params)})  # type: ignore[arg-type]
        return kernel.prepare(params, grid=(1, 1, 1), block=32, shape="")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    monkeypatch.setattr(launcher, "_stream_of", lambda _: 0)
    monkeypatch.setattr(launcher, "_current_device", lambda: 0)
    return Card()


def some(number: int = 1) -> list[Tensor]:
    return [torch.ones(4) for _ in range(number)]


def at(*tensors: Tensor | None) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in tensors]


def test_what_is_absent_stays_null_and_a_result_is_made(card: Card) -> None:
    x, weight = some(2)
    made: list[Tensor] = []

    def make() -> Tensor:
        made.extend(some())
        return made[-1]

    plan = plan_of(card.launch(), "x weight bias", (x, weight, None), out=make)
    other = some()[0]
    assert plan(x, weight, None) is made[0] and plan(other, weight, None) is made[1]
    assert card.seen == [at(x, weight, None, None, made[0]), at(other, weight, None, None, made[1])]


def test_a_result_among_the_operands_is_written_where_it_lies(card: Card) -> None:
    x, out = some(2)
    assert plan_of(card.launch(), "out x", (out, x), out=some)(out, x) is None  # type: ignore[arg-type]
    assert plan_of(card.launch(), "x=out - bias", (x, x, out))(x, x, out) is None
    assert card.seen == [at(x, None, None, None, out), at(x, None, out, None, x)]


def test_fewer_names_than_tensors_and_more(card: Card) -> None:
    x, out = some(2)
    plan_of(card.launch(), "x", (x, None, None), out=lambda: out)(x, None, None)
    plan_of(card.launch(), "x weight out", (x, None), out=lambda: out)(x, None)
    assert card.seen == [at(x, None, None, None, out)] * 2


@pytest.mark.parametrize("shared", [False, True])
def test_several_launches_have_the_same_pointers(card: Card, shared: bool) -> None:
    x, sums, out = some(3)
    params = Params() if shared else None
    launches = [card.launch(params) for _ in range(3)]
    plan = plan_of(launches, "x", (x,), scratch={"sums": lambda: sums}, out=lambda: out)
    assert plan(x) is out and card.seen == [at(x, None, None, sums, out)] * 3


def test_one_allocation_has_several_pointers(card: Card) -> None:
    x, sums, out = some(3)
    behind = {"bias": ("sums", 8), "weight": ("x", 4)}
    plan_of(card.launch(), "x", (x,), scratch={"sums": lambda: sums}, behind=behind, out=lambda: out)(x)
    assert card.seen == [[x.data_ptr(), x.data_ptr() + 4, sums.data_ptr() + 8, *at(sums, out)]]


def test_several_results_are_a_tuple_and_nothing_is_launched_of_nothing(card: Card) -> None:
    x, sums, out = some(3)
    assert plan_of(card.launch(), "x", (x,), sums=lambda: sums, out=lambda: out)(x) == (sums, out)
    assert plan_of((), "x", (x,), out=lambda: out)(x) is out
    assert plan_of((), "x out", (x, out), out=lambda: out)(x, out) is None
    assert card.seen == [at(x, None, None, sums, out)]


@pytest.mark.parametrize("count", range(1, 13))
def test_any_number_of_pointers(card: Card, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    names = [f"p{i}" for i in range(count)]
    many = parameter_struct("Many", (Pointer, " ".join(names)))
    params, seen, tensors = many(), [], some(count)
    monkeypatch.setattr(card, "launch_kernel", lambda *_: seen.append([getattr(params, name) for name in names]) or 0)
    plan_of(card.launch(params), " ".join(reversed(names)), tuple(tensors))(*tensors)
    assert seen == [at(*reversed(tensors))]


def test_a_name_that_is_no_pointer_is_found_out(card: Card) -> None:
    x = some()[0]
    with pytest.raises(KernelError, match="Params has no pointer rows, y"):
        plan_of(card.launch(), "y rows", (x, x))
    with pytest.raises(AttributeError):
        Params(row=1)


def test_fields_by_the_operands_names() -> None:
    x, bias = torch.ones(2, 1, 3).half(), torch.ones(3)
    assert floats(x=x, bias=bias, gate=None) == {"x_is_float": False, "bias_is_float": True, "gate_is_float": False}
    assert strides("batch token", x=x, gate=None) == {"x_batch": 3, "x_token": 3}
    assert strides("batch token -", used=True, x=x) == {"x_batch": 3, "x_token": 0}


@pytest.mark.parametrize(
    ("file", "numbers"),
    [
        (
            "codes_to_half",
            {
                "kThreads": codes_to_half.THREADS,
                "kRows": codes_to_half.TILE_ROWS,
                "kColumns": codes_to_half.TILE_COLUMNS,
            },
        ),
        (
            "codes_to_int8",
            {"kThreads": codes_to_int8.THREADS, "kAtOnce": codes_to_int8.AT_ONCE, "kChunk": codes_to_int8.CHUNK},
        ),
        ("conv_rest", {"kThreads": conv_torch.THREADS, "kHeld": conv_torch.HELD}),
        ("group_norm", {"kOnceThreads": group_norm_cut.ONCE_THREADS}),
        ("int8_to_half", {"kThreads": int8_to_half.CHUNK // 4, "kAtOnce": 4}),
        ("softmax_stripe", {"kThreads": attention_products.THREADS}),
    ],
)
def test_the_sources_say_the_same_numbers(file: str, numbers: dict[str, int]) -> None:
    source = (SOURCES / f"{file}.cu").read_text(encoding="utf-8")
    found = {name: int(number) for name, number in re.findall(r"constexpr int (k\w+) = (\d+);", source)}
    assert found | numbers == found
    for width, held in group_norm.ONCE_HELD.items() if file == "group_norm" else ():
        assert f"\nONCE({width}, {held})\n" in source
    if file == "softmax_stripe":
        assert found["kThreads"] * found["kQuads"] * 4 == attention_products.STRIPE
