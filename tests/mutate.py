"""Do the tests notice? Changes one operator or number of a module at a time, and looks whether its tests fail.

    .venv/bin/python tests/mutate.py --number 200 --seed 1 --jobs 8      a sample of all modules of the table
    .venv/bin/python tests/mutate.py memory/plan.py                      every mutation of one module

`mutations.py` beside this file says which tests watch over which module, and explains the survivors that change nothing a
caller could see. Nothing is written to the checkout: each worker has a copy of the tree. A mutation is caught if a test fails
or does not end; one that survives is either a test that lacks, or goes into the list with the reason why no test can see it.

Left alone are words, type hints, decorators, assertions, protocols, what another operating system runs, and the numbers of
settings, `MOST = 4096` at the top of a module: one more or less is nobody's loss.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import math
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEAST_RATE = 0.9
# Of a module's tests without a mutation: the machine may be busier later, and the first run also compiles.
LIMIT_TIMES, LIMIT_SECONDS = 3.0, 30.0
NOT_COPIED = {".git", ".venv", ".cache", ".hypothesis", ".gpu", "build", "output", "shared"}  # of the root's folders

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutation:
    """Bytes `[begin, end)` of a module become `new`.

    was, now   the lines it touches before and after, as one: with module and scope its name, which other lines' coming and
               going does not change
    """

    module: str
    scope: str
    line: int
    begin: int
    end: int
    new: str
    was: str
    now: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.module, self.scope, self.was, self.now

    def applied(self, source: bytes) -> bytes:
        return source[: self.begin] + self.new.encode() + source[self.end :]


@dataclass(frozen=True)
class Survivor:
    """A mutation that no test can catch, and why: what differs is nothing that a caller can see, or could want."""

    module: str
    scope: str
    was: str
    now: str
    why: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.module, self.scope, self.was, self.now


@dataclass(frozen=True)
class Result:
    mutation: Mutation
    verdict: str  # caught; caught, no end; survived; explained; not tried: its tests fail without it
    seconds: float
    by: str = ""


# --------------------------------------------------------------------------------------------------------- finding them


def mutations_of(source: bytes, module: str, system: str = sys.platform) -> list[Mutation]:
    """All of a module, in the order of its lines. system: as sys.platform names it."""
    finder = _Finder(source, module, system)
    finder.visit(ast.parse(source))
    return sorted(finder.found, key=lambda one: (one.begin, one.end, one.new))


class _Finder(ast.NodeVisitor):
    def __init__(self, source: bytes, module: str, system: str) -> None:
        self.found: list[Mutation] = []
        self._source, self._module, self._system = source, module, system
        self._scope: list[str] = []
        self._is_setting = False
        self._begins = [0]  # of lines
        for line in source.splitlines(keepends=True):
            self._begins.append(self._begins[-1] + len(line))
        self._lines = source.decode().splitlines()
        self._tokens = [
            (self._offset(token.start), self._offset(token.end), token.string)
            for token in tokenize.tokenize(io.BytesIO(source).readline)
            if token.type in (tokenize.OP, tokenize.NAME)
        ]
        self._token_begins = [begin for begin, _, _ in self._tokens]

    # ------------------------------------------------------------------------------------------------ where things are

    def _offset(self, place: tuple[int, int]) -> int:
        """Of a line and a column in characters, as tokens have them."""
        line, column = place
        text = self._lines[line - 1] if 0 < line <= len(self._lines) else ""
        return self._begins[max(line - 1, 0)] + len(text[:column].encode())

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Of a node, whose columns are in bytes."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._begins[node.lineno - 1] + node.col_offset, self._begins[node.end_lineno - 1] + node.end_col_offset

    def _between(self, left: ast.expr, right: ast.expr, spelling: str) -> tuple[int, int]:
        """Where the operator between two operands stands: brackets and comments may be there too."""
        return self._words(self._span(left)[1], self._span(right)[0], spelling)

    def _words(self, begin: int, end: int, spelling: str) -> tuple[int, int]:
        words = spelling.split()
        at = bisect_left(self._token_begins, begin)
        while self._tokens[at][0] < end:
            if [text for _, _, text in self._tokens[at : at + len(words)]] == words:
                return self._tokens[at][0], self._tokens[at + len(words) - 1][1]
            at += 1
        raise AssertionError(f"{self._module}: no {spelling!r} between bytes {begin} and {end}")

    def _add(self, span: tuple[int, int], new: str) -> None:
        begin, end = span
        first = bisect_left(self._begins, begin + 1) - 1
        last = bisect_left(self._begins, max(end, begin + 1)) - 1
        start, stop = self._begins[first], self._begins[last + 1]
        was = self._source[start:stop]
        now = self._source[start:begin] + new.encode() + self._source[end:stop]
        scope = ".".join(self._scope)
        self.found.append(Mutation(self._module, scope, first + 1, begin, end, new, _one_line(was), _one_line(now)))

    # ------------------------------------------------------------------------------------------------ what is left alone

    def visit_Module(self, node: ast.Module) -> None:
        self._all(node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if not any(_last_name(base) == "Protocol" for base in node.bases):
            self._within(node.name, node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._scope.append(node.name)
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        self._scope.pop()
        self._within(node.name, node.body)

    def _within(self, name: str, body: Sequence[ast.stmt]) -> None:
        self._scope.append(name)
        self._all(body)
        self._scope.pop()

    def _all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = [_last_name(target) for target in node.targets]
        is_type = not self._scope and isinstance(node.value, ast.BinOp | ast.Subscript) and names[0][:1].isupper()
        if names == ["__all__"] or (is_type and not names[0].isupper()):
            return
        before, self._is_setting = self._is_setting, not self._scope and names[0].isupper()
        self.generic_visit(node)
        self._is_setting = before

    def visit_Assert(self, node: ast.Assert) -> None: ...

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # of zip: an assertion too
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_If(self, node: ast.If) -> None:
        """Of a question for the system only what this one answers, and the question neither."""
        if _last_name(node.test) == "TYPE_CHECKING":
            return
        system = _asked_for(node.test)
        if system is None:
            self.generic_visit(node)
        else:
            self._all(node.body if self._system.startswith(system) else node.orelse)

    # ------------------------------------------------------------------------------------------------ what is changed

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for i, operator in enumerate(node.ops):
            spelling, other = COMPARISONS[type(operator)]
            self._add(self._between(operands[i], operands[i + 1], spelling), other)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in ARITHMETIC and not (_is_words(node.left) or _is_words(node.right)):
            spelling, other = ARITHMETIC[type(node.op)]
            self._add(self._between(node.left, node.right, spelling), other)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in ARITHMETIC:
            spelling, other = ARITHMETIC[type(node.op)]
            self._add(self._between(node.target, node.value, spelling + "="), other + "=")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        spelling, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._add(self._between(left, right, spelling), other)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            begin = self._span(node)[0]
            self._add(self._words(begin, self._span(node.operand)[0], "not"), "")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in SWAPPED:
            self._add(self._span(node.func), SWAPPED[node.func.id])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if self._is_setting:
            return
        if isinstance(value, bool):
            self._add(self._span(node), str(not value))
        elif isinstance(value, int):
            for other in (value - 1, value + 1):
                self._add(self._span(node), str(other) if other >= 0 else f"({other})")
        elif isinstance(value, float):
            self._add(self._span(node), repr(value + 1))

    def visit_Return(self, node: ast.Return) -> None:
        # A constant is changed by itself, and who asks whether something is true takes None for False.
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self._add(self._span(node.value), "None")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            if _is_log(node.value):
                return
            self._add(self._span(node), "pass")
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._add(self._span(node), "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add(self._span(node), "break")


def _one_line(lines: bytes) -> str:
    """Without the comments at the ends: what they say changes more often than what they are about."""
    return " ".join(" ".join(re.sub(r"(?:^|\s)#( .*)?$", "", line) for line in lines.decode().splitlines()).split())


def _last_name(node: ast.AST) -> str:
    """`Protocol` of typing.Protocol."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_words(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_log(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and _last_name(call.func.value) in ("logging", "log")


def _asked_for(test: ast.expr) -> str | None:
    """`win32` of `sys.platform == "win32"`, `nt`'s too."""
    if (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.Eq)
        and _last_name(test.left) in ("platform", "name")
    ):
        other = test.comparators[0]
        if isinstance(other, ast.Constant) and isinstance(other.value, str):
            return "win32" if other.value == "nt" else other.value
    return None


# ------------------------------------------------------------------------------------------------------------ trying one


class Tree:
    """A copy of the checkout in which one module at a time is changed, and a process that runs its tests."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        self._nursery: subprocess.Popen[str] | None = None

        def left_out(at: str, names: list[str]) -> set[str]:
            return {"__pycache__"} | (NOT_COPIED & set(names) if Path(at) == root else set())

        shutil.copytree(root, folder, ignore=left_out, symlinks=True)
        if hasattr(os, "fork"):
            command = [sys.executable, str(folder / "tests" / "nursery.py")]
            self._nursery = subprocess.Popen(
                command, env=_environment(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self._heard()

    def run(self, tests: Sequence[str], limit: float = math.inf) -> tuple[int | None, str]:
        """Pytest's exit code, None if it did not end in time; and what it said."""
        arguments = [
            "-x",
            "-q",
            "-rfE",
            "--no-header",
            "--tb=line",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
            *tests,
        ]
        log = self.folder.with_suffix(".log")
        run = self._in_process if self._nursery is None else self._in_child
        code = run(arguments, log, min(limit, threading.TIMEOUT_MAX))
        return code, log.read_text(encoding="utf-8", errors="replace")

    def _in_child(self, arguments: list[str], log: Path, limit: float) -> int | None:
        assert self._nursery is not None and self._nursery.stdin is not None
        job = {"folder": str(self.folder), "arguments": arguments, "log": str(log)}
        print(json.dumps(job), file=self._nursery.stdin, flush=True)
        child = int(self._heard())
        late = threading.Event()

        def end() -> None:
            late.set()
            os.killpg(child, signal.SIGKILL)

        timer = threading.Timer(limit, end)
        timer.start()
        code = int(self._heard())
        timer.cancel()
        return None if late.is_set() else code

    def _heard(self) -> str:
        """The nursery's next line."""
        assert self._nursery is not None and self._nursery.stdout is not None
        line = self._nursery.stdout.readline()
        if not line:
            raise RuntimeError("tests/nursery.py has ended; what it said is above")
        return line

    def _in_process(self, arguments: list[str], log: Path, limit: float) -> int | None:
        with log.open("wb") as said:
            try:
                return subprocess.run(
                    [sys.executable, "-m", "pytest", *arguments],
                    check=False, cwd=self.folder, env=_environment(), stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                    timeout=limit,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                return None

    def close(self) -> None:
        if self._nursery is not None:
            self._nursery.communicate()

    def try_out(self, mutation: Mutation, tests: Sequence[str], limit: float) -> Result:
        path = self.folder / mutation.module
        source = path.read_bytes()
        start = time.monotonic()
        try:
            path.write_bytes(mutation.applied(source))
            _forget_compiled(path)
            code, said = self.run(tests, limit)
        finally:
            path.write_bytes(source)
            _forget_compiled(path)
        seconds = time.monotonic() - start
        if code == 0:
            return Result(mutation, "survived", seconds)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
        return Result(
            mutation, "caught" if code is not None else "caught, no end", seconds, failed[1] if failed else ""
        )


def _environment() -> dict[str, str]:
    """Of the tests: on the CPU, so that they are the same on every machine, and with one thread each."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NO_COLOR": "1"}


def _forget_compiled(path: Path) -> None:
    """Python tells whether its compiled file is of this source by the time and the size, and both may be the same."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


# ----------------------------------------------------------------------------------------------------------- the sample


def stale(survivors: Iterable[Survivor], found: Iterable[Mutation]) -> list[Survivor]:
    """What the list explains, and the modules no longer have."""
    there = {mutation.key for mutation in found}
    return [survivor for survivor in survivors if survivor.key not in there]


def rate_of(results: Sequence[Result]) -> float:
    """The share of those tried that was caught; what is explained was not."""
    tried = [result.verdict for result in results if result.verdict != "not tried"]
    return sum(verdict.startswith("caught") for verdict in tried) / max(len(tried), 1)


def try_all(
    root: Path, chosen: Sequence[Mutation], tests: dict[str, tuple[str, ...]], survivors: Iterable[Survivor], jobs: int
) -> Iterator[Result]:
    """Each of them, as they are done."""
    explained = {survivor.key for survivor in survivors}
    yield from (Result(mutation, "explained", 0.0) for mutation in chosen if mutation.key in explained)
    rest = [mutation for mutation in chosen if mutation.key not in explained]
    with tempfile.TemporaryDirectory(prefix="mutate-", ignore_cleanup_errors=True) as folder:
        trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        with ThreadPoolExecutor(jobs) as pool:
            made = list(pool.map(lambda number: Tree(root, Path(folder) / f"tree{number}"), range(jobs)))
            for tree in made:
                trees.put(tree)

            def limit_of(test: str) -> float | None:
                """Seconds that a test file may take; None: it fails as it is."""
                tree, start = trees.get(), time.monotonic()
                try:
                    code, said = tree.run([test])
                finally:
                    trees.put(tree)
                if code != 0:
                    print(f"{test} fails without any mutation:\n{said[-3000:]}", flush=True)
                    return None
                return LIMIT_SECONDS + LIMIT_TIMES * (time.monotonic() - start)

            files = sorted({test for mutation in rest for test in tests[mutation.module]})
            limits = dict(zip(files, pool.map(limit_of, files), strict=True))

            def try_one(mutation: Mutation) -> Result:
                watchers = tests[mutation.module]
                each = [limit for test in watchers if (limit := limits[test]) is not None]
                if len(each) < len(watchers):
                    return Result(mutation, "not tried", 0.0)
                tree = trees.get()
                try:
                    return tree.try_out(mutation, watchers, sum(each))
                finally:
                    trees.put(tree)

            futures = [pool.submit(try_one, mutation) for mutation in rest]
            try:
                for future in as_completed(futures):
                    yield future.result()
            finally:
                for future in futures:
                    future.cancel()
                wait(futures)
                for tree in made:
                    tree.close()


def main(arguments: Sequence[str] | None = None) -> int:
    sys.path.insert(0, str(Path(__file__).parent))
    import mutations

    options = _command_line(sorted(mutations.TESTS)).parse_args(arguments)
    modules = options.modules or sorted(mutations.TESTS)
    found = [one for module in sorted(mutations.TESTS) for one in mutations_of((ROOT / module).read_bytes(), module)]
    for survivor in (old := stale(mutations.SURVIVORS, found)):
        print(f"tests/mutations.py explains what is not there any more: {survivor.module}: {survivor.was}")
    if old:
        return 2
    listed = {survivor.key for survivor in mutations.SURVIVORS}
    chosen = [one for one in found if one.module in modules and mutations.is_watched(one)]
    if options.listed:
        chosen = [one for one in chosen if one.key in listed]
    elif options.number:
        chosen = random.Random(options.seed).sample(chosen, min(options.number, len(chosen)))
    print(f"{len(chosen)} mutations of {len(modules)} modules, {options.jobs} at a time", flush=True)
    results: list[Result] = []
    known = [] if options.listed else mutations.SURVIVORS
    for result in try_all(ROOT, chosen, mutations.TESTS, known, options.jobs):
        results.append(result)
        one = result.mutation
        print(
            f"{result.verdict:14} {result.seconds:5.1f} s  {one.module}:{one.line}  {one.was}  ->  {one.now}",
            flush=True,
        )
        if options.out:
            _write(options.out, results, options)
    return _verdict(results, options.listed)


def _verdict(results: Sequence[Result], listed: bool) -> int:
    print()
    counts = Counter(result.verdict for result in results)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    if listed:
        caught = [result for result in results if result.verdict.startswith("caught")]
        for result in caught:
            print(f"caught by {result.by}, so tests/mutations.py need not explain it: {result.mutation.was}")
        return 1 if caught else 0
    for result in results:
        if result.verdict == "survived":
            one = result.mutation
            print(f"\nA test lacks, or tests/mutations.py a reason ({one.module}:{one.line}):")
            print(f"    Survivor({one.module!r}, {one.scope!r}, {one.was!r}, {one.now!r}, why)")
    rate = rate_of(results)
    print(f"\n{rate:.1%} of {len(results) - counts['not tried']} were caught; {LEAST_RATE:.0%} are wanted")
    return 2 if counts["not tried"] else 0 if rate >= LEAST_RATE else 1


def _write(path: Path, results: Sequence[Result], options: argparse.Namespace) -> None:
    rows = [{**asdict(r.mutation), "verdict": r.verdict, "seconds": round(r.seconds, 1), "by": r.by} for r in results]
    data = {"seed": options.seed, "number": len(results), "rate": round(rate_of(results), 4), "results": rows}
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")


def _command_line(modules: Sequence[str]) -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser(prog="mutate.py", description=__doc__.splitlines()[0])
    cli.add_argument("modules", nargs="*", metavar="MODULE", help=f"of which; else all: {', '.join(modules)}")
    cli.add_argument("--number", type=int, default=0, help="a sample of so many; else every mutation there is")
    cli.add_argument("--seed", type=int, default=1, help="which sample")
    cli.add_argument("--jobs", type=int, default=1, help="so many at a time, each in a copy of the tree")
    cli.add_argument("--out", type=Path, metavar="FILE", help="the results as JSON too, from the first one on")
    cli.add_argument("--listed", action="store_true", help="try what the list explains: none of it may be caught")
    return cli


if __name__ == "__main__":
    sys.exit(main())
