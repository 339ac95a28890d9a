"""What is left to `--thorough` is there, and is named as it is."""

from __future__ import annotations

import pytest

from bed import depth
from bed.paths import ROOT


def test_what_is_left_out_is_there() -> None:
    for found in (depth.LONG, depth.HALVED):
        for file, names in found.items():
            text = (ROOT / "tests" / file).read_text(encoding="utf-8")
            for name in names:
                assert f"def {name.partition('[')[0]}(" in text, f"{file} has no {name}"


def test_thorough_leaves_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    graphed, qwen3, wan = (
        "unit/fusion/graphs/test_graphs_writing.py",
        "unit/fusion/stream/test_qwen3_streamed.py",
        "unit/checkpoints/test_diffusion_files.py",
    )
    tests = [
        (graphed, "test_another_prompt"),
        (graphed, "test_many_texts"),
        (qwen3, "test_loras[fast-fp16]"),
        (qwen3, "test_loras[precise-fp16]"),
        *((wan, f"test_loads_whole_and_samples[{kind}]") for kind in "abcd"),
        ("unit/test_other.py", "test_loads_whole_and_samples[a]"),
    ]
    monkeypatch.delenv(depth.SWITCH, raising=False)
    assert depth.left_out(tests) == {1, 2, 5, 7}
    monkeypatch.setenv(depth.SWITCH, "1")
    assert depth.left_out(tests) == set()
