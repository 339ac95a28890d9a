"""What other nodes do to a network between two calls is seen: before a replay what a graph reads, behind its launch the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from taped import Model, TapingRecorder, refusals
from torch import Tensor, nn

from fusestream.fusion.fused.block import Parts
from fusestream.fusion.graphs.calls import Graphs
from fusestream.fusion.graphs.guard import Methods, Unchanged, lasting
from fusestream.gpu import capture
from fusestream.gpu.capture_check import Rehearsal
from fusestream.kernels_cuda import LEDGER


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


# --------------------------------------------------------------------------------------------------- behind the launch


class Changed:
    """Another node's doing, which is asked for."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.asked = 0

    def __call__(self) -> str | None:
        self.asked += 1
        return self.reason


class Scene:
    """Calls of a model that another node may have changed. launched: replays, in vain or not."""

    def __init__(self, body: Callable[[Tensor], Tensor] | None = None) -> None:
        LEDGER.clear()
        self.model, self.recorder, self.changed = Model(), TapingRecorder(), Changed()
        self.graphs = Graphs(self.model, self.model.net, self.recorder, lambda: 0)
        self.body = body or self.model.body
        self.launched = self.factor = 0

    def call(self) -> Tensor:
        out: Tensor = self.graphs.call(self.body, (torch.ones(2, 4),), changed=self.changed)
        return out

    def captured(self) -> Scene:
        while not self.recorder.tapes:
            self.call()
        tape = self.recorder.tapes[0]
        replay = tape.replay

        def counted() -> None:
            self.launched += 1
            replay()

        tape.replay = counted  # type: ignore[method-assign]
        return self


def test_who_was_changed_is_computed_as_ever() -> None:
    """Once a replay is launched in vain; then it is asked before, until all is as it was."""
    scene = Scene().captured()
    graphs, want = scene.graphs, scene.call()
    assert (scene.launched, graphs.replayed) == (1, 1)
    scene.changed.reason, scene.model.weight = "another node was here", -scene.model.weight
    for _ in range(3):
        ran = scene.model.ran
        assert torch.equal(scene.call(), -want) and scene.model.ran == ran + 1
        assert (scene.launched, graphs.replayed) == (2, 1)
    assert refusals() == ["another node was here"] and scene.model.notes["CUDA graphs"] == "none: another node was here"
    scene.changed.reason, scene.model.weight = None, -scene.model.weight
    for replayed in (2, 3):
        assert torch.equal(scene.call(), want) and (scene.launched, graphs.replayed) == (replayed + 1, replayed)
    assert graphs.captured == 1


def test_it_is_asked_at_each_call_once() -> None:
    scene = Scene()
    for asked in range(1, 8):
        scene.call()
        assert scene.changed.asked == asked
    assert scene.graphs.replayed == 4


def test_who_was_changed_from_the_beginning_is_not_captured() -> None:
    scene = Scene()
    scene.changed.reason = "another node was here"
    for _ in range(6):
        scene.call()
    assert (scene.graphs.attempts, scene.model.ran) == (0, 6)


def test_what_the_host_counts_is_not_counted_in_vain() -> None:
    seen: list[int] = []

    def body(x: Tensor) -> Tensor:
        capture.each_time(lambda: seen.append(1))
        return x + 1

    scene = Scene(body).captured()
    calls = len(seen)
    for reason in (None, "another node was here", "another node was here", None):
        scene.changed.reason = reason
        calls += 1
        scene.call()
        assert len(seen) == calls


def test_a_model_that_moved_is_launched_for_nobody() -> None:
    """What a graph reads is looked at before: it may not be there any more."""
    scene = Scene().captured()
    for move in (
        lambda: setattr(scene.model, "generation", 1),
        lambda: setattr(scene.model.net, "weight", nn.Parameter(torch.randn(4, 4))),
    ):
        kept = scene.model.net.weight
        move()
        scene.call()
        assert scene.launched == 0, kept.shape
        scene.captured()


def test_work_that_leaves_traces_is_not_done_in_vain() -> None:
    kept = Model().net
    kept.register_buffer("count", torch.zeros(4))

    def counts(x: Tensor) -> Tensor:
        kept.count.add_(1)
        return x + kept.count

    for body, is_repeatable in (
        (lambda x: x + torch.rand(4), False),
        (lambda x: nn.functional.dropout(x, 0.5, training=True), False),
        (counts, False),
        (lambda x: x.clone().add_(kept.count), True),
        (lambda x: nn.functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])[0, 0], True),
    ):
        scene = Scene(body)
        scene.graphs = Graphs(scene.model, kept, scene.recorder, lambda: 0)
        scene.captured().call()
        assert scene.launched == scene.graphs.replayed == 1
        scene.changed.reason, before = "another node was here", kept.count.clone()
        scene.call()
        assert scene.launched == (2 if is_repeatable else 1)
        assert torch.equal(kept.count, before + (body is counts)), "once for a call"


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
