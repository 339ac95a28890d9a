"""docs/adding-a-family.md is true: who types it has a family, known everywhere, and green tests.

In a copy of the tree the page is typed out and run, together with those tests below that hold for every family there is.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bed import families as tables
from fusestream.fusion import doctor
from fusestream.fusion.base.family import Role
from fusestream.fusion.compatibility.trial import difference
from fusestream.fusion.doctor import families as told
from fusestream.fusion.families import FAMILIES
from fusestream.nodes.kernels import MODEL_SWITCHES, TEXT_SWITCHES, VAE_SWITCHES

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "adding-a-family.md"
COPIED = (
    "__init__.py", "pyproject.toml", "checkpoints", "fusion", "gpu", "kernels_cuda", "memory", "nodes",
    "tools/bed", "tests/conftest.py", "tests/family_scenes.py", "tests/scenes.py", "tests/in_halves.py",
    "tests/int8_files.py", "tests/packed_files.py", "tests/gguf_files.py", "tests/contract/family_cases.py",
    "tests/contract/test_families.py", "tests/unit/conftest.py", "tests/unit/tools/test_adding_a_family.py",
)  # fmt: skip
LISTED = "fusion/families/__init__.py"
CASES, SUITE = "tests/contract/family_cases.py", "tests/contract/test_families.py"
FOLDER = "fusion/families/sd3"
PARTS = ("__init__", "block", "specimens")
FENCE = re.compile(r"^```(python|diff) (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# `dev.py docs` and `dev.py test`, in one process: either imports torch.
TABLES_AND_TESTS = "import sys, pytest; from bed import families; families.main(); sys.exit(pytest.main(sys.argv[1:]))"
SWITCHES = {Role.DIFFUSION: MODEL_SWITCHES, Role.TEXT: TEXT_SWITCHES, Role.VAE: VAE_SWITCHES}

each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.words)


# ------------------------------------------------------------------------------------------------ what holds for each


@each_family
def test_the_doctor_tells_it(family: Any) -> None:
    assert ("Families", told.known) in doctor.probes()
    assert f"{family.words}: {', '.join(family.ops)}" in list(told.known())


@each_family
def test_each_of_its_ops_can_be_switched(family: Any) -> None:
    switched = {op for switch in SWITCHES[family.role] for op in switch.ops}
    assert family.ops and set(family.ops) <= switched, "name what is missing in a Switch of nodes/kernels.py"


@each_family
def test_it_is_held_against_comfyuis_code(family: Any) -> None:
    """On the ComfyUI that is here they agree, in each type that the family serves."""
    assert family.specimens is not None, "nothing would tell that ComfyUI's block has changed"
    cpu = torch.device("cpu")
    with torch.inference_mode():
        for specimen in family.specimens():
            for dtype in specimen.dtypes:
                assert difference(specimen, cpu, getattr(torch, dtype)) is None, specimen.name


@each_family
def test_its_row_is_in_the_tables(family: Any) -> None:
    pages = [page for page, roles in tables.PAGES.items() if page.parent == tables.HELP and family.role in roles]
    assert pages and all(f"| {family.name} | {family.covers} |" in page.read_text(encoding="utf-8") for page in pages)


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_the_tables_are_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(tables.BLOCK.findall(text)) == 1 and tables.rendered(page) == text, "call python3 dev.py docs"


def test_the_switches_are_of_the_families_there_are() -> None:
    for role, switches in SWITCHES.items():
        had = {op for family in FAMILIES if family.role is role for op in family.ops}
        assert {op for switch in switches for op in switch.ops} <= had


# ---------------------------------------------------------------------------------------------------------- the page


not_typed = pytest.mark.skipif(not PAGE.exists() or (ROOT / FOLDER).exists(), reason="it has been typed here")


@not_typed
def test_the_pages_changes_fit_the_files_there_are(tmp_path: Path) -> None:
    """What is quick to tell: the rest is told with `--thorough`."""
    for name in (LISTED, CASES):
        copied(name, tmp_path)
    assert typed(tmp_path, PAGE.read_text(encoding="utf-8")) > {LISTED, CASES}


@pytest.mark.deep
@not_typed
def test_who_types_the_page_has_a_family(tmp_path: Path) -> None:
    tree = tmp_path / "pack"
    for name in (*COPIED, *(page.relative_to(ROOT).as_posix() for page in tables.PAGES)):
        if not (tree / name).exists():
            copied(name, tree)
    before = files(tree)
    written = typed(tree, PAGE.read_text(encoding="utf-8"))

    now = files(tree)
    assert now.keys() - before.keys() == {f"{FOLDER}/{name}.py" for name in PARTS} == written - {LISTED, CASES}
    assert {name for name in before if now[name] != before[name]} == {LISTED, CASES}
    changed = list(difflib.ndiff(before[LISTED].splitlines(), now[LISTED].splitlines()))
    assert [line for line in changed if line[0] != " "] == ['+     "sd3",'], "one line, and that is the list's"

    for check in (["check"], ["format", "--check", "--diff"]):
        asked("-m", "ruff", *check, "--no-cache", *written, tree=tree)
    without = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    tests = ("-q", "-rA", *without, "-k", "sd3 or Stable", SUITE, Path(__file__).relative_to(ROOT).as_posix())
    passed = set(re.findall(r"^PASSED \S+::(.+)$", asked("-c", TABLES_AND_TESTS, *tests, tree=tree), re.MULTILINE))
    promises = re.findall(r"^@(?:FEW|pytest.*)\ndef (test_\w+)", (tree / SUITE).read_text("utf-8"), re.MULTILINE)
    assert len(promises) > 7 and set(promises) - {"test_a_file_of_no_family_is_of_none"} <= {
        name.partition("[")[0] for name in passed if "sd3" in name
    }
    for test in (test_the_doctor_tells_it, test_each_of_its_ops_can_be_switched, test_its_row_is_in_the_tables):
        assert f"{test.__name__}[Stable Diffusion 3.5 diffusion model]" in passed


def copied(name: str, tree: Path) -> None:
    source, target = ROOT / name, tree / name
    target.parent.mkdir(parents=True, exist_ok=True)
    (shutil.copytree if source.is_dir() else shutil.copy2)(source, target)


def files(tree: Path) -> dict[str, str]:
    """Everything that can be edited, by its path."""
    found = (path for path in tree.rglob("*") if path.suffix in (".py", ".md", ".toml", ".json"))
    return {path.relative_to(tree).as_posix(): path.read_text(encoding="utf-8") for path in found}


def typed(tree: Path, page: str) -> set[str]:
    """What the page says, done: each piece of Python is a new file, each diff changes one. Returns their paths."""
    written = set()
    for language, name, text in FENCE.findall(page):
        path = tree / name
        if language == "python":
            assert not path.exists(), f"{name} is there already"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        else:
            lines = text.splitlines(keepends=True)
            old, new = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
            before = path.read_text(encoding="utf-8")
            assert before.count(old) == 1, f"{name} has no lines like those of the page any more"
            path.write_text(before.replace(old, new), encoding="utf-8")
        written.add(name)
    assert page.count("```") == 2 * len(written), "a piece that names no file"
    return written


def asked(*arguments: str, tree: Path) -> str:
    """What Python says to this in the copy."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree / "tests"), str(tree / "tools")]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tree, env=env, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
