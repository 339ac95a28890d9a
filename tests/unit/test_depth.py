"""What is left to `--thorough` is there, and is named as it is."""

from __future__ import annotations

import pytest

from bed import depth
from bed.paths import ROOT


def test_what_is_left_out_is_there() -> None:
    for file, names in depth.LONG.items():
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        for name in names:
            assert f"def {name.partition('[')[0]}(" in text, f"{file} has no {name}"


def test_thorough_leaves_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    file, name = "unit/test_writing_graphed.py", "test_many_texts"
    monkeypatch.delenv(depth.SWITCH, raising=False)
    assert depth.is_left_out(file, name) and not depth.is_left_out(file, "test_another_prompt")
    assert depth.is_left_out("unit/test_qwen3_streamed.py", "test_loras[fast-fp16]")
    monkeypatch.setenv(depth.SWITCH, "1")
    assert not depth.is_left_out(file, name)
