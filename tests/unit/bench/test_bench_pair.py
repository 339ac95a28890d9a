"""Two models in little RAM: every turn is measured, and what can still be had of the RAM is reckoned as the system tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusestream.bench import pair
from fusestream.bench.report import pair_table

MEMINFO = "MemTotal: 1000 kB\nMemAvailable: 800 kB\nSwapTotal: {} kB\n"


@pytest.mark.usefixtures("as_comfyui_runs")
def test_both_models_have_their_turns_and_leave_nothing(tmp_path: Path) -> None:
    rows = pair.measured(tmp_path, "q4_k_m", 1.0, quick=True)
    assert [row["label"] for row in rows] == [
        f"Q4_K_M, {name} model, turn {turn}" for turn in (1, 2) for name in ("first", "second")
    ]
    assert all(row["finite"] and row["s"] > 0 and row["first s"] > 0 for row in rows)
    assert not list(tmp_path.iterdir())
    table = pair_table({"pair": {"rows": rows}}).splitlines()
    assert len(table) == 2 + len(rows) and table[2].startswith("| Q4_K_M, first model, turn 1 |")


def written(root: Path, swap: int = 0, **of_group: str) -> Path:
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(MEMINFO.format(swap))
    group = root / "sys/fs/cgroup"
    group.mkdir(parents=True)
    for name, text in of_group.items():
        (group / name.replace("_", ".", 1)).write_text(text)
    return root


def test_what_is_left_is_the_systems_or_the_groups(tmp_path: Path) -> None:
    for name, group, found in (
        ("system", {}, 800 * 1024),
        ("unbounded", {"memory_max": "max"}, 800 * 1024),
        (
            "group",
            {
                "memory_max": "500000\n",
                "memory_current": "300000\n",
                "memory_stat": "anon 1\ninactive_file 50000\nactive_file 1\n",
            },
            250001,
        ),
    ):
        root = tmp_path / name
        root.mkdir()
        assert pair.available(written(root, **group)) == found


def test_a_system_that_swaps_is_no_place_to_measure(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="swaps"):
        pair.available(written(tmp_path, swap=4))


def test_memory_is_taken_until_so_much_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "available", lambda: 3 << 20)
    with pair.LittleRam(2 / 1024) as little:
        assert little._taken is not None and len(little._taken) == 1 << 20 and little._taken[-1] == 1
    with pair.LittleRam(1.0) as little:
        assert little._taken is None
