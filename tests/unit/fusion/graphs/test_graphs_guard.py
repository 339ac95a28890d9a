"""What other nodes do to a network between two calls is seen: what it is made of, and where its tensors lie."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fusestream.fusion.fused.block import Parts
from fusestream.fusion.graphs.guard import Methods, Unchanged, lasting
from fusestream.fusion.weights.scales import as_parameter
from fusestream.gpu.capture_check import Rehearsal


def network() -> Any:
    inner = nn.Sequential(nn.Conv2d(2, 2, 3), nn.GroupNorm(1, 2), nn.Sequential(nn.SiLU()))
    return nn.ModuleDict({"first": inner, "last": nn.Sequential(nn.Linear(4, 4), nn.ReLU())})


# ---------------------------------------------------------------------------------------------------------------- parts


def swaps_forwards_for_a_value(net: Any) -> None:
    """It keeps as many things as before."""
    del net.last[0].__dict__["in_features"]
    net.last[0].forward = lambda x: x


def moves_to_a_neighbour(net: Any) -> None:
    """The modules, one after the other, are the same ones."""
    moved = net.first._modules.pop("2")
    before = dict(net.last._modules)
    net.last._modules.clear()
    net.last._modules.update({"new": moved, **before})


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "forward": (lambda net: setattr(net.first[0], "forward", lambda x: x), "first.0"),
    "forward for a value": (swaps_forwards_for_a_value, "last.0"),
    "how it convolves": (lambda net: setattr(net.first[0], "_conv_forward", lambda *_: None), "first.0"),
    "a hook": (lambda net: net.first[2][0].register_forward_hook(lambda *_: None), "first.2.0"),
    "a hook before": (lambda net: net.last.register_forward_pre_hook(lambda *_: None), "last"),
    "another part": (lambda net: net.last._modules.__setitem__("0", nn.Linear(4, 4)), "0 of last"),
    "one more": (lambda net: net.last.append(nn.ReLU()), "2 of last"),
    "one less": (lambda net: net.first._modules.pop("2"), "a part of first"),
    "the first of all": (lambda net: net._modules.__setitem__("first", nn.Identity()), "first"),
    "to a neighbour": (moves_to_a_neighbour, "a part of first"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_part_that_was_replaced_is_named(change: str) -> None:
    net = network()
    parts = Parts(net)
    assert parts.replaced() is None
    does, name = CHANGES[change]
    does(net)
    assert parts.replaced() == f"another node has replaced {name}"


def test_a_part_that_was_put_back_is_as_it_was() -> None:
    net = network()
    parts, before = Parts(net), net.last[0]
    net.last[0] = nn.Linear(4, 4)
    assert parts.replaced() is not None
    net.last[0] = before
    before.forward = before.forward
    assert parts.replaced() is not None
    del before.forward
    hook = before.register_forward_hook(lambda *_: None)
    assert parts.replaced() is not None
    hook.remove()
    assert parts.replaced() is None


def test_a_copy_looks_at_its_own() -> None:
    net = network()
    net.parts = Parts(net)
    other = copy.deepcopy(net)
    other.last[0] = nn.Linear(4, 4)
    assert net.parts.replaced() is None and other.parts.replaced() == "another node has replaced 0 of last"


def test_methods_that_come_as_others_go() -> None:
    """Both modules together keep as many things as before."""
    net = network()
    net.last[1].kept = 1
    methods = Methods(net)
    assert methods.replaced(net) is None
    del net.last[1].kept
    net.last[0].extra_repr = lambda: ""
    assert methods.replaced(net) == "last.0.extra_repr"
    del net.last[0].extra_repr
    assert methods.replaced(net) is None


# ------------------------------------------------------------------------------------------------------------ addresses


def test_where_tensors_lie() -> None:
    net = network()
    net.register_buffer("seen", torch.zeros(3))
    unchanged = Unchanged(net)
    unchanged.look_up()
    before = unchanged.addresses()
    assert len(before) == 7 and unchanged.addresses() == before
    kept = [net.last[0].weight, net.seen]  # or the next may lie there
    for change in (
        lambda: setattr(net.last[0], "weight", nn.Parameter(torch.zeros(4, 4))),
        lambda: setattr(net.last[0].weight, "data", torch.zeros(4, 4)),
        lambda: setattr(net.last[0], "bias", None),
        lambda: setattr(net, "seen", torch.zeros(3)),
        lambda: net.last[0]._parameters.pop("weight"),
    ):
        kept += [tensor for tensor in net.state_dict(keep_vars=True).values() if tensor is not None]
        kept += [tensor.data for tensor in kept]
        before = unchanged.addresses()
        change()
        after = unchanged.addresses()
        assert len(after) == len(before) and sum(a != b for a, b in zip(after, before, strict=True)) == 1


def test_quantised_ones_lie_where_their_data_does() -> None:
    from comfy.quant_ops import QuantizedTensor

    net, other = network(), network()
    made = QuantizedTensor.from_float(
        torch.randn(4, 4, dtype=torch.float16), "TensorCoreFP8Layout", scale=torch.ones(())
    )
    net.last[0].weight = nn.Parameter(made, requires_grad=False)
    for one, counts in ((net, 1), (other, 1)):
        unchanged = Unchanged(one)
        unchanged.look_up()
        before = unchanged.addresses()
        kept = one.last[0].weight
        numbers = torch.randn(4, 4, dtype=torch.float16)
        again = QuantizedTensor.from_float(numbers, "TensorCoreFP8Layout", scale=torch.ones(()))
        one.last[0].weight = nn.Parameter(again, requires_grad=False)
        after = unchanged.addresses()
        assert sum(a != b for a, b in zip(after, before, strict=True)) == counts, kept.shape


def test_other_scales_beside_the_same_numbers_are_seen() -> None:
    """Memory of numbers that were freed may be that of the next ones, and a graph reads scales, too."""
    from comfy.quant_ops import QuantizedTensor

    net = network()
    made = QuantizedTensor.from_float(torch.randn(4, 4).half(), "TensorCoreFP8Layout", scale=torch.ones(()))
    net.last[0].weight = nn.Parameter(made, requires_grad=False)
    unchanged = Unchanged(net)
    unchanged.look_up()
    before = unchanged.addresses()
    params = dataclasses.replace(made._params, scale=torch.full((), 2.0))
    again = QuantizedTensor(net.last[0].weight._qdata, made._layout_cls, params)
    net.last[0].weight = as_parameter(again)
    assert net.last[0].weight._qdata.data_ptr() == made._qdata.data_ptr()
    assert unchanged.addresses() != before


def test_what_lasts_is_what_modules_keep() -> None:
    net = network()
    net.register_buffer("seen", torch.zeros(3))
    net.own, net.some = torch.zeros(2), [torch.zeros(1)]
    unchanged = Unchanged(net)
    found = lasting(unchanged.kept())
    held = (net.last[0].weight, net.seen, net.own, net.some[0])
    assert len(found) == 9 and all(tensor.untyped_storage().data_ptr() in found for tensor in held)
    for work, is_repeatable in ((lambda: torch.zeros(3).add_(net.seen), True), (lambda: net.seen[1:].add_(1), False)):
        rehearsal = Rehearsal(torch.device("cpu"))
        with rehearsal.watched(found):
            work()
        assert rehearsal.is_repeatable == is_repeatable
