"""What a user leaves to others: VRAM for the desktop, RAM that is not pinned; of models that are loaded already, too."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy.cli_args
import comfy.model_management
import folder_paths
import pytest
import torch

import fusestream.nodes
from fusestream.fusion.stream import limits, vram_pool
from fusestream.fusion.stream.limits import Limits
from fusestream.nodes.page import user_files

GIB = 2**30


class Member:
    ceiling, last_used = None, 0.0

    def shrink(self, nbytes: int) -> int:
        return 0


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(vram_pool, "_pools", {})
    monkeypatch.setattr(vram_pool, "_ram", None)
    yield
    limits.apply(Limits())


def test_what_is_no_number_of_gib_is_none() -> None:
    odd = (True, "2", None, math.nan, math.inf, -1, 2000)
    assert {Limits.of(value, value) for value in odd} == {Limits()}
    assert Limits.of(1, 2.5) == Limits(1.0, 2.5)


def test_a_reserve_is_as_the_flag_and_goes_again() -> None:
    before, member = comfy.model_management.extra_reserved_memory(), Member()
    device = torch.device("cpu")
    pool = vram_pool.pool_of(device)
    pool.join(member)
    whole = pool.budget.total
    limits.apply(Limits(reserve=3.0))
    assert comfy.model_management.extra_reserved_memory() == 3 * GIB and comfy.cli_args.args.reserve_vram == 3.0
    assert whole - pool.budget.total == pytest.approx(3 * GIB - before, abs=1), "of what is loaded, too"
    limits.apply(Limits())
    assert comfy.model_management.extra_reserved_memory() == before and comfy.cli_args.args.reserve_vram is None
    assert pool.budget.total == whole


def test_what_the_command_line_says_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_started_with", (2.0, 2 * GIB))
    before = comfy.model_management.extra_reserved_memory()
    limits.apply(Limits(reserve=5.0))
    assert comfy.model_management.extra_reserved_memory() == before


def test_ram_is_limited_before_and_after_it_is_first_pinned() -> None:
    limits.apply(Limits(ram=2.0))
    ram = vram_pool.ram_for(1)
    assert ram.total == 2 * GIB
    returned: list[int] = []

    class Lender:
        def lendable(self) -> int:
            return GIB

        def relent(self, nbytes: int) -> None:
            returned.append(nbytes)
            ram.give_back(nbytes)

    ram.join(Lender())
    assert ram.try_take(2 * GIB)
    limits.apply(Limits(ram=1.5))
    assert ram.total == 1.5 * GIB and returned == [GIB // 2] and not ram.try_take(1)
    limits.apply(Limits())
    assert ram.total > ram.taken == 1.5 * GIB
    ram.give_back(ram.taken)


def test_the_server_goes_by_the_users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_paths, "get_user_directory", lambda: str(tmp_path))
    monkeypatch.setattr(user_files, "_are_applied", False)
    applied: list[Limits] = []
    monkeypatch.setattr(limits, "apply", applied.append)
    file = tmp_path / "default" / "comfy.settings.json"
    file.parent.mkdir()

    def write(told: Any) -> None:
        file.write_text(told if isinstance(told, str) else json.dumps(told))

    assert user_files.value(user_files.METER, True) is True, "there is no file yet"
    write({user_files.RESERVE: 1.5, user_files.METER: False})
    body = {"prompt": {}}
    assert user_files._before_a_prompt(body) is body and applied == [], "nothing is loaded that it could hold for"
    user_files.apply()
    write({user_files.RESERVE: 1.5, user_files.RAM: 20})
    user_files._before_a_prompt(body)
    write("{half a file")
    user_files._before_a_prompt(body)
    assert applied == [Limits(1.5, 0.0), Limits(1.5, 20.0), Limits(1.5, 20.0)]


def test_page_and_server_call_them_the_same() -> None:
    scripts = Path(fusestream.nodes.__file__).parent / "web" / "js"
    told = "".join(path.read_text(encoding="utf-8") for path in scripts.glob("*.js"))
    assert all(f'SETTING = "{name}"' in told for name in (user_files.METER, user_files.RESERVE, user_files.RAM))
