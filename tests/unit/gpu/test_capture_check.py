"""What a call is taken apart into, and what a rehearsal of it sees: the device is `meta`, or a card that pretends."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from fusestream.gpu.call_key import put_together, taken_apart
from fusestream.gpu.capture_check import NotRecordable, Rehearsal, _untold, _waits_told
from fusestream.kernels_cuda import KernelPolicy

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Shared:
    tokens: int
    mask: Tensor | None


def test_arguments_are_taken_apart_and_put_together() -> None:
    x, y = torch.randn(2), torch.randn(3)
    value = [{"a": (x, 1), "b": [y, x]}, Shared(3, y), Shared(4, None), "word", torch.float16]
    tensors: list[Tensor] = []
    form = taken_apart(value, tensors, CPU)
    assert tensors == [x, y] and hash(form) == hash(taken_apart(value, [], CPU))
    own = [t.clone() for t in tensors]
    made = put_together(value, iter(own))
    assert made[0]["a"][0] is made[0]["b"][1] is own[0] and made[1].mask is own[1] and made[2] is value[2]
    for policy in (
        KernelPolicy(),
        KernelPolicy.of("on", attention="off", linear="auto"),
    ):  # with what is made of its fields
        assert put_together(policy, iter(())) == policy
    aliased = [{"a": (x, 1), "b": [y, y]}, *value[1:]]
    assert taken_apart(aliased, [], CPU) != form


def test_what_comes_from_the_cpu_is_a_constant() -> None:
    """The device is `meta`: what is brought to it has no numbers."""
    rehearsal = Rehearsal(torch.device("meta"))
    size = [4]

    def work() -> Tensor:
        frequencies = torch.arange(size[0]).to("meta", torch.float32)
        return torch.ones(size[0], device="meta") * frequencies

    with torch.inference_mode():
        with rehearsal.watched():
            work()
        assert rehearsal.nbytes == 16
        with rehearsal.recalled():
            assert work().shape == (4,)
        size[0] = 5
        with pytest.raises(NotRecordable, match="same twice"), rehearsal.recalled():
            work()


class Card:
    """Torch's word on whether it lets the host wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mode = 0
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.mode)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self.set)

    def set(self, mode: int | str) -> None:
        self.mode = {"default": 0, "warn": 1}.get(mode, mode)  # type: ignore[arg-type, assignment]
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=1)

    def waits(self) -> None:
        if self.mode:
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)


def test_waits_that_no_mode_sees_are_told_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.tensor(numbers, device="cuda")` copies within torch."""
    card, device = Card(monkeypatch), torch.device("cuda")
    with pytest.raises(NotRecordable, match="waits for the card"), _waits_told(device):
        card.waits()
    with pytest.warns(UserWarning, match="of somebody's"), _waits_told(device):
        with _untold(device):
            card.waits()
        warnings.warn("of somebody's", UserWarning, stacklevel=1)
    with pytest.raises(ZeroDivisionError), _waits_told(device):
        card.waits()
        raise ZeroDivisionError
    assert card.mode == 0


@pytest.mark.parametrize("work", [lambda x: x.to("cpu"), lambda x: torch.empty(3).copy_(x), lambda x: x.cpu()])
def test_who_reads_from_the_card_is_handed_back(work: Any) -> None:
    x = torch.empty(3, device="meta")
    with pytest.raises(NotRecordable, match="reads from the card"), Rehearsal(x.device).watched():
        work(x)


def test_who_may_launch_elsewhere_is_handed_back() -> None:
    """As torchvision's deformable convolution does. The device is `meta`: an operation of another library, on made-up tensors."""
    library = torch.library.Library("somebodys", "FRAGMENT")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", torch.empty_like, "Meta")
    x = torch.empty(3, device="meta")
    with pytest.raises(NotRecordable, match="somebodys::double"), Rehearsal(x.device).watched():
        torch.ops.somebodys.double(x)
