"""Send workflows to several ComfyUI processes, on one machine or many. docs/scaling.md says when that is worth it.

    python many_workers.py --out results --at http://127.0.0.1:8188 --at http://127.0.0.1:8189  *.json
    python many_workers.py --out results --comfyui ~/ComfyUI --workers 4  *.json  [-- ComfyUI's own arguments]

Workflows are in API format (*Export (API)* in ComfyUI's menu). With `--at` servers that already run are used, and nothing is needed
but Python. With `--comfyui` Ray starts them, one a card, on this machine or on all of a cluster, and starts them again when they
die; install it for this file alone, ComfyUI and its packs need none of it:

    python -m venv ray-env && ray-env/bin/pip install ray==2.60.0

What a workflow made is in a folder of its name below `--out`. That folder appears as a whole, once:

- Nothing is lost. Who does not answer any more is lost, and its workflow runs again on another worker, `--tries` times in all: one
  that kills whoever runs it does not go on for ever. One that is wrong (ComfyUI refuses it, or a node fails) is told, and not tried
  elsewhere. The same call again does what is not there yet.
- Nothing is made twice. A prompt's id is chosen here, so that one whose answer was lost is found again instead of being queued
  twice; what a worker that was taken for lost had still to do is cancelled when it is back; of two results the first one counts.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Workflow = dict[str, Any]
Outcome = dict[str, Any]  # one of UP, FILES (by name), LOST and FAILED (why)
UP, FILES, LOST, FAILED = "up", "files", "lost", "failed"
GIVEN_UP = 3  # times in a row that a worker may be lost
OF_THE_SERVER = 500  # from here on a status says that it is the server that fails
LAST_LINES = 5  # of a log
ENDS_WITHIN = 10.0  # seconds
STARTS_WITHIN = 300.0  # for a ComfyUI with its packs


class WorkerLost(Exception):
    """It does not answer, or knows nothing of the prompt any more."""


class WorkflowFailed(Exception):
    """It would fail anywhere."""


# ------------------------------------------------------------------------------------------------------------- one server


class Server:
    """A ComfyUI that runs, by its HTTP interface.

    patience    seconds without an answer until it is lost
    look_every  seconds between two looks
    is_dead     whether its process has ended, where that can be told
    """

    def __init__(
        self, url: str, patience: float = 30.0, look_every: float = 0.5, is_dead: Callable[[], bool] = lambda: False
    ) -> None:
        self.url, self.patience, self.look_every, self.is_dead = url.rstrip("/"), patience, look_every, is_dead
        self.open: set[str] = set()  # prompts whose end was not seen

    def begin(self) -> Outcome:
        """Wait until it answers, and cancel what it had to do for us before it was lost."""
        try:
            self._answer("/system_stats")
            for prompt_id in list(self.open):
                self._answer("/queue", {"delete": [prompt_id]})
                self._answer("/interrupt", {"prompt_id": prompt_id})
                self.open.discard(prompt_id)
        except (WorkerLost, WorkflowFailed) as error:
            return {LOST: str(error)}
        return {UP: self.url}

    def run(self, workflow: Workflow) -> Outcome:
        """All files that it saves."""
        prompt_id = str(uuid.uuid4())
        self.open.add(prompt_id)
        try:
            self._queue(prompt_id, workflow)
            files = self._files(self._end(prompt_id))
        except WorkflowFailed as error:
            self.open.discard(prompt_id)
            return {FAILED: str(error)}
        except WorkerLost as error:
            return {LOST: str(error)}
        self.open.discard(prompt_id)
        return {FILES: files}

    def _queue(self, prompt_id: str, workflow: Workflow) -> None:
        """Once: if no answer came, it is asked whether it has the prompt before it is given it again."""
        until = time.monotonic() + self.patience
        while self._ask("/prompt", {"prompt": workflow, "prompt_id": prompt_id}, until) is None:
            if self._entry(prompt_id) or self._has(prompt_id):
                return

    def _end(self, prompt_id: str) -> dict[str, Any]:
        """Wait for it. Returns what the server has noted of it."""
        while True:
            # It may end between two questions: only who has it nowhere, and nowhere again, has forgotten it.
            entry = self._entry(prompt_id) or (None if self._has(prompt_id) else self._entry(prompt_id) or {})
            if entry:
                return entry
            if entry is not None:
                raise WorkerLost("it has forgotten the prompt: somebody started it anew")
            time.sleep(self.look_every)

    def _entry(self, prompt_id: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._answer(f"/history/{prompt_id}"))
        return dict(found.get(prompt_id, {}))

    def _has(self, prompt_id: str) -> bool:
        """Whether it runs or waits there."""
        queue = json.loads(self._answer("/queue"))
        return any(item[1] == prompt_id for items in queue.values() for item in items)

    def _files(self, entry: dict[str, Any]) -> dict[str, bytes]:
        status = entry.get("status") or {}
        if status.get("status_str") != "success":
            raise WorkflowFailed(_why(status))
        files = {}
        for output in entry["outputs"].values():
            for file in (file for listed in output.values() if isinstance(listed, list) for file in listed):
                if isinstance(file, dict) and file.get("type") == "output":
                    asked = {name: file.get(name, "") for name in ("filename", "subfolder", "type")}
                    files[f"{asked['subfolder']}/{asked['filename']}"] = self._answer(
                        f"/view?{urllib.parse.urlencode(asked)}"
                    )
        return files

    def _answer(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Asked again until it answers: of what may be asked twice."""
        until = time.monotonic() + self.patience
        while (found := self._ask(path, body, until)) is None:
            pass
        return found

    def _ask(self, path: str, body: dict[str, Any] | None, until: float) -> bytes | None:
        """The answer; None where none came, and it is not yet time to give up."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.patience) as answer:
                return bytes(answer.read())
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code < OF_THE_SERVER:
                raise WorkflowFailed(error.read().decode(errors="replace") or str(error)) from error
            if self.is_dead():
                raise WorkerLost(f"{self.url}: its process has ended") from error
            if time.monotonic() > until:
                raise WorkerLost(f"{self.url} has not answered for {self.patience:g} s: {error}") from error
        time.sleep(self.look_every)
        return None


def _why(status: dict[str, Any]) -> str:
    """What a prompt failed of, in the server's words."""
    for kind, said in reversed(status.get("messages", [])):
        if kind == "execution_error":
            return f"{said.get('node_type')}: {said.get('exception_message')}"
        if kind == "execution_interrupted":
            return "somebody interrupted it"
    return f"it ended as {status.get('status_str')!r}"


# ---------------------------------------------------------------------------------------------------- one that is started


# What Python is to do before a script: a ComfyUI whose actor was killed would keep its card.
WITH_ITS_PARENT = (
    "-c",
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
)


class Worker:
    """A ComfyUI of its own, which ends with this process."""

    def __init__(self, name: str, comfyui: str, python: str, arguments: Sequence[str]) -> None:
        self.name, self.comfyui, self.python, self.arguments = name, comfyui, python, list(arguments)
        self.process: subprocess.Popen[bytes] | None = None
        self.server: Server | None = None
        self.folder = tempfile.mkdtemp(
            prefix="comfyui-worker-"
        )  # what it writes: models and inputs are the installation's

    def begin(self) -> Outcome:
        """Start it anew, unless it runs."""
        if self.process is None or self.process.poll() is not None:
            self._start()
        assert self.server is not None and self.process is not None
        self.server.patience, before = STARTS_WITHIN, self.server.patience
        outcome = self.server.begin()
        self.server.patience = before
        if LOST in outcome:
            self.process.kill()
            log = (Path(self.folder) / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
            return {LOST: "\n  ".join([outcome[LOST], "the last lines of its log:", *log[-LAST_LINES:]])}
        return {UP: f"process {self.process.pid} on {socket.gethostname()}"}

    def run(self, workflow: Workflow) -> Outcome:
        assert self.server is not None
        return self.server.run(workflow)

    def end(self) -> None:
        """What it has made was fetched."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        folders = []
        for name in ("output", "temp", "user"):
            (Path(self.folder) / name).mkdir(exist_ok=True)
            folders.append(f"--{name}-directory={self.folder}/{name}")
        command = [
            self.python, *(WITH_ITS_PARENT if sys.platform == "linux" else ()), str(Path(self.comfyui) / "main.py"),
            "--port", str(port), "--disable-auto-launch", "--database-url", "sqlite:///:memory:", *folders, *self.arguments,
        ]  # fmt: skip
        with (Path(self.folder) / "log.txt").open("ab") as log:
            self.process = process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self.server = Server(f"http://127.0.0.1:{port}", is_dead=lambda: process.poll() is not None)


# ------------------------------------------------------------------------------------------------------- who asks workers


class Threads:
    """Calls of workers that live in this process: each has a thread."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self.workers = list(workers)
        self.executor = concurrent.futures.ThreadPoolExecutor(len(self.workers))

    def call(self, worker: Any, method: str, *arguments: Any) -> Any:
        return self.executor.submit(getattr(worker, method), *arguments)

    def first(self, calls: Iterable[Any]) -> Any:
        """The one of these that has ended first."""
        return next(iter(concurrent.futures.wait(calls, return_when=concurrent.futures.FIRST_COMPLETED).done))

    def outcome(self, call: Any) -> Outcome:
        found: Outcome = call.result()
        return found

    def close(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)


class Actors:
    """The same over Ray: each worker is an actor with a card of its own, wherever one is free. Ray starts an actor again whose
    process or machine has died, and never runs a workflow again by itself: `Dispatch` does."""

    def __init__(self, count: int, gpus: float, address: str | None, made_of: Sequence[Any]) -> None:
        import ray  # noqa: PLC0415 - nobody else needs it

        self.ray = ray
        ray.init(address=address, log_to_driver=False)
        actor = ray.remote(num_gpus=gpus, max_restarts=-1, max_task_retries=0)(Worker)
        self.workers = [actor.remote(f"worker {number}", *made_of) for number in range(count)]

    def call(self, worker: Any, method: str, *arguments: Any) -> Any:
        return getattr(worker, method).remote(*arguments)

    def first(self, calls: Iterable[Any]) -> Any:
        return self.ray.wait(list(calls), num_returns=1)[0][0]

    def outcome(self, call: Any) -> Outcome:
        try:
            found: Outcome = self.ray.get(call)
        except self.ray.exceptions.RayActorError as error:
            return {LOST: f"its actor has died: {str(error).splitlines()[0]}"}
        return found

    def close(self) -> None:
        """An actor that is not there does not hold it up; its files stay on its machine."""
        ended = [worker.end.remote() for worker in self.workers]
        self.ray.wait(ended, num_returns=len(ended), timeout=ENDS_WITHIN)
        self.ray.shutdown()


# --------------------------------------------------------------------------------------------------------------- dispatch


@dataclass(frozen=True)
class Job:
    """name: of its folder."""

    name: str
    workflow: Workflow


class Dispatch:
    """Runs every job whose folder is not there yet. `failed`: the names of those that could not be."""

    def __init__(
        self, jobs: Iterable[Job], pool: Any, out: Path, tries: int = 3, say: Callable[[str], None] = print
    ) -> None:
        self.waiting = deque(job for job in jobs if not (out / job.name).exists())
        self.failed: list[str] = []
        self.pool, self.out, self.tries, self.say = pool, out, tries, say
        self.workers = dict(enumerate(pool.workers))
        self.idle: list[int] = []
        self.tried, self.lost_in_a_row = Counter[str](), Counter[int]()
        self.lost_at: dict[str, int] = {}
        self.calls: dict[Any, tuple[int, Job | None]] = {}  # who does what; no job: it begins
        for number in self.workers:
            self._begin(number)

    def run(self) -> list[str]:
        while self.waiting or any(job for _, job in self.calls.values()):
            for number in list(self.idle):
                self._give(number)
            if not self.calls:
                self.say(f"no worker is left for {', '.join(job.name for job in self.waiting)}")
                return [*self.failed, *(job.name for job in self.waiting)]
            call = self.pool.first(self.calls)
            number, job = self.calls.pop(call)
            outcome = self.pool.outcome(call)
            if LOST in outcome:
                self._lose(number, job, outcome[LOST])
                continue
            self.idle.append(number)
            if job is None:
                self.say(f"worker {number} is up: {outcome[UP]}")
            else:
                self.lost_in_a_row[number] = 0
                self._end(job, outcome)
        return self.failed

    def _begin(self, number: int) -> None:
        self.calls[self.pool.call(self.workers[number], "begin")] = (number, None)

    def _give(self, number: int) -> None:
        """A job, if there is one for this worker: who was lost with a job gets the same again only where there is no other."""
        is_only = len(self.workers) == 1
        job = next((job for job in self.waiting if is_only or self.lost_at.get(job.name) != number), None)
        if job is None:
            return
        self.waiting.remove(job)
        self.idle.remove(number)
        self.tried[job.name] += 1
        self.say(f"{job.name}: on worker {number}")
        self.calls[self.pool.call(self.workers[number], "run", job.workflow)] = (number, job)

    def _lose(self, number: int, job: Job | None, why: str) -> None:
        self.say(f"worker {number} is lost: {why}")
        self.lost_in_a_row[number] += 1
        if self.lost_in_a_row[number] < GIVEN_UP:
            self._begin(number)
        else:
            self.say(f"worker {number} was lost {GIVEN_UP} times in a row, and is left alone")
            del self.workers[number]
        if job is None:
            return
        if self.tried[job.name] < self.tries:
            self.lost_at[job.name] = number
            self.waiting.appendleft(job)
        else:
            self.say(f"{job.name}: failed: {self.tries} workers were lost with it")
            self.failed.append(job.name)

    def _end(self, job: Job, outcome: Outcome) -> None:
        if FAILED in outcome:
            self.say(f"{job.name}: failed: {outcome[FAILED]}")
            self.failed.append(job.name)
        elif deliver(self.out / job.name, outcome[FILES]):
            self.say(f"{job.name}: done, files: {len(outcome[FILES])}")
        else:
            self.say(f"{job.name}: somebody else has made it meanwhile")


def deliver(folder: Path, files: dict[str, bytes]) -> bool:
    """The folder with these files, as a whole; False where it is there already."""
    partial = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    partial.mkdir(parents=True)
    for name, data in files.items():
        path = partial.joinpath(*(part for part in name.replace("\\", "/").split("/") if part.strip(".")))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    try:
        partial.rename(folder)  # fails where there is a folder with files in it
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(partial)
        return False
    return True


def read_jobs(paths: Sequence[Path]) -> list[Job]:
    jobs = [Job(path.stem, json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    twice = [name for name, count in Counter(job.name for job in jobs).items() if count > 1]
    if twice:
        raise SystemExit(f"two workflows are called {twice[0]}: their results would share a folder")
    for job in jobs:
        if "nodes" in job.workflow:
            raise SystemExit(f"{job.name} is not in API format: use *Export (API)* in ComfyUI's menu")
    return jobs


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("workflows", nargs="+", type=Path)
    cli.add_argument("--out", type=Path, required=True, help="where results go, a folder for each workflow")
    cli.add_argument("--at", action="append", default=[], metavar="URL", help="a ComfyUI that runs; may be repeated")
    cli.add_argument("--patience", type=float, default=30.0, help="seconds without an answer until one of them is lost")
    cli.add_argument("--comfyui", help="folder of ComfyUI, the same on all machines: Ray starts workers of it")
    cli.add_argument("--python", default=sys.executable, help="ComfyUI's own Python, the same on all machines")
    cli.add_argument("--workers", type=int, default=1, help="how many Ray starts")
    cli.add_argument("--gpus", type=float, default=1.0, help="cards of each of them")
    cli.add_argument("--address", help="of a Ray cluster; this machine alone if not given")
    cli.add_argument("--tries", type=int, default=3, help="workers that may be lost with one workflow")
    options = cli.parse_args(given[:split])
    if bool(options.at) == bool(options.comfyui):
        cli.error("give --at for servers that run, or --comfyui for those that Ray starts")
    jobs = read_jobs(options.workflows)
    if options.at:
        pool: Any = Threads([Server(url, options.patience) for url in options.at])
    else:
        comfyui = os.path.abspath(options.comfyui)  # noqa: PTH100 - of another machine, too
        made_of = (comfyui, options.python, given[split + 1 :])
        pool = Actors(options.workers, options.gpus, options.address, made_of)
    try:
        failed = Dispatch(jobs, pool, options.out, options.tries, lambda line: print(line, flush=True)).run()
    finally:
        pool.close()
    print(f"{len(jobs) - len(failed)} of {len(jobs)} are in {options.out}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
