"""The example that sends workflows to several ComfyUI: nothing is lost and nothing made twice, whoever dies and whenever."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from fake_comfyui import FakeComfyUI

FILE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "many_workers.py"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """It is a script, and belongs to no package."""
    spec = importlib.util.spec_from_file_location("many_workers", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


PLENTY = 20.0  # seconds, for machines that are busy


class Bed:
    """Jobs, a folder for them, and what was said."""

    def __init__(self, example: ModuleType, out: Path) -> None:
        self.example, self.out = example, out
        self.said: list[str] = []

    def run(
        self, names: list[str], fakes: list[FakeComfyUI], tries: int = 3, patience: tuple[float, ...] = ()
    ) -> list[str]:
        """The names of those that failed. patience: with each; plenty where it is not said."""
        jobs = [self.example.Job(name, {"1": {"inputs": {"text": name}}}) for name in names]
        known = zip(fakes, patience or (PLENTY,) * len(fakes), strict=True)
        pool = self.example.Threads([self.example.Server(fake.url, waits, look_every=0.01) for fake, waits in known])
        failed: list[str] = self.example.Dispatch(jobs, pool, self.out, tries, self.said.append).run()
        pool.close()
        return failed

    def made(self) -> dict[str, dict[str, bytes]]:
        """Files by folder; nothing half made lies beside them."""
        folders = sorted(self.out.iterdir()) if self.out.exists() else []
        return {
            folder.name: {
                file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()
            }
            for folder in folders
        }


@pytest.fixture
def bed(example: ModuleType, tmp_path: Path) -> Bed:
    return Bed(example, tmp_path / "out")


def at_first(seconds: float) -> Callable[[str], float]:
    """Of the first prompt; others take no time to speak of."""
    lengths = iter([seconds])
    return lambda _: next(lengths, 0.02)


def all_of(names: list[str]) -> dict[str, dict[str, bytes]]:
    return {name: {f"video/{name}.png": f"output video/{name}.png".encode()} for name in sorted(names)}


def test_every_workflow_is_made_once_and_all_workers_take_part(bed: Bed) -> None:
    names = [f"job{number}" for number in range(6)]
    with FakeComfyUI() as one, FakeComfyUI() as other:
        assert bed.run(names, [one, other]) == []
        assert Counter(one.begun + other.begun) == Counter(names) and one.begun and other.begun
    assert bed.made() == all_of(names)


def test_a_killed_workers_prompt_runs_elsewhere(bed: Bed) -> None:
    names = ["a", "b", "c", "d"]
    with FakeComfyUI() as stays:
        with FakeComfyUI(lambda _: 60.0) as dies:
            dies.on_prompt = lambda _: threading.Timer(0.03, dies.kill).start()
            assert bed.run(names, [dies, stays], patience=(0.3, PLENTY)) == []
            [lost] = dies.begun
        assert Counter(stays.begun) == Counter(names)
    assert bed.made() == all_of(names)
    assert any(line.startswith("worker 0 is lost") for line in bed.said) and f"{lost}: on worker 1" in bed.said


def test_a_prompt_whose_answer_was_lost_is_not_queued_again(bed: Bed) -> None:
    with FakeComfyUI(lambda _: 0.1, on_prompt=lambda _: False) as server:
        assert bed.run(["a"], [server]) == []
        assert server.begun == ["a"]
    assert bed.made() == all_of(["a"])


def test_who_comes_back_has_its_old_work_cancelled(bed: Bed) -> None:
    """The cable was pulled, not the plug: it goes on with the prompt, which meanwhile runs elsewhere."""
    names = ["a", "b", "c"]
    with FakeComfyUI(at_first(60.0)) as away, FakeComfyUI(lambda _: 0.6) as stays:

        def leave(_: str) -> None:
            away.on_prompt = lambda _: True
            threading.Timer(0.02, lambda: away.kill(forgets=False)).start()
            threading.Timer(0.6, away.start).start()

        away.on_prompt = leave
        assert bed.run(names, [away, stays], patience=(0.4, PLENTY)) == []
        [old] = {prompt_id for prompt_id, (text, _) in away.prompts.items() if text == away.begun[0]}
        assert set(away.cancelled) == {old}, "no other prompt of it was"
        assert away.begun[0] in stays.begun and len(away.begun + stays.begun) == len(names) + 1
    assert bed.made() == all_of(names)


def test_who_was_started_anew_is_lost_with_what_it_had(bed: Bed) -> None:
    with FakeComfyUI(at_first(60.0)) as server:

        def restart(_: str) -> None:
            server.on_prompt = lambda _: True
            threading.Timer(0.1, lambda: (server.kill(), server.start())).start()

        server.on_prompt = restart
        assert bed.run(["a"], [server]) == []
        assert server.begun == ["a", "a"]
    assert bed.made() == all_of(["a"]) and any("forgotten" in line for line in bed.said)


def test_a_wrong_workflow_is_told_and_not_tried_elsewhere(bed: Bed) -> None:
    with FakeComfyUI() as one, FakeComfyUI() as other:
        assert sorted(bed.run(["wrong", "refused", "right"], [one, other])) == ["refused", "wrong"]
        assert Counter(one.begun + other.begun) == {"wrong": 1, "right": 1}
    assert bed.made() == all_of(["right"])
    assert "wrong: failed: KSampler: out of luck" in bed.said
    assert any(line.startswith("refused: failed: ") and "no such node" in line for line in bed.said)


def test_a_workflow_that_kills_whoever_runs_it_does_not_go_on_for_ever(bed: Bed) -> None:
    fakes = [FakeComfyUI(lambda text: 60.0 if text == "killer" else 0.02) for _ in range(3)]
    for fake in fakes:

        def kill(text: str, fake: FakeComfyUI = fake) -> None:
            if text == "killer":
                threading.Timer(0.1, lambda: (fake.kill(), fake.start())).start()

        fake.on_prompt = kill
        fake.start()
    try:
        assert bed.run(["killer", "a", "b"], fakes, tries=2) == ["killer"]
    finally:
        for fake in fakes:
            fake.kill()
    assert sum(line.startswith("killer: on worker") for line in bed.said) == 2
    assert bed.made() == all_of(["a", "b"]) and "killer: failed: 2 workers were lost with it" in bed.said


def test_without_workers_what_is_left_is_named(bed: Bed) -> None:
    gone = FakeComfyUI()
    gone.start()
    gone.kill()
    assert bed.run(["a", "b"], [gone], patience=(0.02,)) == ["a", "b"]
    assert "no worker is left for a, b" in bed.said and bed.made() == {}


def test_the_same_call_again_does_what_is_not_there_yet(bed: Bed) -> None:
    with FakeComfyUI() as server:
        assert bed.run(["a"], [server]) == [] and bed.run(["a", "b"], [server]) == []
        assert server.begun == ["a", "b"]
    assert bed.made() == all_of(["a", "b"])


def test_of_two_results_the_first_counts(bed: Bed) -> None:
    assert bed.example.deliver(bed.out / "a", {"/x.png": b"first"})
    assert not bed.example.deliver(bed.out / "a", {"/x.png": b"second"})
    assert bed.made() == {"a": {"x.png": b"first"}}


def test_files_stay_in_their_folder(bed: Bed) -> None:
    assert bed.example.deliver(bed.out / "a", {"../../x.png": b"1", "b\\..\\y.png": b"2"})
    assert bed.made() == {"a": {"x.png": b"1", "b/y.png": b"2"}}


def test_the_command(bed: Bed, example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / f"{name}.json" for name in ("a", "wrong")]
    for file in files:
        file.write_text(json.dumps({"1": {"inputs": {"text": file.stem}}}))
    with FakeComfyUI() as server:
        arguments = ["--out", str(bed.out), "--at", server.url, *map(str, files)]
        assert example.main(arguments) == 1 and bed.made() == all_of(["a"])
    assert "1 of 2 are in" in capsys.readouterr().out
    twice = tmp_path / "twice" / "a.json"
    twice.parent.mkdir()
    twice.write_text("{}")
    with pytest.raises(SystemExit, match="two workflows are called a"):
        example.main(["--out", "x", "--at", "http://127.0.0.1:1", str(files[0]), str(twice)])
    twice.write_text('{"nodes": []}')
    with pytest.raises(SystemExit, match="not in API format"):
        example.main(["--out", "x", "--at", "http://127.0.0.1:1", str(twice)])
    with pytest.raises(SystemExit):
        example.main(["--out", "x", str(files[0])])
    assert "give --at" in capsys.readouterr().err


def test_a_worker_of_ones_own_is_started_and_started_again(example: ModuleType, tmp_path: Path) -> None:
    """With a ComfyUI that is a few lines long."""
    (tmp_path / "main.py").write_text(
        f"import sys; sys.path.insert(0, {str(FILE.parents[2] / 'tests')!r})\n"
        "from fake_comfyui import FakeComfyUI\n"
        "import time\n"
        "fake = FakeComfyUI()\n"
        "fake.port = int(sys.argv[sys.argv.index('--port') + 1])\n"
        "assert '--cpu' in sys.argv and any(a.startswith('--output-directory=') for a in sys.argv)\n"
        "fake.start()\n"
        "time.sleep(60)\n"
    )
    worker = example.Worker("worker 0", str(tmp_path), sys.executable, ["--cpu"])
    try:
        first, again = worker.begin(), worker.begin()
        assert first == again and "process" in first["up"]
        worker.server.look_every = 0.01
        assert set(worker.run({"1": {"inputs": {"text": "a"}}})["files"]) == {"video/a.png"}
        worker.process.kill()
        worker.process.wait()
        began = time.monotonic()
        assert "its process has ended" in worker.run({"1": {"inputs": {"text": "a"}}})["lost"]
        assert time.monotonic() - began < 5, "its patience is 30 s"
        assert worker.begin()["up"] != first["up"] and Path(worker.folder).is_dir()
        worker.process.kill()
        worker.process.wait()
        (tmp_path / "main.py").write_text("raise SystemExit('no card is free')")
        assert "no card is free" in worker.begin()["lost"], "the log says why"
    finally:
        worker.end()
    assert not Path(worker.folder).exists()
