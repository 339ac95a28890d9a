"""The script that looks whether the tests notice: what it changes, what it leaves alone, what it says."""

from __future__ import annotations

import json
from pathlib import Path

import mutate
import mutations
import pytest
from mutate import Mutation, Survivor, mutations_of

ROOT = Path(__file__).resolve().parents[3]


def changes(source: str, system: str = "linux") -> list[tuple[str, str]]:
    """What becomes what, each as one line. All of it is still Python."""
    raw = source.encode()
    found = mutations_of(raw, "module.py", system)
    for mutation in found:
        compile(mutation.applied(raw), "module.py", "exec")
    return [(mutation.was, mutation.now) for mutation in found]


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("x = a < b", ["x = a <= b"]),
        ("x = a >= b != c", ["x = a > b != c", "x = a >= b == c"]),
        ("x = a is not None", ["x = a is None"]),
        ("x = a not in b", ["x = a in b"]),
        ("x = a + b * c", ["x = a - b * c", "x = a + b // c"]),
        ("x = (a) - (b)", ["x = (a) + (b)"]),
        ("x = a ** b", ["x = a * b"]),
        ("x -= y", ["x += y"]),
        ("x = a and b and c", ["x = a or b and c", "x = a and b or c"]),
        ("x = not a", ["x = a"]),
        ("x = min(max(a), b)", ["x = max(max(a), b)", "x = min(min(a), b)"]),
        ("x = True", ["x = False"]),
        ("x = 7", ["x = 6", "x = 8"]),
        ("x = a[0]", ["x = a[(-1)]", "x = a[1]"]),
        ("x = 0.5", ["x = 1.5"]),
        ("f(a)", ["pass"]),
        ("for x in y: break", ["for x in y: continue"]),
        ("é = 'ü' if a < b else c", ["é = 'ü' if a <= b else c"]),  # columns are bytes to one, characters to the other
    ],
)
def test_each_kind_of_change(was: str, now: list[str]) -> None:
    assert changes(was) == [(was, each) for each in now]


def test_what_is_returned_may_be_forgotten_but_not_a_constant() -> None:
    assert changes("def f(x):\n    return x") == [("return x", "return None")]
    assert changes("def f():\n    return None") == []
    assert changes("def f():\n    return False") == [("return False", "return True")]


@pytest.mark.parametrize(
    "source",
    [
        '"""1 + 1 is a docstring."""',
        "def f(x: Literal[1] | None) -> list[int] | None: ...",
        "x: tuple[int, 1] = y",
        '__all__ = ["a"]',
        "Buffer = bytes | str",
        "MOST = 4096",
        "@dataclass(frozen=True)\nclass A: ...",
        "class A(Protocol):\n    x = 1",
        "assert a < b, 'no'",
        'x = f"{a + 1} of {b < c}"',
        'x = "%d" % y',
        "x = zip(a, b, strict=True)",
        "logging.info('%.1f GiB', a / 2)",
        "if TYPE_CHECKING:\n    x = 1",
    ],
)
def test_what_is_left_alone(source: str) -> None:
    assert changes(source) == []


def test_a_setting_keeps_its_number_and_not_its_operators() -> None:
    assert changes("MOST = 16 << 20") == [("MOST = 16 << 20", "MOST = 16 >> 20")]
    assert changes("def f():\n    MOST = 4") == [("MOST = 4", "MOST = 3"), ("MOST = 4", "MOST = 5")]


def test_of_two_systems_only_this_one_is_changed() -> None:
    source = 'if sys.platform == "win32":\n    x = a < b\nelse:\n    x = a > b'
    assert changes(source, "linux") == [("x = a > b", "x = a >= b")]
    assert changes(source, "win32") == [("x = a < b", "x = a <= b")]


def test_comments_and_layout_stay() -> None:
    source = b"x = [  # less than (\n    a\n    < b,  # 1 + 1\n]\n"
    (only,) = mutations_of(source, "module.py")
    assert only.applied(source) == source.replace(b"    < b", b"    <= b")
    assert (only.line, only.was, only.now) == (3, "< b,", "<= b,")


def test_a_mutation_has_a_name_that_other_lines_do_not_change() -> None:
    source = b"class A:\n    def f(self):\n        return self.a + 1  # one more\n"
    first = mutations_of(source, "module.py")
    again = mutations_of(b"# new\n\n" + source.replace(b"one more", b"a step"), "module.py")
    assert [one.key for one in first] == [one.key for one in again]
    assert first[0].key == ("module.py", "A.f", "return self.a + 1", "return None")


def test_an_entry_of_the_list_that_fits_nothing_is_found_out() -> None:
    found = mutations_of(b"x = a < b", "module.py")
    good = Survivor("module.py", "", "x = a < b", "x = a <= b", "they are never equal")
    gone = Survivor("module.py", "", "x = a > b", "x = a >= b", "they are never equal")
    assert mutate.stale([good, gone], found) == [gone]


def test_the_list_is_of_today_and_gives_reasons() -> None:
    found = [one for module in mutations.TESTS for one in mutations_of((ROOT / module).read_bytes(), module)]
    assert not mutate.stale(mutations.SURVIVORS, found)
    assert all(len(survivor.why.split()) > 2 for survivor in mutations.SURVIVORS)
    assert len({survivor.key for survivor in mutations.SURVIVORS}) == len(mutations.SURVIVORS)
    assert all((ROOT / test.partition("::")[0]).is_file() for tests in mutations.TESTS.values() for test in tests)
    scopes = {(one.module, one.scope) for one in found}
    assert all((module, scope) in scopes for module, names in mutations.ON_A_GPU.items() for scope in names)


MODULE = """
def size(a, b):
    while a < 0:
        a += 10
    return a + b, a == 3 and b
"""
TESTS = """
from module import size

def test_size():
    assert size(1, 2)[0] == 3
    assert size(-20, 2)[0] == 2
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "tests" / "test_module.py").write_text(TESTS)
    (tmp_path / "tests" / "nursery.py").write_bytes((ROOT / "tests" / "nursery.py").read_bytes())
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    return tmp_path


def tried(project: Path, monkeypatch: pytest.MonkeyPatch, *survivors: Survivor) -> dict[str, str]:
    """The verdict on each change."""
    monkeypatch.delenv("COMFYUI_PATH", raising=False)  # nothing here needs it, and it takes seconds to import
    monkeypatch.setattr(mutate, "LIMIT_SECONDS", 2.0)
    chosen = mutations_of((project / "module.py").read_bytes(), "module.py")
    results = list(mutate.try_all(project, chosen, {"module.py": ("tests/test_module.py",)}, survivors, 1))
    assert len(results) == len(chosen) and (project / "module.py").read_text() == MODULE
    return {result.mutation.now: result.verdict for result in results}


@pytest.mark.deep
def test_a_small_module_is_tried_from_end_to_end(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    equal = Survivor("module.py", "size", "while a < 0:", "while a < (-1):", "made up")
    found = tried(project, monkeypatch, equal)
    assert found == {
        "while a <= 0:": "caught",
        "while a < (-1):": "explained",
        "while a < 1:": "caught",
        "a -= 10": "caught, no end",
        "a += 9": "caught",
        "a += 11": "caught",
        "return None": "caught",
        "return a - b, a == 3 and b": "caught",
        "return a + b, a != 3 and b": "survived",
        "return a + b, a == 2 and b": "survived",
        "return a + b, a == 4 and b": "survived",
        "return a + b, a == 3 or b": "survived",
    }


def test_tests_that_fail_anyway_tell_nothing(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (project / "tests" / "test_module.py").open("a") as file:
        file.write("    assert False\n")
    assert set(tried(project, monkeypatch).values()) == {"not tried"}


def result(verdict: str) -> mutate.Result:
    return mutate.Result(Mutation("module.py", "", 1, 0, 1, "", "was", "now"), verdict, 1.0)


@pytest.mark.parametrize(
    ("caught", "survived", "explained", "not_tried", "code"),
    [(9, 1, 0, 0, 0), (8, 1, 0, 0, 1), (9, 0, 2, 0, 1), (9, 0, 1, 0, 0), (9, 0, 0, 1, 2), (0, 0, 0, 0, 1)],
)
def test_the_exit_code_tells_the_rate(caught: int, survived: int, explained: int, not_tried: int, code: int) -> None:
    """What is explained counts as not caught: a list is no way to ninety per cent."""
    results = [result("caught")] * (caught - bool(caught)) + [result("caught, no end")] * bool(caught)
    results += [result("survived")] * survived + [result("explained")] * explained + [result("not tried")] * not_tried
    assert mutate._verdict(results, listed=False) == code
    assert mutate._verdict(results, listed=True) == bool(caught), "what is listed must not be caught"


@pytest.mark.deep
def test_the_command_says_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def try_all(_root, chosen, _tests, _survivors, jobs):  # type: ignore[no-untyped-def]
        assert jobs == 3
        for mutation in chosen:
            yield mutate.Result(mutation, "survived" if mutation is chosen[0] else "caught", 1.0, "test_x")

    monkeypatch.setattr(mutate, "try_all", try_all)
    out = tmp_path / "found.json"
    arguments = ["memory/plan.py", "--number", "20", "--jobs", "3", "--out", str(out)]
    assert mutate.main(arguments) == 0
    told = json.loads(out.read_text())
    assert (told["number"], told["rate"], len(told["results"])) == (20, 0.95, 20)
    assert {row["module"] for row in told["results"]} == {"memory/plan.py"}
    assert "A test lacks" in (said := capsys.readouterr().out) and "95.0% of 20 were caught" in said
    assert mutate.main([*arguments, "--seed", "2"]) == 0
    others = json.loads(out.read_text())["results"]
    assert [row["now"] for row in others] != [row["now"] for row in told["results"]], "another sample"
    gone = Survivor("memory/plan.py", "", "x = 1", "x = 2", "made up")
    monkeypatch.setattr(mutations, "SURVIVORS", (gone,))
    assert mutate.main(arguments) == 2
    assert "explains what is not there any more: memory/plan.py: x = 1" in capsys.readouterr().out
