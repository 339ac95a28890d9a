"""What of a network streams: its repeated blocks, told from nothing but how it is built."""

from __future__ import annotations

from typing import Any

import comfy.ops
import pytest
import torch
from torch import nn

from fusestream.fusion.stream import blocks
from fusestream.fusion.stream.blocks import found_in, size
from fusestream.fusion.weights import patches

pytestmark = pytest.mark.usefixtures("as_comfyui_runs")


def matrix(elements: int) -> Any:
    """One of stock's operations with so many fp16 numbers, and no bytes."""
    return comfy.ops.manual_cast.Linear(elements, 1, bias=False, dtype=torch.float16, device="meta")


class Part(nn.Module):
    def __init__(self, elements: int) -> None:
        super().__init__()
        self.inner = matrix(elements)


class Block(nn.Module):
    """Of parts in a list, and a matrix of its own."""

    def __init__(self, own: int, *parts: int) -> None:
        super().__init__()
        self.own = matrix(own)
        self.parts = nn.ModuleList(Part(elements) for elements in parts)


class Plain(nn.Module):
    def __init__(self, elements: int) -> None:
        super().__init__()
        self.own = matrix(elements)


class Net(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def names(net: nn.Module) -> list[str]:
    return [name for name, _ in found_in(net)]


def many(count: int, elements: int) -> nn.ModuleList:
    return nn.ModuleList(Plain(elements) for _ in range(count))


def test_the_members_of_a_list_of_one_kind_stream_in_their_order() -> None:
    assert names(Net(first=matrix(10), layers=many(3, 100), last=matrix(10))) == ["layers.0", "layers.1", "layers.2"]


def test_a_single_one_or_a_list_of_different_ones_is_no_row_of_blocks() -> None:
    assert names(Net(layers=many(1, 100))) == []
    assert names(Net(layers=nn.ModuleList([Plain(100), Part(100)]))) == []
    assert names(Net(layers=nn.ModuleList([matrix(100), matrix(100)]))) == [], "operations are parts of blocks"


@pytest.mark.parametrize(("rest", "streams"), [(600, True), (601, False)])
def test_blocks_hold_a_quarter_of_the_bytes_or_nothing_streams(rest: int, streams: bool) -> None:
    assert bool(names(Net(layers=many(2, 100), rest=matrix(rest)))) is streams


@pytest.mark.parametrize(("own", "inner"), [(50, True), (51, False)])
def test_the_inner_of_two_kinds_streams_where_it_holds_nearly_all(own: int, inner: bool) -> None:
    """Four fifths: smaller pieces page better, and what stands around them stays."""
    net = Net(layers=nn.ModuleList(Block(own, 100, 100) for _ in range(2)))
    found = names(net)
    assert found == (
        ["layers.0.parts.0", "layers.0.parts.1", "layers.1.parts.0", "layers.1.parts.1"]
        if inner
        else ["layers.0", "layers.1"]
    )


@pytest.mark.parametrize(("elements", "streams"), [(10, True), (9, False)])
def test_a_kind_of_less_than_a_hundredth_is_not_worth_a_page(elements: int, streams: bool) -> None:
    rows = nn.ModuleList(Part(elements) for _ in range(2))
    found = names(Net(layers=many(2, 990), small=rows))
    assert found == ["layers.0", "layers.1"] + (["small.0", "small.1"] if streams else [])


def test_all_of_a_kind_stream_wherever_they_are() -> None:
    """A U-Net's middle is in no list. What is within a block goes with it."""
    assert names(Net(down=many(2, 100), middle=Plain(100))) == ["down.0", "down.1", "middle"]


def test_tables_are_no_weights_that_compute() -> None:
    table = comfy.ops.manual_cast.Embedding(1000, 10, dtype=torch.float16, device="meta")
    net = Net(words=table, layers=many(2, 100))
    assert size(net) == 2 * 100 * 2 and names(net) == ["layers.0", "layers.1"]


def test_a_block_without_bytes_is_none() -> None:
    assert names(Net(layers=nn.ModuleList([*many(2, 100), Plain(0)]))) == ["layers.0", "layers.1"]


def test_names_are_joined_where_there_are_any() -> None:
    assert blocks._joined("", "a", "", "b") == "a.b" and blocks._joined("") == ""


# ------------------------------------------------------------------------------------------------------------- patches


def test_patches_differ_where_one_is_not_the_very_same() -> None:
    """Not merely an equal one: a patch that is made once is handed on to clones."""
    a, b = ["a"], ["b"]
    same, other = {"k": (a, b)}, {"k": (a, ["b"])}
    assert not patches.differs(same, {"k": (a, b)}, "k") and not patches.differs(same, other, "none has it")
    assert patches.differs(same, other, "k") and patches.differs(same, {"k": (b, a)}, "k")
    assert patches.differs(same, {"k": (a,)}, "k") and patches.differs(same, {}, "k") and patches.differs({}, same, "k")


def test_a_snapshot_does_not_grow() -> None:
    growing = {"k": ["a"], "none": [], "other": ["b"]}
    taken = patches.snapshot(growing, ["k", "none", "missing"])
    growing["k"].append("c")
    assert taken == {"k": ("a",)}


def test_hooks_patches_come_on_top_behind_a_mark() -> None:
    again = patches.AGAIN
    found = patches.with_hooked({"a": (1,), "b": (2,)}, {"b": (3, 4), "c": (5,)})
    assert found == {"a": (1,), "b": (2, again, 3, 4), "c": (again, 5)}
    assert [patches.stages(found[key]) for key in "abc"] == [((1,), ()), ((2,), (3, 4)), ((), (5,))]
