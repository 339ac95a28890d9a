"""Marks leave tests to `--thorough`, and `--thorough` leaves nothing out."""

from __future__ import annotations

import pytest

from bed import depth

pytest_plugins = ["pytester"]
TESTS = """
import pytest

def test_plain(): pass

@pytest.mark.deep
def test_long(): pass

@pytest.mark.deep("b*", "exact")
@pytest.mark.parametrize("kind", ["a", "b", "b-c", "exact", "exactly"])
def test_kinds(kind): pass

@pytest.mark.deep("a")
@pytest.mark.every_other
@pytest.mark.parametrize("kind", "abcd")
def test_many(kind): pass
"""


def test_marks_leave_tests_to_thorough(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makeini("[pytest]\nmarkers =\n    deep\n    every_other")
    items = pytester.getitems(TESTS)
    monkeypatch.delenv(depth.SWITCH, raising=False)
    left = {item.name for item in depth.left_out(items)}
    assert left == {
        "test_long",
        *(f"test_kinds[{kind}]" for kind in ("b", "b-c", "exact")),
        "test_many[a]",
        "test_many[c]",
    }
    monkeypatch.setenv(depth.SWITCH, "1")
    assert not depth.left_out(items)
