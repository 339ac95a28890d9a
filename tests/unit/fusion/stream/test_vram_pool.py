"""One device's memory for the weights of several models: whose ceiling counts, who gives, and what stock is told."""

from __future__ import annotations

import gc
from typing import Any

import comfy.model_management
import pytest
import torch

from fusestream.fusion.stream import vram_pool
from fusestream.fusion.stream.vram_pool import (
    CountedRam,
    Pool,
    out_of_vram,
    pool_of,
    whole,
)
from fusestream.memory import OverBudget

MIB = 2**20


class Model:
    """A member that gives back what it is asked for, as far as it has it."""

    def __init__(self, pool: Pool, ceiling: int | None, last_used: float = 0.0, holds: int = 0) -> None:
        self.pool, self.ceiling, self.last_used, self.holds = pool, ceiling, last_used, holds
        self.asked: list[int] = []
        pool.join(self)
        pool.budget.take(holds)

    def shrink(self, nbytes: int) -> int:
        self.asked.append(nbytes)
        given = min(nbytes, self.holds)
        self.holds -= given
        self.pool.budget.give_back(given)
        return given


def test_the_largest_ceiling_is_the_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the card, where one of them has none; and of those that have left none counts."""
    monkeypatch.setattr(vram_pool, "whole", lambda device: 1000)
    pool = Pool(torch.device("cpu"))
    assert pool.budget.total == 0
    small, large = Model(pool, 100), Model(pool, 300)
    assert pool.budget.total == 300
    unlimited = Model(pool, None)
    assert pool.budget.total == 1000
    pool.leave(unlimited)
    assert pool.budget.total == 300
    pool.leave(large)
    assert pool.budget.total == 100
    pool.leave(small)
    assert pool.budget.total == 100, "what is still held is held"


def test_who_was_used_longest_ago_gives_first_and_no_more_than_is_missing() -> None:
    pool = Pool(torch.device("cpu"))
    new, old, asker = Model(pool, 100, 2.0, 40), Model(pool, 100, 1.0, 30), Model(pool, 100, 0.0, 20)
    assert pool.make_room(asker, 10) == 10 and not (new.asked or old.asked), "that much is left"
    assert pool.make_room(asker, 35) == 35 and old.asked == [25] and not new.asked
    assert pool.make_room(asker, 60) == 60 and old.asked == [25, 25] and new.asked == [20]
    assert pool.make_room(asker, 500) == 80 and asker.holds == 20 and not asker.asked, "its own it keeps"


def test_a_model_that_is_gone_is_no_member() -> None:
    pool = Pool(torch.device("cpu"))
    asker, gone = Model(pool, 50), Model(pool, 100)
    del gone
    gc.collect()
    assert pool.make_room(asker, 500) == 100
    pool.join(asker)
    assert pool.budget.total == 50


def test_a_device_has_one_pool() -> None:
    assert pool_of(torch.device("meta")) is pool_of(torch.device("meta")) is not pool_of(torch.device("cpu"))


def test_what_the_desktop_needs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comfy.model_management, "get_total_memory", lambda device: 1000)
    monkeypatch.setattr(comfy.model_management, "extra_reserved_memory", lambda: 300.5)
    assert whole(torch.device("cpu")) == 699
    monkeypatch.setattr(comfy.model_management, "extra_reserved_memory", lambda: 2000)
    assert whole(torch.device("cpu")) == 0


def test_the_pagers_answer_names_the_node() -> None:
    error: Any = out_of_vram(OverBudget("8 GiB and no more. Raise the VRAM budget, or close what else uses the card."))
    assert isinstance(error, torch.OutOfMemoryError), "for which ComfyUI unloads everything"
    assert str(error).endswith(
        "Raise vram_budget in the FuseStream Diffusion Model Loader, or close what else uses the card."
    )
    assert "the Other Loader" in str(out_of_vram(OverBudget("Raise the VRAM budget."), "Other Loader"))


def test_stock_counts_what_is_pinned_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would pin beyond the system's limit otherwise."""
    monkeypatch.setattr(comfy.model_management, "TOTAL_PINNED_MEMORY", 7)
    ram = CountedRam(100)
    assert ram.try_take(60) and comfy.model_management.TOTAL_PINNED_MEMORY == 67
    assert not ram.try_take(41) and comfy.model_management.TOTAL_PINNED_MEMORY == 67
    ram.give_back(60)
    assert comfy.model_management.TOTAL_PINNED_MEMORY == 7 and ram.taken == 0


def test_stock_lets_go_of_as_much_as_may_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(comfy.model_management, "ensure_pin_registerable", asked.append)
    monkeypatch.setattr(comfy.model_management, "TOTAL_PINNED_MEMORY", 0)
    monkeypatch.setattr(vram_pool, "_ram", None)
    monkeypatch.setattr(CountedRam, "auto", classmethod(lambda cls, _gib: cls(10 * MIB)))
    ram = vram_pool.ram_for(4 * MIB)
    assert vram_pool.ram_for(40 * MIB) is ram and ram.total == 10 * MIB
    assert ram.try_take(3 * MIB)
    vram_pool.ram_for(40 * MIB)
    assert asked == [4 * MIB, 10 * MIB, 7 * MIB]
    ram.give_back(3 * MIB)
