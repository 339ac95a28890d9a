"""The test matrix: what a row installs, how pytest's report is read and kept, and that the page says what the file has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from bed import matrix, row_venv, tested
from bed.paths import Bed
from bed.rows import ROWS, TOLD

ABOUT = {
    "comfyui": "0.99.0",
    "laid_over": 0,
    "packages": dict.fromkeys(TOLD, "1"),
    "python": "3.11.7",
    "platform": "Linux x86_64, CPU",
    "day": "2026-11-26",
}
ONE = '<testcase file="tests/unit/test_a.py" name="{}">{}</testcase>'
FAILED = '<failure message="AssertionError: /tmp/a-b/x.py is 1&#10;E   not 2">trace</failure>'
CASES = (
    ("test_one", ""),
    ("test_two[x-y]", FAILED),
    ("test_two[x-y]", '<error message="teardown">trace</error>'),
    ("test_three", '<skipped message="no GPU"/>'),
    ("test_four", '<error message="RuntimeError: no server"/>'),
)
REPORT = f"<testsuites><testsuite>{''.join(ONE.format(*case) for case in CASES)}</testsuite></testsuites>"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page, in a folder of its own."""
    monkeypatch.setattr(tested, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(tested, "PAGE", tmp_path / "page.md")
    return tmp_path / "page.md"


def test_the_page_says_what_the_file_has() -> None:
    found = tested.BLOCK.search(tested.PAGE.read_text(encoding="utf-8"))
    assert found, "the page has lost the marks of its table"
    assert found[0] == f"{found[1]}{tested.table(tested.entries())}{found[2]}", "call python3 dev.py docs"


def test_the_file_tells_nothing_of_a_machine() -> None:
    text = tested.RESULTS.read_text(encoding="utf-8")
    assert not re.findall(r"[\" (](/[\w.-]+/[\w./-]*)|://|\b\d+\.\d+\.\d+\.\d+\b|@", text)
    for one in tested.entries():
        assert one.row in ROWS and set(one.passed) <= set(ROWS[one.row].parts)
        assert set(one.packages) == set(TOLD) and re.fullmatch(r"\d{4}-\d\d-\d\d", one.day)


def test_a_row_replaces_what_the_tree_pins(tmp_path: Path) -> None:
    asked = "comfy_kitchen==0.2.26\ncomfyui-workflow-templates==0.11.27\ntorch\n# more\n\ncomfy-aimdo==0.4.11\n"
    (tmp_path / "requirements.txt").write_text(asked)
    wanted = row_venv.requirements(tmp_path, ROWS["kitchen"])
    assert wanted == [
        "comfyui-workflow-templates==0.11.27",
        "torch",
        "comfy-kitchen==0.2.40",
        "comfy-aimdo==0.6.0",
    ]
    pinned = [
        "# pins",
        "torch==2.11.0",
        "Comfy_Kitchen==0.2.26",
        'av==18 ; python_version >= "3.11"',
        "comfy-aimdo==0.6.0",
    ]
    templates = ["comfyui_workflow_templates==0.11.27", "comfyui-workflow-templates-core==0.3.292"]
    kept = row_venv.constraints([*pinned, *templates], wanted)
    assert kept == [line for line in pinned if "Kitchen" not in line] + templates
    newer = ["comfyui-workflow-templates==0.11.44"]
    assert row_venv.constraints([*pinned, *templates], newer) == pinned, "they pin those of their own"


def test_pytests_report_is_read() -> None:
    outcome = matrix.read(REPORT)
    assert (outcome.passed, outcome.skipped) == (1, 1)
    assert outcome.failures == {
        "tests/unit/test_a.py::test_two[x-y]": "AssertionError: x.py is 1",
        "tests/unit/test_a.py::test_four": "RuntimeError: no server",
    }


def test_a_row_is_kept_folder_by_folder(kept: Path) -> None:
    entry = tested.entry_of("kitchen", ABOUT)
    entry.note("tests/unit", 10, 2, {"tests/unit/test_a.py::test_b": "no | good"})
    tested.keep(entry)
    entry = tested.entry_of("kitchen", {**ABOUT, "day": "2026-11-27"})
    entry.note("tests/server", 5, 0, {"tests/server/test_c.py::test_d": "bad"})
    tested.keep(entry)
    tested.keep(tested.entry_of("tree", {**ABOUT, "laid_over": 7}))
    (other, one) = tested.entries()
    assert (one.passed, one.skipped) == ({"tests/unit": 10, "tests/server": 5}, {"tests/unit": 2, "tests/server": 0})
    assert list(one.failures) == ["tests/server/test_c.py::test_d", "tests/unit/test_a.py::test_b"]
    assert (other.row, other.laid_over, other.passed) == ("tree", 7, {})
    page = kept.read_text(encoding="utf-8")
    assert "| 0.99.0 with 7 newer files | tree: " in page
    assert "| 2026-11-27 | 15 | 2 | 2 |" in page
    assert "- `tests/server/test_c.py::test_d` (0.99.0, kitchen): bad" in page
    assert page.startswith("# ")


def test_whole_folders_are_noted_and_nothing_narrower(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And `--again` runs what failed the last time, and nothing where nothing did."""
    row, bed, test = ROWS["kitchen"], Bed(venv=tmp_path, cache=tmp_path), "tests/server/test_a.py::test_b"
    ran: list[list[str]] = []
    outcomes = [matrix.Outcome(3, 1), matrix.Outcome(4, 0), matrix.Outcome(5, 0, {test: "bad"}), matrix.Outcome(1, 0)]

    def run_tests(_bed: Bed, tests: Sequence[str], _env: object, _workers: int) -> matrix.Outcome:
        ran.append(list(tests))
        return outcomes.pop(0)

    monkeypatch.setattr(matrix, "run_tests", run_tests)
    monkeypatch.setattr(matrix, "about", lambda *_: ABOUT)
    monkeypatch.setattr(matrix.subprocess, "call", lambda command, **_: ran.append(command[3:]) or 1)
    run = partial(matrix.run_row, bed, row, tmp_path, workers=2)
    assert run([], again=False) == 1
    assert ran == [["tests/unit"], ["tests/contract"], ["tests/server"]]
    (entry,) = tested.entries()
    assert (entry.passed, list(entry.failures)) == ({"tests/unit": 3, "tests/contract": 4, "tests/server": 5}, [test])
    assert run([], again=True) == 0 and ran.pop() == [test]
    (entry,) = tested.entries()
    assert (entry.passed, entry.failures) == ({"tests/unit": 3, "tests/contract": 4, "tests/server": 6}, {})
    before = kept.read_text(encoding="utf-8")
    assert run(["tests/unit/test_a.py", "-k", "b"], again=False) == 1
    assert ran.pop() == ["tests/unit/test_a.py", "-k", "b"] and kept.read_text(encoding="utf-8") == before


def test_why_something_fails_is_kept_as_long_as_it_does(kept: Path) -> None:
    """What was run again and passes, has passed."""
    one, two = "tests/unit/test_a.py::test_one", "tests/unit/test_a.py::test_two"
    entry = tested.entry_of("kitchen", ABOUT)
    entry.note("tests/unit", 3, 0, {one: "bad", two: "worse"})
    entry.failures[one]["why"] = "torch has no such thing"
    tested.keep(entry)
    entry = tested.entry_of("kitchen", ABOUT)
    entry.note("tests/unit", 3, 0, {one: "bad again", two: "worse"})
    assert entry.failures[one] == {"said": "bad again", "why": "torch has no such thing"}
    entry.mend([one, two], {one: "bad again"})
    tested.keep(entry)
    assert list(entry.failures) == [one] and entry.passed == {"tests/unit": 4}
    assert "torch has no such thing" in kept.read_text(encoding="utf-8")
    entry.note("tests/unit", 5, 0, {})
    assert entry.failures == {}


def test_what_another_person_wrote_on_the_page_stays(kept: Path) -> None:
    kept.write_text("# Title\n\nWords.\n\n<!-- tested:begin -->\nold\n<!-- tested:end -->\n\nMore words.\n")
    tested.keep(tested.entry_of("pinned", ABOUT))
    page = kept.read_text(encoding="utf-8")
    assert page.startswith("# Title\n\nWords.\n") and page.endswith("<!-- tested:end -->\n\nMore words.\n")
    assert "old" not in page
