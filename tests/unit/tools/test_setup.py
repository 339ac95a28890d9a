"""The set-up of `dev.py`: killed at any moment, called again, it must come to the same good end.

The real steps run (a real virtual environment, real pip, the real ComfyUI archive), with two small packages in place
of torch and a bed in a temporary folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bed import comfyui, environment, steps
from bed.depth import is_thorough
from bed.paths import Bed

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "tests"
TOOLS = ROOT / "tools"
SETUP = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from bed import comfyui, environment, steps
from bed.paths import Bed
here = Path(sys.argv[2])
bed = Bed(here / ".venv", here / ".cache", here / "requirements.txt", here / "constraints.txt")
with steps.locked(bed.cache / "setup.lock"):
    environment.make_venv(bed)
    print(comfyui.find_or_fetch(bed))
    environment.install_packages(bed)
"""


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    (tmp_path / "requirements.txt").write_text("einops\nsortedcontainers\n")
    bed = Bed(tmp_path / ".venv", tmp_path / ".cache", tmp_path / "requirements.txt", TESTS / "constraints.txt")
    (tmp_path / "constraints.txt").write_text(bed.constraints.read_text())
    return bed


def start(here: Path) -> subprocess.Popen[bytes]:
    environment_without_comfyui = {key: value for key, value in os.environ.items() if key != "COMFYUI_PATH"}
    return subprocess.Popen(
        [sys.executable, "-c", SETUP, str(TOOLS), str(here)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment_without_comfyui,
    )  # fmt: skip


def finish(here: Path, bed: Bed) -> None:
    process = start(here)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output.decode()
    assert comfyui.version(bed.cache / f"comfyui-{comfyui.VERSION}") == comfyui.VERSION
    check = "import einops, sortedcontainers; from importlib.metadata import version; print(version('einops'))"
    found = subprocess.run([bed.python, "-c", check], capture_output=True, text=True, check=True)
    assert f"einops=={found.stdout.strip()}\n" in (TESTS / "constraints.txt").read_text()
    assert not list(bed.cache.glob("fetch*")) + list(bed.cache.glob("uv*"))
    assert not list(bed.venv.glob("lib/*/site-packages/uv*")), "it is no package of the environment"


MOMENTS: dict[str, Callable[[Bed], bool]] = {
    "in the making of the environment": lambda bed: (bed.venv / "pyvenv.cfg").exists(),
    "while ComfyUI arrives": lambda bed: (bed.cache / "fetch").is_dir(),
    "while ComfyUI is unpacked": lambda bed: (bed.cache / "fetch" / "ComfyUI" / "comfy").is_dir(),
    "while uv arrives": lambda bed: (bed.cache / "uv" / "tool").is_dir(),
    "while packages are downloaded": lambda bed: any((bed.cache / "uv" / "cache").glob("archive-*")),
    "while packages install": lambda bed: any(bed.venv.glob("lib/*/site-packages/einops*")),
}


@pytest.mark.skipif(os.name == "nt", reason="kills by signal")
@pytest.mark.skipif(not is_thorough(), reason="half a minute of installing: --thorough")
def test_a_killed_setup_is_finished_by_the_next_call(tmp_path: Path, bed: Bed) -> None:
    """One bed is killed at each moment in turn, then left to finish: later kills meet what earlier ones left."""
    for name, reached in MOMENTS.items():
        process = start(tmp_path)
        deadline = time.monotonic() + 120
        while not reached(bed):
            assert process.poll() is None, (name, process.communicate()[0].decode())
            assert time.monotonic() < deadline, name
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    finish(tmp_path, bed)
    started = time.monotonic()
    finish(tmp_path, bed)
    assert time.monotonic() - started < 10, "a second call has nothing to do"


def test_a_package_without_all_its_files_is_installed_again(tmp_path: Path, bed: Bed) -> None:
    folder = bed.venv / "lib" / "python3" / "site-packages"
    of_the_wheel = "{}.dist-info/METADATA,,\n{}.dist-info/RECORD,,\n"
    records = {"whole-1": of_the_wheel + "{}.dist-info/INSTALLER,,\n", "pips-1": None, "uvs-1": of_the_wheel}
    for name, record in records.items():
        info = folder / f"{name}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").touch()
        if record is not None:
            (info / "RECORD").write_text(record.format(*[name] * 3))
    environment.remove_half_installed(bed)
    assert [path.name for path in folder.iterdir()] == ["whole-1.dist-info"]


@pytest.mark.deep
def test_uv_is_told_what_pip_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bed: Bed) -> None:
    """From its file and its variables, which go before."""
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://one.example/simple\ntimeout = 20\nno-color = true\n"
        "[install]\nextra-index-url = https://two.example/simple\n    https://three.example/simple\n"
        "[download]\nno-index = true\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_TIMEOUT", "60")
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels /more")
    monkeypatch.setattr(Bed, "python", Path(sys.executable))
    told = environment.uv_variables(environment.pip_configuration(bed))
    assert told is not None
    machines = ("UV_CONSTRAINT", "SSL_CERT_FILE", "ALL_PROXY", "UV_INSECURE_HOST")  # of whoever has set up this machine
    assert {name: value for name, value in told.items() if name not in machines} == {
        "UV_DEFAULT_INDEX": "https://one.example/simple",
        "UV_INDEX": "https://two.example/simple https://three.example/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_HTTP_TIMEOUT": "60",
    }
    monkeypatch.setenv("PIP_NO_BINARY", "einops")
    assert environment.uv_variables(environment.pip_configuration(bed)) is None, "it cannot be told"


@pytest.mark.parametrize("fails", ["getting uv", "installing packages", None])
def test_pip_installs_where_uv_cannot(
    fails: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bed: Bed
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str | Path], step: str, _remedy: str, env: dict[str, str] | None = None) -> None:
        ran.append([Path(word).name for word in command])
        if ran[-1][-1] == "uv" or ran[-1][0].startswith("uv"):  # where uv fails, pip comes
            (bed.cache / "uv" / "cache").mkdir(parents=True, exist_ok=True)
            if step == fails:
                raise steps.SetupFailed("it has no network")
        if env is not None:
            assert env["UV_CACHE_DIR"] == str(bed.cache / "uv" / "cache") and "UV_TORCH_BACKEND" not in env

    monkeypatch.setenv("UV_TORCH_BACKEND", "cpu")
    monkeypatch.setattr(steps, "run", run)
    monkeypatch.setattr(environment, "pip_configuration", lambda bed: {})
    environment.install_packages(bed)
    wanted = ["-c", "constraints.txt", "-r", "requirements.txt"]
    assert ran[0][-1] == "uv" and ran[-1][-4:] == wanted
    assert [command[0].split(".")[0] for command in ran] == {
        "getting uv": ["python", "python"], "installing packages": ["python", "uv", "python"], None: ["python", "uv"],
    }[fails]  # fmt: skip
    assert ("note: uv cannot install the packages here; pip does" in capsys.readouterr().out) is bool(fails)
    assert not (bed.cache / "uv").exists()


def test_the_demos_setup_says_one_line_and_none_when_all_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for printed in ("setting up\n[fusestream] note: of interest\n", "[fusestream] note: of interest\n"):
        with steps.in_one_line("setting up"):
            for name in ("one", "two"):
                steps.once(tmp_path / name, "1", f"step {name}", lambda: None)
            steps.say("note: of interest")
        assert capsys.readouterr().out == printed
    steps.once(tmp_path / "three", "1", "step three", lambda: None)
    assert capsys.readouterr().out == "[fusestream] step three\n[fusestream]   done in 0 s\n"


def test_a_failed_step_names_itself_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(steps.SetupFailed, match=r"(?s)counting failed \(exit 3\):\n +broken\nTry sums\."):
        steps.run([sys.executable, "-c", "print('broken'); raise SystemExit(3)"], "counting", "Try sums.")
    with pytest.raises(steps.SetupFailed, match=r"cannot run /no/such/thing .* Try sums\."):
        steps.run(["/no/such/thing"], "counting", "Try sums.")


def test_a_step_runs_once_per_key_and_not_after_failing(tmp_path: Path) -> None:
    ran = []

    def failing() -> None:
        ran.append("failed")
        raise steps.SetupFailed("no")

    with pytest.raises(steps.SetupFailed):
        steps.once(tmp_path / "stamp", "1", "a step", failing)
    for key in ("1", "1", "2"):
        steps.once(tmp_path / "stamp", key, "a step", lambda key=key: ran.append(key))  # type: ignore[misc]
    assert ran == ["failed", "1", "2"]


@pytest.mark.skipif(os.name == "nt", reason="the lock is inherited on POSIX only")
def test_a_child_that_outlives_its_parent_keeps_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    code = (
        "import sys, os; sys.path.insert(0, sys.argv[1])\n"
        "from bed import steps\nfrom pathlib import Path\n"
        "with steps.locked(Path(sys.argv[2])):\n"
        "    steps.run([sys.executable, '-c', 'import sys; open(sys.argv[1], \"w\").close(); import time; time.sleep(2)',"
        " sys.argv[2] + '.up'], 'sleeping', '')\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(TOOLS), str(lock)])
    while not Path(f"{lock}.up").exists():
        assert parent.poll() is None
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    started = time.monotonic()
    with steps.locked(lock):
        assert time.monotonic() - started > 0.5


def test_an_archive_cannot_write_outside(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("x")
    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("main.py", "../escaped", "comfy/../../escaped", "comfy/ok.py"):
            tar.add(outside, comfyui.CURRENT.inside + name)
        tar.add(outside, "elsewhere/file")
        link = tarfile.TarInfo(comfyui.CURRENT.inside + "link")
        link.type, link.linkname = tarfile.SYMTYPE, "/"
        tar.addfile(link)
    comfyui.unpack(archive, tmp_path / "out")
    assert {str(p.relative_to(tmp_path)) for p in (tmp_path / "out").rglob("*")} == {
        "out/main.py",
        "out/comfy",
        "out/comfy/ok.py",
    }
    assert not (tmp_path / "escaped").exists()


def test_a_wrong_comfyui_path_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bed: Bed) -> None:
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    with pytest.raises(steps.SetupFailed, match=r"COMFYUI_PATH is .*, where no ComfyUI is"):
        comfyui.find_or_fetch(bed)


def test_too_little_room_for_all_tests_is_told_before_they_run(tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", "import dev; dev.TESTS_WRITE = 1 << 60; dev.require_room_for_tests()"],
        cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert told.returncode == 1
    said = told.stderr.strip().splitlines()[-1]
    assert f"GiB of model files into {tmp_path}, which has" in said and "set TMPDIR to a folder on another disk" in said
