#!/usr/bin/env python3
"""The contributor's one tool: `python3 dev.py demo` makes a video, `python3 dev.py test` runs every check.

Needs only Python 3.10 or newer. Each command sets up what it needs: a virtual environment in `.venv`, pinned packages,
a real ComfyUI and, for the tests, a browser. What is there is used again; what a killed call left half done is repaired.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PACKAGES = ("bench", "checkpoints", "fusion", "gpu", "kernels_cuda", "memory", "nodes")
MOST_WORKERS = 4  # of the tests: each holds a torch and a ComfyUI of its own
TESTS_WRITE = 13 << 30  # bytes of model files that all tests have in the temporary folder at a time, and some more
sys.path.insert(0, str(ROOT / "tools"))

from bed import (  # noqa: E402 - the path above comes first
    browser,
    comfyui,
    depth,
    environment,
    matrix,
    overlay,
    row_venv,
    steps,
    windows,
)
from bed import lines as line_counts  # noqa: E402
from bed import tested as tested_versions  # noqa: E402
from bed import wheel as wheels  # noqa: E402
from bed.paths import Bed  # noqa: E402
from bed.rows import BROWSER, ROWS, Row  # noqa: E402
from bed.server import has_nvidia_gpu, link_folder  # noqa: E402


def main() -> int:
    options, rest = command_line().parse_known_args()
    if rest and options.command not in ("test", "matrix", "bench", "kernels", "doctor"):
        command_line().error(f"unknown arguments: {' '.join(rest)}")
    try:
        code: int = options.run(options, rest)
    except steps.SetupFailed as failure:
        print(f"\n[fusestream] {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\n[fusestream] interrupted; call again to go on", file=sys.stderr)
        return 130
    return code


def command_line() -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser(
        prog="dev.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = cli.add_subparsers(dest="command", required=True)
    add = {name: commands.add_parser(name, help=text, description=text) for name, text in HELP.items()}
    for command in add.values():
        command.add_argument("--comfyui", metavar="PATH", help="a ComfyUI folder to use instead of fetching one")
    for name, what in (("model", "diffusion model"), ("clip", "text encoder"), ("vae", "VAE")):
        add["demo"].add_argument(f"--{name}", metavar="FILE", help=f"a {what} of your own instead of the small one")
    add["demo"].add_argument(
        "--prompt", metavar="TEXT", help="what to show: the small model knows balls, boxes and triangles"
    )
    add["demo"].add_argument(
        "--output", metavar="DIR", default=ROOT / "output", type=Path, help="where to leave the results"
    )
    add["quantise"].add_argument("source", metavar="IN", type=Path, help="a safetensors file in fp16, bf16 or fp32")
    add["quantise"].add_argument("target", metavar="OUT", type=Path, help="the file to write")
    add["quantise"].add_argument(
        "--to",
        metavar="KIND",
        required=True,
        help="q8_0, q4_k, q5_k, q4_k_m (GGUF), int8, int8_convrot, convrot_w4a4, fp8 (safetensors)",
    )
    add["quantise"].add_argument("--force", action="store_true", help="replace OUT where it is there")
    add["quantise"].add_argument("--architecture", metavar="WORD", help="of a GGUF file, where it is not known")
    add["workflows"].add_argument(
        "--pictures", action="store_true", help="their pictures too, with what the small model makes: two minutes"
    )
    add["wheel"].add_argument("--output", metavar="DIR", default=ROOT / "output", type=Path, help="where to leave it")
    add["test"].add_argument(
        "--thorough", action="store_true", help="property tests, fuzzing and hostile use at full depth, not a quarter"
    )
    add["test"].add_argument(
        "--windows", action="store_true", help="on Windows' own Python under Wine (docs/windows.md), set up if need be"
    )
    add["test"].epilog = "Further arguments go to pytest, which then runs alone: dev.py test tests/unit -k file"
    add["matrix"].add_argument("row", nargs="?", choices=list(ROWS), help="the row to run; without it they are listed")
    add["matrix"].add_argument("--again", action="store_true", help="only what failed the last time")
    add["matrix"].add_argument("--workers", type=int, metavar="N", help="processes of tests at a time")
    add["matrix"].epilog = "Further arguments: folders of tests, which are noted, or any of pytest's, which are not"
    for name, what in (("tree", "the ComfyUI to copy"), ("files", "the folder of newer files"), ("target", "the copy")):
        add["overlay"].add_argument(name, metavar=name.upper(), type=Path, help=what)
    add["bench"].add_argument(
        "part",
        choices=["rows", "models", "compare", "lab", "report"],
        help="what to measure; `compare A B`: two trees, settings or results; `lab`: techniques that are not shipped; "
        "`report`: only pages and plots",
    )
    for name, run in {
        "setup": setup_command, "demo": demo, "test": test, "matrix": matrix_command, "overlay": overlay_command,
        "lint": lint, "kernels": kernels, "bench": bench, "quantise": quantise, "doctor": doctor,
        "workflows": workflows, "lines": lines, "docs": docs, "wheel": wheel,
    }.items():  # fmt: skip
        add[name].set_defaults(run=run)
    return cli


HELP = {
    "demo": "make the example video with the real ComfyUI and leave it in output/",
    "test": "run every check: lint, unit, server and browser tests",
    "matrix": "run the tests on other versions of ComfyUI, its packages and torch, and note what came of it",
    "overlay": "copy a ComfyUI and lay newer single files over it, those that fit",
    "lint": "run ruff, mypy and clang-format",
    "kernels": "build the device code and pack the archive (--check, --all, --only UNIT, --variant ARCH)",
    "bench": "measure on this machine's GPU and write bench/results: rows [modules, pager, host], models [fidelity, steps], "
    "compare A B, lab, report [prediction, turing]; each says with --help what it takes",
    "quantise": "write a model's file in fewer bits (--to q8_0, q4_k, q5_k, q4_k_m, int8, int8_convrot, convrot_w4a4 or fp8)",
    "doctor": "look at driver, card, kernels, pager, disk and ComfyUI, and write a report to paste (--model FILE, --quick)",
    "workflows": "write the example workflows anew, after a node got an input or an example changed",
    "lines": "count the project's lines, and those of code, by folder",
    "docs": "write the tables of supported models and of tested versions anew",
    "wheel": "write the modules of docs/modules.md as a wheel for torch without ComfyUI",
    "setup": "only set up what the other commands need",
}


def set_up(options: argparse.Namespace, with_browser: bool, row: Row | None = None) -> tuple[Bed, Path]:
    """Everything a command needs, made or found: the bed and its ComfyUI folder.

    The bed is the pinned one, or the row's. Where the ComfyUI is of another version, it has the packages that this asks for.
    """
    bed = Bed()
    with steps.locked(bed.cache / "setup.lock"):
        environment.make_venv(bed)
        folder = comfyui.find_or_fetch(bed, options.comfyui)
        other = comfyui.version(folder) != comfyui.VERSION
        pinned = comfyui.fetched(bed) if other else folder
        environment.install_packages(bed, pinned / "requirements.txt")
        if row or other:
            bed = row_venv.bed_of(bed, row or ROWS["tree"], folder)
        if with_browser:
            browser.find_or_install()
    return bed, folder


def setup_command(options: argparse.Namespace, _rest: list[str]) -> int:
    set_up(options, with_browser=True)
    return 0


def demo(options: argparse.Namespace, _rest: list[str]) -> int:
    with steps.in_one_line(
        f"setting up: Python packages and ComfyUI {comfyui.VERSION} (only the first time; a minute or more, 6 GB)"
    ):
        bed, folder = set_up(options, with_browser=False)
    own = [f"--{name}={value}" for name in ("model", "clip", "vae", "prompt") if (value := getattr(options, name))]
    where = ["--comfyui", str(folder), "--base", str(bed.cache / "demo"), "--output", str(options.output)]
    return call(bed, "-m", "bed.demo", *where, *own, env={"PYTHONPATH": str(ROOT / "tools")})


def test(options: argparse.Namespace, rest: list[str]) -> int:
    bed, folder = set_up(options, with_browser=not options.windows)
    env = {"COMFYUI_PATH": str(folder)}
    if options.thorough:
        env[depth.SWITCH] = "1"
    if options.windows:
        return windows.run_tests(bed, folder, env, rest)
    if rest:
        return tested(bed, env, rest)
    with ThreadPoolExecutor(1) as beside:
        linting = beside.submit(linted, folder)  # mypy has one thread, and tests wait at times
        code = tested(bed, env, rest)
        lint_code, said = linting.result()
    print(said, end="")
    return lint_code or code


def matrix_command(options: argparse.Namespace, rest: list[str]) -> int:
    if options.row is None:
        print(*(f"{row.name:14}{row.what}: {', '.join(row.parts)}" for row in ROWS.values()), sep="\n")
        return 0
    row = ROWS[options.row]
    bed, folder = set_up(options, BROWSER in row.parts, row)
    return matrix.run_row(bed, row, folder, rest, again=options.again, workers=options.workers or most_workers())


def overlay_command(options: argparse.Namespace, _rest: list[str]) -> int:
    refused = overlay.lay_over(options.tree, options.files, options.target)
    options.comfyui = str(options.target)
    bed, folder = set_up(options, with_browser=False, row=ROWS["kitchen"])  # newer files ask for newer packages
    refused = overlay.try_imports(bed, options.tree, folder, refused)
    for name, why in sorted(refused.items()):
        steps.say(f"refused: {name}: {why}")
    steps.say(f"{overlay.laid_over(folder)} files laid over it: {folder / overlay.NOTE}")
    return 0


def linted(comfyui_folder: Path) -> tuple[int, str]:
    """`dev.py lint`, and what it said."""
    command = [sys.executable, __file__, "lint", "--comfyui", str(comfyui_folder)]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def tested(bed: Bed, env: dict[str, str], rest: list[str]) -> int:
    """The tests that pytest's arguments name; all, and what of the GPU tests is stale, where there are none."""
    if not rest:
        require_room_for_tests()
        call(bed, "tests/gpu/run.py", "--stale")
        if not has_nvidia_gpu():  # which takes one test at a time
            steps.say("no NVIDIA GPU here: tests/gpu is left out")
            workers = most_workers()
            rest = ["--ignore=tests/gpu", f"-n{workers}", "--dist=loadscope", "--no-loadscope-reorder"]
            env["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // workers))
    return call(bed, "-m", "pytest", *rest, env=env)


def require_room_for_tests() -> None:
    """Raises `SetupFailed` where the temporary folder is too full for all tests, whose errors would not say so."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < TESTS_WRITE:
        raise steps.SetupFailed(
            f"All tests write {TESTS_WRITE >> 30} GiB of model files into {folder}, which has {free / 2**30:.1f} GiB left. "
            "Make room there, or set TMPDIR to a folder on another disk."
        )


def most_workers() -> int:
    """One more than there are cores: the one that has a server and a browser waits for them half of its time."""
    return min((os.cpu_count() or 1) + 1, MOST_WORKERS)


def lint(options: argparse.Namespace, _rest: list[str]) -> int:
    set_up(options, with_browser=False)
    return check(Bed())


def kernels(options: argparse.Namespace, rest: list[str]) -> int:
    bed, _ = set_up(options, with_browser=False)
    return call(bed, "kernels_cuda/build", *rest)


def workflows(options: argparse.Namespace, _rest: list[str]) -> int:
    bed, folder = set_up(options, with_browser=False)
    pictures = ["--pictures"] if options.pictures else []
    env = {"PYTHONPATH": str(ROOT / "tools"), "COMFYUI_PATH": str(folder)}
    return call(bed, "-m", "bed.templates", *pictures, env=env)


def lines(_options: argparse.Namespace, _rest: list[str]) -> int:
    print(line_counts.table(line_counts.counted(ROOT)))
    return 0


def docs(options: argparse.Namespace, _rest: list[str]) -> int:
    bed, _ = set_up(options, with_browser=False)
    tested_versions.write_page()
    return call(bed, "-m", "bed.families", env={"PYTHONPATH": str(ROOT / "tools")})


def wheel(options: argparse.Namespace, _rest: list[str]) -> int:
    """Sets nothing up: it only reads the tree."""
    steps.say(f"written: {wheels.build(options.output)}")
    return 0


def bench(options: argparse.Namespace, rest: list[str]) -> int:
    bed, folder = set_up(options, with_browser=False)
    code = call(bed, "bench", options.part, *rest, env={"COMFYUI_PATH": str(folder)})
    return code if options.part in ("compare", "lab", "report") else code or call(bed, "bench", "report")


def quantise(options: argparse.Namespace, _rest: list[str]) -> int:
    bed, _ = set_up(options, with_browser=False)
    asked = ["--architecture", options.architecture] if options.architecture else []
    asked += ["--force"] if options.force else []
    files = [str(path.absolute()) for path in (options.source, options.target)]
    return call(bed, "checkpoints/quantise", *files, "--to", options.to, *asked)


def doctor(options: argparse.Namespace, rest: list[str]) -> int:
    """Sets nothing up: it is for machines where something is wrong. Asks the Python that called it, if that has torch."""
    bed = Bed()
    python = sys.executable if importlib.util.find_spec("torch") else str(bed.python)
    if not Path(python).exists():
        print(
            f"Python {sys.version.split()[0]} on {sys.platform} has no torch. Call the doctor with ComfyUI's own Python,"
        )
        print("for the portable ComfyUI: ..\\..\\..\\python_embeded\\python.exe dev.py doctor")
        return 1
    given = ["--comfyui", options.comfyui] if options.comfyui else []
    return run(python, "fusion/doctor/cli.py", *given, *rest)


def check(bed: Bed) -> int:
    """ruff, mypy and clang-format over the whole tree; the first exit code that is not 0."""
    # mypy names a package after its folder, and a clone's folder may have any name: check it through a named link.
    packages = bed.cache / "typing"
    packages.mkdir(parents=True, exist_ok=True)
    link_folder(packages / "fusestream", ROOT)
    modules = [f"-p=fusestream.{folder}" for folder in PACKAGES]
    env = {"MYPYPATH": os.pathsep.join([str(packages), str(ROOT / "tests"), str(ROOT / "tools")])}
    beside = {"MYPYPATH": os.pathsep.join([str(ROOT), str(ROOT / "tools")])}
    config = f"--config-file={ROOT / 'pyproject.toml'}"
    places = {
        "kernels_cuda": ("cu", "cuh"),
        "bench/lab": ("cu", "cuh"),
        "tests/stand_in_driver": ("c", "h"),
        "tools/bed/windows": ("c",),
    }
    sources = sorted(
        str(path) for folder, kinds in places.items() for kind in kinds for path in (ROOT / folder).rglob(f"*.{kind}")
    )
    codes = [
        call(bed, "-m", "ruff", "check", "."),
        call(bed, "-m", "ruff", "format", "--check", "--diff", "."),
        call(bed, "-m", "mypy", config, *modules, "-p=bed", "-p=fuzz", "-p=hostile", env=env),
        # No part of a package: the folder that it lies in may have any name, too.
        call(bed, "-m", "mypy", config, "--explicit-package-bases", "dev.py", env=beside),
        run(str(bed.python.with_name("clang-format")), "--dry-run", "-Werror", *sources),
    ]
    return next((code for code in codes if code), 0)


def call(bed: Bed, *arguments: str, env: dict[str, str] | None = None) -> int:
    """Run the environment's Python in the repository; its exit code.

    It may keep its bytecode, whatever this shell says: the tests start a ComfyUI dozens of times, 8 s instead of 18 with it.
    """
    return run(str(bed.python), *arguments, env={"PYTHONDONTWRITEBYTECODE": "", **(env or {})})


def run(*command: str, env: dict[str, str] | None = None) -> int:
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **(env or {})}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
