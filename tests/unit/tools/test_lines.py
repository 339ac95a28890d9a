"""What counts as a line of code, and in which folder it is counted."""

from __future__ import annotations

import subprocess
from pathlib import Path

from bed import lines

PYTHON = '''"""A docstring
of two lines."""

import os  # and a comment

TEXT = """no docstring,
but two lines of code"""


def f():
    """One."""
    # a comment
    return os.name
'''
CUDA = """// a comment
/* of two
   lines */
__global__ void f() {  // and one behind code

}
"""


def test_blanks_comments_and_docstrings_are_no_code() -> None:
    assert lines.code_of_python(PYTHON) == 5
    assert lines.code_of_c(CUDA) == 2


def test_each_folder_and_each_in_it(tmp_path: Path) -> None:
    for name, text in {
        "a/b/c/one.py": PYTHON,
        "a/two.cu": CUDA,
        "tests/x.js": CUDA,
        "a/no.txt": PYTHON,
        "r.py": PYTHON,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "a" / "untracked.py").write_text(PYTHON)
    found = lines.counted(tmp_path)
    assert {place: (each.files, each.code) for place, each in found.items()} == {
        "": (1, 5),
        "a": (2, 7),
        "a/b": (1, 5),
        "tests": (1, 2),
    }
    told = lines.table(found).splitlines()
    assert told[-2].split() == [
        "all",
        "but",
        "tests",
        "and",
        "tools",
        "3",
        str(2 * PYTHON.count("\n") + CUDA.count("\n")),
        "12",
    ]
    assert told[-1].split() == ["tests", "and", "tools", "1", str(CUDA.count("\n")), "2"]
