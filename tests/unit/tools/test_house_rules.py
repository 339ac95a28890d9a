"""The rules of the house, read from the source: who may import whom, and what the pages may name and promise."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from fusestream import kernels_cuda
from fusestream.fusion.base import hooks
from fusestream.kernels_cuda import OPS
from fusestream.kernels_cuda.registry import Op

ROOT = Path(__file__).resolve().parents[3]
# Each folder, and the other folders of the pack it may import from.
MAY_IMPORT = {
    "nodes": {"fusion", "memory", "kernels_cuda"},
    "fusion": {"memory", "kernels_cuda", "gpu"},
    "memory": {"gpu"},
    "kernels_cuda": {"gpu"},
    "gpu": set(),
}
BELOW_FUSION = ("memory", "kernels_cuda", "gpu")
COMFYUI = {
    "comfy",
    "comfy_api",
    "comfy_execution",
    "comfy_extras",
    "folder_paths",
    "server",
    "execution",
    "node_helpers",
}
SOURCES = [path for folder in MAY_IMPORT for path in sorted((ROOT / folder).rglob("*.py"))]

FAMILIES = ROOT / "fusion" / "families"
# The floors of fusion, from the ground up: a folder imports from itself and from those before it.
FLOORS = (
    "base",
    "weights",
    "files",
    "stream",
    "fused",
    "vae",
    "graphs",
    "sparse",
    "step_cache",
    "patcher",
    "compatibility",
    "text",
    "networks",
    "families",
    "identify",
    "sampling",
    "load",
    "live",
    "report",
    "doctor",
    "estimate",
)

NETWORKS = ROOT / "fusion" / "networks"
BESIDE_NETWORKS = [
    path for path in SOURCES if path.is_relative_to(ROOT / "fusion") and not path.is_relative_to(NETWORKS)
]

TESTS = {"tests", "bed", *(path.stem for path in (ROOT / "tests").iterdir())}

PAGES = [
    ROOT / "README.md",
    ROOT / "bench" / "README.md",
    ROOT / "bench" / "results.md",
    ROOT / "bench" / "turing" / "README.md",
    ROOT / "bench" / "lab" / "README.md",
    ROOT / "kernels_cuda" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
FOLDERS = (*MAY_IMPORT, "bench", "checkpoints", "tests", "tools", "docs", "workflows", "subgraphs", "locales")
SUFFIXES = (".py", ".md", ".json", ".cu", ".cuh", ".svg", ".png")
# What pages name that is a user's, ComfyUI's, or made by a command.
ELSEWHERE = (
    "models/",
    "ComfyUI/",
    "ComfyUI_windows_portable/",
    "custom_nodes/",
    "comfy/",
    "output/",
    "build/",
    ".venv",
    ".cache",
    "/dev/",
)
# What one page names so: an op that nobody has, to show how one is added; a file of ComfyUI's, and of another project.
NOT_HERE = {
    "kernels_cuda/README.md": {
        "src/foo.cu",
        "ops/foo.py",
        "bench/rows/foo.py",
        "tests/gpu/test_foo.py",
        "tests/unit/test_kernels_foo.py",
    },
    "bench/README.md": {"main.py"},
    "bench/turing/README.md": {"utils/Compute_Throughput.png"},
}


@functools.cache
def imported(path: Path, root: Path = ROOT) -> set[str]:
    """The absolute names a file imports, and its relative ones resolved to `pack/folder/...`."""
    package = path.relative_to(root).parent.parts
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module or "")
        elif isinstance(node, ast.ImportFrom):
            base = ("pack", *package)[: len(package) + 2 - node.level]
            tail = tuple(node.module.split(".")) if node.module else ()
            found |= {"/".join((*base, *tail, alias.name)) for alias in node.names}
    return found


def pack_folder(name: str) -> str | None:
    parts = name.split("/")
    return parts[1] if parts[0] == "pack" and len(parts) > 1 else None


def of_each(paths: Sequence[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """One test of all these files, which names those that break the rule: a thousand tests of a millisecond take ten seconds."""

    def of_all(rule: Callable[[Path], None]) -> Callable[[], None]:
        def breach(path: Path) -> str:
            try:
                rule(path)
            except AssertionError as error:
                return f"{path.relative_to(ROOT).as_posix()}: {error}"
            return ""

        def test() -> None:
            wrong = [said for path in paths if (said := breach(path))]
            assert paths and not wrong, "\n".join(wrong)

        test.__name__, test.__doc__ = rule.__name__, rule.__doc__
        return test

    return of_all


@of_each(SOURCES)
def test_imports_run_one_way(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    allowed = MAY_IMPORT[folder] | {folder, None}
    wrong = {name for name in imported(path) if pack_folder(name) not in allowed}
    assert not wrong, f"{folder} may import from {sorted(MAY_IMPORT[folder]) or 'no other folder'}"


@of_each(SOURCES)
def test_pack_imports_itself_relatively(path: Path) -> None:
    wrong = {name for name in imported(path) if name.split(".")[0] in {*MAY_IMPORT, "fusestream"}}
    assert not wrong, "the pack's own modules are imported relatively: ComfyUI has a top-level `nodes` of its own"


@of_each([p for p in SOURCES if p.relative_to(ROOT).parts[0] in BELOW_FUSION])
def test_nothing_below_fusion_knows_comfyui(path: Path) -> None:
    wrong = {name for name in imported(path) if name.split(".")[0] in COMFYUI}
    assert not wrong


def test_the_rules_see_a_breach(tmp_path: Path) -> None:
    path = tmp_path / "memory" / "deep" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text("from ...fusion import load\nfrom ..file import y\nimport comfy.sd\nfrom . import z\n")
    found = imported(path, tmp_path)
    assert found == {"pack/fusion/load", "pack/memory/file/y", "comfy.sd", "pack/memory/deep/z"}
    assert {pack_folder(name) for name in found} == {"fusion", "memory", None}


def on_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported: none in functions, nor for types alone."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from on_import(node.orelse)
            continue
        yield node
        handlers = [one for handler in getattr(node, "handlers", []) for one in handler.body]
        yield from on_import(
            [one for name in ("body", "orelse", "finalbody") for one in getattr(node, name, [])] + handlers
        )


def loaded(path: Path, root: Path = ROOT) -> set[Path]:
    """The pack's modules that a file imports as soon as it is imported itself."""

    def module(at: Path) -> Path | None:
        return next((found for found in (at.with_suffix(".py"), at / "__init__.py") if found.is_file()), None)

    found: set[Path | None] = set()
    for node in on_import(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = root.joinpath(*path.relative_to(root).parent.parts[: len(path.relative_to(root).parts) - node.level])
            base = base.joinpath(*node.module.split(".")) if node.module else base
            found |= {module(base / alias.name) or module(base) for alias in node.names}
    return found - {None}


def test_no_module_needs_itself() -> None:
    """What is imported in a circle works or fails by which of it comes first."""
    graph = {path: loaded(path) for path in SOURCES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(str(path.relative_to(ROOT)) for path in error.args[1]))


def test_a_circle_is_found_out(tmp_path: Path) -> None:
    files = {
        "memory/__init__.py": "from .a import x",
        "memory/a.py": "try:\n    from .b import y\nexcept ImportError:\n    from . import c",
        "memory/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import x\n"
        "def f():\n    from . import a",
        "memory/c.py": "import torch\nfrom ..memory.deep import z",
        "memory/deep/__init__.py": "from .. import a",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    graph = {name: {str(at.relative_to(tmp_path)) for at in loaded(tmp_path / name, tmp_path)} for name in files}
    assert graph == {
        "memory/__init__.py": {"memory/a.py"},
        "memory/a.py": {"memory/b.py", "memory/c.py"},
        "memory/b.py": set(),
        "memory/c.py": {"memory/deep/__init__.py"},
        "memory/deep/__init__.py": {"memory/a.py"},
    }
    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()


def loaded_with(paths: Sequence[Path]) -> set[Path]:
    """These, and all that is imported with them."""
    found, left = set(paths), list(paths)
    while left:
        new = loaded(left.pop()) - found
        found |= new
        left += new
    return found


def test_who_lists_the_families_imports_neither_kernels_nor_comfyui() -> None:
    found = loaded_with(sorted(FAMILIES.glob("**/__init__.py")))
    assert ROOT / "kernels_cuda" / "__init__.py" in loaded_with([FAMILIES / "wan" / "block.py"])
    kernels = [path for path in found if path.is_relative_to(ROOT / "kernels_cuda")]
    heavy = [
        path
        for path in found
        for node in on_import(ast.parse(path.read_text(encoding="utf-8")).body)
        if isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0)
        for name in [getattr(node, "module", None), *(alias.name for alias in node.names)]
        if name and name.split(".")[0] in COMFYUI
    ]
    assert not kernels and not heavy, "a family names its functions over them by `Late`"


def test_no_empty_placeholder_modules() -> None:
    modules = [path for path in SOURCES if path.name != "__init__.py"]
    empty = [path for path in modules if len(path.read_text(encoding="utf-8").split()) < 20]
    assert not empty


@of_each([p for p in SOURCES if p.is_relative_to(FAMILIES)])
def test_families_do_not_know_each_other(path: Path) -> None:
    if path.parent == FAMILIES:
        return  # the list of them
    own = "/".join(("pack", *path.relative_to(ROOT).parts[:3], ""))
    found = {name for name in imported(path) if name.startswith("pack/fusion/families/")}
    assert not {name for name in found if not name.startswith(own)}, "what two families need moves down into fusion"


@of_each(BESIDE_NETWORKS)
def test_no_model_knows_the_networks_that_are_none(path: Path) -> None:
    """What was measured of models does not grow old with them: bench/sources.py."""
    assert not {name for name in imported(path) if name.startswith("pack/fusion/networks")}


def test_every_folder_of_fusion_is_a_floor() -> None:
    folders = {path.name for path in (ROOT / "fusion").iterdir() if any(path.glob("*.py"))}
    files = {path.name for path in (ROOT / "fusion").glob("*.py")}
    assert folders == set(FLOORS) and files == {"__init__.py"}, (
        "what is new in fusion has a folder, and that has its place"
    )


@of_each([p for p in SOURCES if p.is_relative_to(ROOT / "fusion") and p.parent.name != "fusion"])
def test_floors_stand_on_those_below(path: Path) -> None:
    """Imports in functions and for types count too: they hide a circle, they do not break it."""
    own = FLOORS.index(path.relative_to(ROOT).parts[1])
    asked = {parts[2] for name in imported(path) if (parts := name.split("/"))[:2] == ["pack", "fusion"]}
    assert asked <= {*FLOORS[: own + 1]}


def rooms(root: Path, sources: Sequence[Path]) -> dict[str, set[str]]:
    """Of each folder, and of each file beside folders, which of its neighbours it imports from, wherever in the file it does."""
    modules = {path.relative_to(root).with_suffix("").as_posix(): path for path in sources}
    places = {name.removesuffix("/__init__"): name for name in modules}
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        here = name.removesuffix("/__init__").split("/")
        for asked in imported(path, root):
            there = asked.removeprefix("pack/").split("/") if asked.startswith("pack/") else []
            while there and "/".join(there) not in places:
                there = there[:-1]
            common = next((i for i, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]), None)
            if common is not None:  # else one of them is the face of a folder that the other is in
                found.setdefault("/".join(here[: common + 1]), set()).add("/".join(there[: common + 1]))
    return found


def test_no_folder_needs_itself() -> None:
    """Not by way of others, whichever of its files it is that they ask for."""
    try:
        TopologicalSorter(rooms(ROOT, SOURCES)).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_a_circle_of_folders_is_found_out(tmp_path: Path) -> None:
    files = {
        "memory/a/__init__.py": "",
        "memory/a/one.py": "from ..b.two import x",
        "memory/b/two.py": "import torch",
        "memory/b/three.py": "def f():\n    from ..a import one",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = rooms(tmp_path, [tmp_path / name for name in files])
    assert found == {"memory/a": {"memory/b"}, "memory/b": {"memory/a"}}


HOOKS = ROOT / "fusion" / "base" / "hooks.py"
HUNG = re.compile(r"_?fusestream_\w+")


@of_each([p for p in SOURCES if p.relative_to(ROOT).parts[0] in ("fusion", "nodes") and p != HOOKS])
def test_what_hangs_on_comfyuis_objects_has_its_name_in_one_file(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    spelled = {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and HUNG.fullmatch(str(node.value))
    }
    assert not spelled, "it stands in base/hooks.py, with who sets and who reads it"
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    attributes |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    attributes |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert {name for name in attributes if HUNG.fullmatch(name)} <= hooks.ATTRIBUTES.keys()


def test_no_name_in_that_list_is_left_over() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in SOURCES if path != HOOKS)
    constants = [name for name in vars(hooks) if name.isupper() and name != "ATTRIBUTES"]
    unused = [name for name in (*constants, *hooks.ATTRIBUTES) if not re.search(rf"\b{name}\b", code)]
    assert constants and not unused


def functions_of_ops() -> dict[str, set[str]]:
    """Each op, and the public functions that call it: `conv` is what conv2d and conv3d call. Where that is a method, the object
    that has it, too."""
    found: dict[str, set[str]] = {name: set() for name in OPS}
    holders: dict[int, set[str]] = {}  # names of objects that have ops, by which others may ask for them
    for module in [module for path, module in sys.modules.items() if path.startswith(f"{kernels_cuda.__name__}.ops.")]:
        for name, value in vars(module).items():
            holders.setdefault(id(value), set()).add(name)
    for name in kernels_cuda.__all__:
        function = getattr(kernels_cuda, name)
        code, names = getattr(function, "__code__", None), dict(getattr(function, "__globals__", {}))
        own = getattr(function, "__self__", None)
        names |= {} if own is None else vars(own)
        for used in code.co_names if code else ():
            if isinstance(names.get(used), Op):
                found[names[used].name] |= {name, *(() if own is None else holders[id(own)])}
    return found


def test_every_op_is_reached() -> None:
    """By a family or what it stands on, by a module, or by another op: nobody else's op has to be kept alive."""
    asking = [p for p in SOURCES if p.is_relative_to(ROOT / "fusion") or p.is_relative_to(ROOT / "kernels_cuda")]
    asked = {
        name.rsplit("/", 1)[1]
        for path in asking
        if path != ROOT / "kernels_cuda" / "__init__.py"
        for name in imported(path)
        if name.startswith("pack/kernels_cuda/")
    }
    assert all(functions_of_ops().values()), "an op without a public function"
    unreached = {op for op, functions in functions_of_ops().items() if not functions & asked}
    assert not unreached, "an op that nobody asks for goes"


@of_each(sorted((ROOT / "bench").rglob("*.py")))
def test_the_bench_does_without_the_tests(path: Path) -> None:
    wrong = {name for name in imported(path) if name.startswith("pack/tests") or name.split(".")[0] in TESTS}
    assert not wrong, "what tests and bench share is in checkpoints"


def test_ci_runs_the_commands_that_contributors_are_given() -> None:
    given = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    commands = [line for line in ci.splitlines() if line.startswith("python3 ")]
    assert commands == ["python3 dev.py test"]
    assert all(re.search(rf"^{re.escape(command)}$", given, re.MULTILINE) for command in commands)


@of_each(PAGES)
def test_pages_name_only_commands_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    dev = (ROOT / "dev.py").read_text(encoding="utf-8")
    for command in set(re.findall(r"dev\.py (\w+)", text)):
        assert f'"{command}":' in dev, command
    parts = (ROOT / "bench" / "__main__.py").read_text(encoding="utf-8")
    for part in set(re.findall(r"(?:python|dev\.py) bench ([a-z]\w*)", text)):
        assert f'"{part}"' in parts, part


def named_files(text: str) -> set[str]:
    """What looks like a file or a folder of this tree: a path, or a name with a suffix of ours. Code is no prose."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = [span for span in re.findall(r"`([^`\n]+)`", prose) if re.fullmatch(r"[\w./-]+", span)]
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in link]
    paths = {span for span in spans if "/" in span or span.endswith(SUFFIXES)} | set(filter(None, links))
    return {path for path in paths if not path.startswith(ELSEWHERE)}


@of_each(PAGES)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    names = named_files(page.read_text(encoding="utf-8")) - NOT_HERE.get(page.relative_to(ROOT).as_posix(), set())
    files = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*")} | {
        path.name for path in ROOT.iterdir()
    }
    missing = [
        name
        for name in names
        if not (ROOT / name).exists() and not (page.parent / name).exists() and ("/" in name or name not in files)
    ]
    assert not missing


def test_a_file_that_is_not_there_is_found_out() -> None:
    text = "`a/b.py` and `x.md`, not `a / b.py`, `models/vae`, `op` nor `https://c/d.py`; [e](docs/f.md#g) [h](https://i/j.md)"
    assert named_files(f"{text}\n```\n`k/l.py`\n```\n") == {"a/b.py", "x.md", "docs/f.md"}
