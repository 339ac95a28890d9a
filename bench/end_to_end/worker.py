"""One side of one row, in a process of its own: python bench worker '<job as JSON>'.

The last line it prints is `RESULT ` and JSON. Jobs: {"task": "work"} does a row's work, after it has printed READY and was told
{"paths": ...}; {"task": "session"} does many, each told as {"job": ..., "paths": ...}; {"task": "weights"} makes files, each told
as {"job": ...}.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from . import peers
from .ram import go_first
from .row_types import Side
from .run import Run, ram_gib, row_of, side_of

REMEMBERED = "FUSESTREAM_CACHE"  # where what was chosen lies
IN_BF16 = {"ltx_vae"}  # which stock computes in FP16 on no card


def write_weights(_job: dict[str, Any]) -> dict[str, Any]:
    """Files of weights, one after another, each told as {"job": ...}: without ComfyUI. Until there are no more."""
    for line in sys.stdin:
        say(partial(make_weights, json.loads(line)["job"]))
    return {}


def make_weights(job: dict[str, Any]) -> dict[str, Any]:
    import torch  # noqa: PLC0415

    from . import weights  # noqa: PLC0415

    folder = Path(job["folder"])
    if job["quick"]:
        return weights.write_tiny(job["model"], folder, job["storage"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return weights.write(job["model"], folder, job["storage"], device)


def begin(job: dict[str, Any]) -> None:
    """Start ComfyUI as the side's users would, and say that it is there."""
    comfy, attention = tuple(job["side"]["comfy"]), job["side"]["attention"]
    from .start import start_comfyui  # noqa: PLC0415

    # As on Turing, which has no bf16; both sides the same.
    halves = "--fp32-vae" not in comfy and not IN_BF16 & {model for model, _ in row_of(job).files}
    own = ["--cpu"] if job["quick"] else ["--fp16-vae"] if halves else []
    start_comfyui([*own, *comfy], attention)
    import torch  # noqa: PLC0415

    if not job["quick"]:
        torch.zeros(1, device="cuda")  # the context: it shall not come up while another process is measured


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Start, wait for the word, load the model and do the row's work; what was found."""
    peers.require(side_of(job), on_cpu=job["quick"])
    if row_of(job).ram is not None:
        go_first()
    with machine(side_of(job)):
        begun = time.perf_counter()
        begin(job)
        started = {"start s": time.perf_counter() - begun}
        run = Run(job)
        print("READY", flush=True)
        return started | done(run, json.loads(sys.stdin.readline())["paths"])


@contextmanager
def machine(side: Side) -> Iterator[None]:
    """One on which kernels were chosen before, or a new one; of peers nothing is compiled yet."""
    forgotten = [*([] if side.remembers else [REMEMBERED]), *peers.caches(side)]
    if not forgotten:
        yield
        return
    # Processes that helped to compile may still hold a file of theirs.
    with tempfile.TemporaryDirectory(prefix="fusestream-new-", ignore_cleanup_errors=True) as empty:
        before = {name: os.environ.get(name) for name in forgotten}
        os.environ.update(dict.fromkeys(forgotten, empty))
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def done(run: Run, paths: dict[str, str]) -> dict[str, Any]:
    """One side's work, watched."""
    import torch  # noqa: PLC0415

    from .card import Card, acting_small  # noqa: PLC0415

    run.paths = paths
    result: dict[str, Any] = run.hold()
    ballast = run.job["free"] if run.side.ballast and run.cuda else None
    with ExitStack() as stack, torch.inference_mode(), small_files_too(run.job), acting_small(ballast):
        cards = [stack.enter_context(Card(ballast, index)) for index in range(run.side.cards if run.cuda else 1)]
        result["free GiB"] = cards[0].start / 2**30
        try:
            result |= run()
        except torch.OutOfMemoryError as error:
            result["error"] = "out of memory"
            result["message"] = str(error).splitlines()[0][:600]
        result["peak GiB"] = max(card.peak for card in cards)
        result["torch's at the peak GiB"] = max(cards, key=lambda card: card.peak).allocators / 2**30
        if len(cards) > 1:
            result["peaks GiB"] = [card.peak for card in cards]
    result |= run.told()
    why = run.peer.failure() or stepped_aside(run.job)
    if why is not None and "error" not in result:
        result["error"] = why
    return result | host_memory(run.ram_before, result.get("pager", {})) | {"environment": describe()}


def stepped_aside(job: dict[str, Any]) -> str | None:
    """Why a result of ours is ComfyUI's: a part of ours has stepped aside."""
    if job["who"] != "ours":
        return None
    aside = importlib.import_module("fusestream.fusion.compatibility.aside").stepped_aside()
    return "; ".join(part.words for part in aside)[:300] or None


@contextmanager
def small_files_too(job: dict[str, Any]) -> Iterator[None]:
    """Of tiny checkpoints stock takes some only while it reads all sizes from the file."""
    if not job["quick"]:
        yield
        return
    from ... import checkpoints  # noqa: PLC0415

    importlib.import_module("comfy.sd")
    with checkpoints.narrow.opened(importlib.import_module("comfy")):
        yield


def session(job: dict[str, Any]) -> dict[str, Any]:
    """Tries of the bench on the CPU: many jobs in one process, since none of them is measured. Until there are no more."""
    begin({**job, "side": {"comfy": (), "attention": None}})  # switches of ComfyUI's hold for a whole process
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)  # two processes on two cores
    print("READY", flush=True)
    for line in sys.stdin:
        word = json.loads(line)
        say(partial(make_weights, word["job"]) if word["job"]["task"] == "weights" else partial(tried, word))
    return {}


def tried(word: dict[str, Any]) -> dict[str, Any]:
    """One job of a session, which leaves nothing to the next."""
    import comfy.model_management  # noqa: PLC0415

    importlib.import_module("fusestream.kernels_cuda").LEDGER.clear()
    vram: Any = importlib.import_module("fusestream.fusion.stream.vram_pool")
    ram = vram._ram
    try:
        return done(Run(word["job"]), word["paths"])
    finally:
        vram._ram = ram
        comfy.model_management.unload_all_models()


def describe() -> dict[str, Any]:
    """Where this ran."""
    import torch  # noqa: PLC0415

    kernels = importlib.import_module("fusestream.bench.kernels")
    version = importlib.import_module("comfyui_version").__version__
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    said: dict[str, Any] = kernels.environment() if torch.cuda.is_available() else {"torch": torch.__version__}
    return {**said, "card": card, "ComfyUI": version}


def host_memory(before: float | None, pager: Mapping[str, Any]) -> dict[str, Any]:
    """GiB of RAM at most; and how much of it the work took, with what the driver has pinned, which is no memory of the process."""
    most = ram_gib("VmHWM")
    if most is None or before is None:
        return {}
    pinned = pager.get("peak GiB", {}).get("pinned RAM", 0.0)
    return {"RAM peak GiB": most, "RAM held GiB": most - before + pinned}


def say(task: Callable[[], dict[str, Any]]) -> None:
    """Do it, and print what came of it."""
    result: dict[str, Any]
    try:
        result = task()
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"[:300]}
    print("RESULT " + json.dumps(result), flush=True)
    sys.stderr.flush()


def main(arguments: Sequence[str]) -> int:
    job = json.loads(arguments[0])
    task = {"weights": write_weights, "work": work, "session": session}[job["task"]]
    say(partial(task, job))
    os._exit(0)  # nothing that is left to be torn down can spoil what was found
