"""How long the project is, by folder: all lines, and those of code, without blanks, comments and docstrings.

    all, code = counted(ROOT)["fusion"].whole, counted(ROOT)["fusion"].code

Counted are the tracked files of Python, CUDA and JavaScript. Of a folder with folders each stands for itself as well. A line that
has both code and a comment is code.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = (".py", ".cu", ".cuh", ".js")
TESTS = ("tests", "tools")
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
COMMENTS = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


@dataclass
class Lines:
    """Files, all of their lines, and those of code."""

    files: int = 0
    whole: int = 0
    code: int = 0

    def add(self, text: str, suffix: str) -> None:
        self.files += 1
        self.whole += text.count("\n")
        self.code += code_of_python(text) if suffix == ".py" else code_of_c(text)


def code_of_python(text: str) -> int:
    """Lines on which something stands that is neither a comment nor a docstring."""
    words: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                words |= {*range(first.lineno, (first.end_lineno or first.lineno) + 1)}
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE and token.type != tokenize.ENDMARKER:
            code |= {*range(token.start[0], token.end[0] + 1)}
    return len(code - words)


def code_of_c(text: str) -> int:
    """The same of CUDA and JavaScript. What looks like a comment in a string counts as one."""
    bare = COMMENTS.sub(lambda found: "\n" * found.group().count("\n"), text)
    return sum(bool(line.strip()) for line in bare.splitlines())


def counted(root: Path) -> Mapping[str, Lines]:
    """Of each folder of the root and of each folder in those, by its path; "" is the root's own files."""
    command = ["git", "ls-files", "-z"]
    tracked = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    found: defaultdict[str, Lines] = defaultdict(Lines)
    for name in tracked:
        path = root / name
        if path.suffix in SUFFIXES and path.exists():
            text = path.read_text(encoding="utf-8")
            parents = Path(name).parent.parts[:2]
            for place in {"/".join(parents[:depth]) for depth in range(1, len(parents) + 1)} or {""}:
                found[place].add(text, path.suffix)
    return dict(found)


def table(found: Mapping[str, Lines]) -> str:
    """As it is printed, with the sums that the house is held to: what users run and contributors measure with, and the tests."""
    rows = [(place or "(root)", _sum([each])) for place, each in sorted(found.items())]
    top = [place for place in found if "/" not in place]
    for name, places in (
        ("all but tests and tools", [p for p in top if p not in TESTS]),
        ("tests and tools", [p for p in top if p in TESTS]),
    ):
        rows.append((name, _sum([found[place] for place in places])))
    told = [f"{name:32}{files:>8}{whole:>9}{code:>9}" for name, (files, whole, code) in rows]
    return "\n".join([f"{'folder':32}{'files':>8}{'lines':>9}{'code':>9}", *told])


def _sum(parts: Sequence[Lines]) -> tuple[int, int, int]:
    return sum(p.files for p in parts), sum(p.whole for p in parts), sum(p.code for p in parts)
