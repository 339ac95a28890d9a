"""What VAEs do about the memory of torch's allocator, without a card."""

from __future__ import annotations

import contextlib
import threading
from functools import partial

import comfy.model_management as management
import pytest
import torch
from torch import nn

from fusestream.fusion.base.allocator_limit import bounded
from fusestream.fusion.vae import memory_limits
from fusestream.kernels_cuda import LEDGER

CARD = torch.device("cuda", 0)


class Memory:
    """torch's allocator as far as VAEs ask it: what it holds, and what it may."""

    def __init__(self, monkeypatch):
        self.held, self.unused, self.fraction, self.asked = 1 << 30, 512 << 20, 0.9, list[int]()
        self.order: list[str] = []
        for name, function in {
            "memory_reserved": lambda *_: self.held,
            "memory_stats_as_nested_dict": lambda _: {"reserved_bytes": {"large_pool": {"current": self.held}}},
            "memory_allocated": lambda *_: self.held - self.unused,
            "empty_cache": self.empty,
            "get_per_process_memory_fraction": lambda _: self.fraction,
            "set_per_process_memory_fraction": self.bound,
            "get_device_properties": lambda _: type("Card", (), {"total_memory": 8 << 30}),
            "current_device": lambda: CARD.index,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function, raising=False)
        monkeypatch.setattr(memory_limits, "one_piece", self.piece)
        monkeypatch.setattr(memory_limits, "products_have_their_room", lambda device: self.order.append("products"))

    def empty(self):
        self.held -= self.unused
        self.unused = 0

    def bound(self, fraction, device):
        assert device == CARD
        self.fraction = fraction

    def piece(self, nbytes, device):
        assert device == CARD
        self.order.append("piece")
        self.asked.append(nbytes)
        self.held += nbytes
        self.unused += nbytes


@pytest.fixture
def memory(monkeypatch):
    return Memory(monkeypatch)


def serve(module, memory, run=lambda: "made", shape=(1, 2)):
    return memory_limits.Leftovers(module, shape).serve(run, 256 << 20, 1 << 30, CARD)


def test_one_piece_serves_until_something_changes(memory):
    module = nn.Identity()
    assert serve(module, memory) == "made" == serve(module, memory)
    assert memory.asked == [256 << 20] and memory.held == (512 + 256) << 20
    serve(module, memory, shape=(1, 3))
    assert memory.asked == [256 << 20] * 2, "another shape finds a piece of its own"
    memory.held += 2 << 20
    serve(module, memory, shape=(1, 3))
    assert memory.asked == [256 << 20] * 3, "what others took lies amid it"


def test_what_products_keep_lies_beside_the_piece(memory):
    serve(nn.Identity(), memory)
    assert memory.order == ["products", "piece"], "amid it cuBLAS would hold all of it"


def test_small_tensors_are_no_matter(memory, monkeypatch):
    module, small = nn.Identity(), 0
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: memory.held + small)
    serve(module, memory)
    small = 2 << 20
    serve(module, memory)
    assert memory.asked == [256 << 20], "what is small has a pool of its own"


def test_what_turns_took_goes_before_the_next(memory):
    module = nn.Identity()

    def run():
        memory.held += 64 << 20
        memory.unused += 64 << 20

    serve(module, memory, run)
    serve(module, memory)
    assert len(memory.asked) == 2 and memory.held == (512 + 256) << 20


def test_what_another_card_holds_serves_nothing_here(monkeypatch):
    held = {CARD: 256 << 20, torch.device("cuda", 1): 0}
    monkeypatch.setattr(memory_limits, "held_in_pieces", held.get)
    leftovers = memory_limits.Leftovers(nn.Identity(), (1, 2))
    leftovers.are_left(CARD)
    assert [leftovers.lie_there(device) for device in held] == [True, False]


def test_all_of_it_is_within_the_bound(memory):
    """Which counts from what was there before, also when the piece lies there."""
    module, seen = nn.Identity(), []
    for _ in range(2):
        serve(module, memory, lambda: seen.append(memory.fraction))
    assert seen == [(512 + 1024) / 8192] * 2 and memory.fraction == 0.9


def test_what_cannot_be_given_back_counts_within_the_bound(memory, monkeypatch):
    """A piece of memory of which a little is in use stays whole. And the bound is no less than what is held."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    seen = []
    serve(nn.Identity(), memory, lambda: seen.append(memory.fraction))
    assert seen == [(512 + 1024) / 8192]
    memory.held += 1 << 30
    memory.unused += 1 << 30
    serve(nn.Identity(), memory, lambda: seen.append(memory.fraction))
    assert seen[1] == memory.held / (8 << 30) > seen[0]


def test_a_bound_of_somebody_else_stays(memory):
    memory.fraction = 0.1
    with bounded(4 << 30, CARD):
        assert memory.fraction == 0.1
    with contextlib.suppress(KeyError), bounded(1 << 28, CARD):
        assert memory.fraction == 1 / 32
        raise KeyError
    assert memory.fraction == 0.1


def test_a_device_without_a_number_is_the_current_one(memory):
    """ComfyUI names it so; torch bounds none but by number."""
    with bounded(1 << 28, torch.device("cuda")):
        assert memory.fraction == 1 / 32
    assert memory.fraction == 0.9


def test_of_an_allocator_that_may_take_more_than_all_the_bound_goes_to_all(memory):
    """cudaMallocAsync's fraction before anybody has set it; to set that again is an error."""
    memory.fraction = 1.2e8
    with bounded(4 << 30, CARD):
        assert memory.fraction == 0.5
    assert memory.fraction == 1.0


def test_where_the_bound_does_not_suffice_it_goes_and_that_is_said(memory, caplog):
    runs = []

    def run():
        runs.append(memory.fraction)
        if memory.fraction < 0.9:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")
        return "made"

    LEDGER.clear()
    assert serve(nn.Identity(), memory, run) == "made"
    assert len(runs) == 2 and runs[1] == 0.9
    assert "Tried to allocate 2.00 GiB" in caplog.text and "more\n" not in caplog.text


def test_a_card_that_is_full_is_said_to_be(memory):
    def run():
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        serve(nn.Identity(), memory, run)
    assert memory.fraction == 0.9


def test_only_the_thread_that_computes_is_told_of_another_card(monkeypatch):
    sizes = {"all": lambda dev=None, torch_total_too=False: (9, 9) if torch_total_too else 9}
    monkeypatch.setattr(management, "get_total_memory", sizes["all"])
    others = []
    with memory_limits.told_of_card(5) as asked:
        assert management.get_total_memory(CARD) == 5 and management.get_total_memory(CARD, torch_total_too=True) == (
            5,
            5,
        )
        thread = threading.Thread(target=lambda: others.append(management.get_total_memory(CARD)))
        thread.start()
        thread.join()
        with contextlib.suppress(ValueError), memory_limits.told_of_card(0) as inner:
            assert management.get_total_memory(CARD) == 5, "what was told before goes on"
            raise ValueError
    assert others == [9] and len(asked) == 3 and len(inner) == 1
    assert management.get_total_memory is sizes["all"]


def test_threads_that_are_told_at_a_time_end_in_any_order(monkeypatch):
    """Each hears its own, and ComfyUI's function is back behind the last; or what another node has put around it, which hears the
    card's own."""
    monkeypatch.setattr(management, "get_total_memory", own := lambda *_: 9)
    inside, out, found = threading.Barrier(3), [threading.Event(), threading.Event()], {}

    def work(nbytes: int, end: threading.Event) -> None:
        with memory_limits.told_of_card(nbytes):
            inside.wait()
            end.wait()
            found[nbytes] = management.get_total_memory(CARD)

    threads = [threading.Thread(target=work, args=(nbytes, end)) for nbytes, end in zip((3, 5), out, strict=True)]
    for thread in threads:
        thread.start()
    inside.wait()
    assert management.get_total_memory(CARD) == 9
    for thread, end in zip(threads, out, strict=True):
        end.set()
        thread.join()
    assert found == {3: 3, 5: 5} and management.get_total_memory is own
    with memory_limits.told_of_card(7):
        told = management.get_total_memory
        management.get_total_memory = partial(told)  # as another node wraps it
        assert management.get_total_memory(CARD) == 7
    assert management.get_total_memory(CARD) == 9
