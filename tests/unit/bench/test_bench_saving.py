"""What saving takes: the rows are measured, and a tensor that stock would have made otherwise is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fusestream.bench import saving
from fusestream.bench.report import saving_table

pytestmark = pytest.mark.usefixtures("as_comfyui_runs")


def test_every_row_is_measured_and_every_tensor_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Any] = []
    odd = saving.odd

    def noted(*given: Any) -> list[str]:
        looked_at.extend(given)
        return odd(*given)

    monkeypatch.setattr(saving.Watched, "EVERY", 0.001)
    monkeypatch.setattr(saving, "odd", noted)
    found, faults = saving.measured(tmp_path, quick=True)
    assert not faults and found.keys() >= saving.AIMS.keys() and found["RAM of its own, at most"] > 0
    path, saved, patches, device = looked_at
    assert len(patches) == 4 * 10, "all matrices of four blocks"
    key = "diffusion_model.blocks.2.ffn.0.weight"
    assert odd(path, saved, {**patches, key: patches[key][:1]}, device) == ["blocks.2.ffn.0.weight"]


def test_the_table_says_what_was_missed() -> None:
    rows = [{"label": "RAM", "value": 3.5, "bound": 3.0}, {"label": "seconds", "value": 60.0, "bound": None}]
    table = saving_table({"saving": {"rows": rows}})
    assert "| RAM | **missed** 3.50 GiB | 3 GiB |" in table and "| seconds | 60.00 |  |" in table
