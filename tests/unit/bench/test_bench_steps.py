"""What leaving out steps costs: every way runs, leaves out what it says, and the table has what was measured."""

from __future__ import annotations

import pytest
import torch

from fusestream.bench.fidelity import steps


def test_the_table_has_every_row() -> None:
    results = steps.measured_before()
    assert list(results["steps"]) == [str(count) for count in steps.VIDEOS]
    for count, one in results["steps"].items():
        assert [(row["way"], row["setting"]) for row in one["rows"]] == [
            (way.name, way.setting) for way in steps.ways(int(count))
        ]
    lines = steps.table(results).splitlines()
    assert sum(line.startswith("| ") for line in lines) == sum(
        2 + len(one["rows"]) for one in results["steps"].values()
    )


def test_the_step_cache_is_nearer_than_what_it_was_compared_with() -> None:
    """At each of its settings: than ComfyUI's caches and fewer steps that leave out as many, or more."""
    for one in steps.measured_before()["steps"].values():
        changed = [row for row in one["rows"] if row["way"] != steps.ALL]
        ours = [row for row in changed if row["way"] == "Step Cache"]
        others = [row for row in changed if "Step Cache" not in row["way"]]
        for row in ours:
            as_many = [other["frames dB"][0] for other in others if other["left out"] >= row["left out"]]
            assert row["frames dB"][0] > max(as_many, default=0.0), row


@pytest.mark.deep
def test_ways_run_and_are_counted() -> None:
    with torch.inference_mode():
        rows = steps.measured(7, 1, ["Fewer", "EasyCache", "Step Cache"])
    assert [row["way"] for row in rows] == [way.name for way in steps.ways(7) if "Lazy" not in way.name]
    assert all(row["frames dB"][1] <= row["frames dB"][0] for row in rows)
    left_out = {row["setting"]: row["left out"] for row in rows if row["way"] == "Step Cache"}
    assert 0 <= left_out[0.02] <= left_out[0.08] <= 3
