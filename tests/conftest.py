"""Puts the real ComfyUI under the tests and the pack beside it (`bed/pack.py`), the way ComfyUI itself would."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any

import pytest

from bed import depth, pack

ROOT = Path(__file__).resolve().parents[1]


COMFYUI = os.environ.get("COMFYUI_PATH")
# Bit for bit means: the same sums wherever the operands lie in memory. Torch's BLAS promises that only if it is asked to.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def _put_comfyui_on_path(folder: str) -> None:
    sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != ROOT]
    sys.path.insert(0, folder)


def _choose_device() -> None:
    """Must come before comfy.model_management is imported: it looks for the GPU at import."""
    import comfy.cli_args

    from bed.server import has_nvidia_gpu

    comfy.cli_args.args.cpu = not has_nvidia_gpu()
    # As on an NVIDIA card. What stock takes on the CPU needs eight times as long in fp16.
    comfy.cli_args.args.use_pytorch_cross_attention = True


if COMFYUI:
    _put_comfyui_on_path(COMFYUI)
    _choose_device()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-schema", action="store_true", help="write the node schema snapshot anew")
    parser.addoption("--update-reports", action="store_true", help="write the golden reports anew")
    parser.addoption("--update-classes", action="store_true", help="write the table of model classes anew")
    parser.addoption("--update-estimates", action="store_true", help="write the table of estimated templates anew")
    parser.addoption("--update-launches", action="store_true", help="write the golden launches anew")
    parser.addoption("--update-pictures", action="store_true", help="take the pictures of the help pages anew")


# With several workers a file stays in one of them, and so does all that needs the browser, and all that needs the one server of
# `server`: their tests wait as much as they work, and share the cores well with one that computes. What takes longest begins. Each
# worker gets two to begin with: behind the browser's is a short one.
TOGETHER = ("browser", "server")
FIRST = (
    "browser",
    "server",
    "test_families",
    "test_setup",
    "test_vaes",
    "test_encoders",
    "test_patcher_saving",
    "test_text_kv",
    "test_graphs_writing",
    "test_graphs_diffusion",
    "test_live",
    "test_kernels_build",
    "test_patcher_lora",
    "test_launches",
)


def group(path: PurePath) -> str:
    return folder if (folder := path.parent.name) in TOGETHER else path.stem


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    deep = set(depth.left_out(items)) if len(items) > 1 else set()
    if deep:
        config.hook.pytest_deselected(items=list(deep))
        items[:] = [item for item in items if item not in deep]
    items.sort(key=lambda item: FIRST.index(name) if (name := group(item.path)) in FIRST else len(FIRST))


@pytest.hookimpl(optionalhook=True)  # where there is no xdist there are no workers
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Ours, since xdist 3.8 marks groups in a place of an item's name that pytest 9.2 no longer reads."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(PurePath(nodeid.partition("::")[0]))

    return ByGroup(config, log)


def pytest_collection_finish() -> None:
    """What was imported by now stays: the collector, which ComfyUI and many tests call, need not go through all of it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def refused_by_kernels(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(op, reason) of each kernel that could not serve a call made from now on, by types, sizes and strides: that can be asked
    without a card."""
    from fusestream.kernels_cuda import LEDGER, OPS
    from fusestream.kernels_cuda.registry import Op

    found, resolve = [], Op.resolve

    def asked(op: Op, call: Any, *settle: Any) -> Any:
        ours: Any = op.candidates[0]
        if not call.policy.is_off:  # where torch's own is wanted
            found.extend((op.name, reason) for reason in ours.obstacles(call))
        return resolve(op, call, *settle)

    monkeypatch.setattr(Op, "resolve", asked)
    for op in OPS.values():
        op.forget()  # a choice is made once for each kind of call
    LEDGER.clear()
    return found


@pytest.fixture(scope="session")
def one_tokenizer_of_each() -> Iterator[None]:
    """Stock reads its vocabulary for each text encoder, up to half a second each time, and changes nothing of it."""
    import transformers

    def reading(read: Callable[..., Any]) -> Callable[..., Any]:
        @functools.cache
        def once(*args: Any, **kwargs: Any) -> Any:
            found = read(*args, **kwargs)
            found.get_vocab = functools.cache(found.get_vocab)
            return found

        return once

    with pytest.MonkeyPatch.context() as patch:
        names = ("CLIPTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", "T5TokenizerFast")
        for kind in (getattr(transformers, name) for name in names):
            patch.setattr(kind, "from_pretrained", reading(kind.from_pretrained))
        yield


def share_checkpoints(config: pytest.Config) -> None:
    """Let all workers draw each tiny file once together: `checkpoints.write` copies what any of them has written."""
    from fusestream import checkpoints

    if hasattr(config, "workerinput"):  # beside the workers' own folders, and it goes with theirs, when all have ended
        shared = Path(config.option.basetemp).parent / "checkpoints"
    else:
        shared = Path(tempfile.mkdtemp(prefix="fusestream-checkpoints-"))
        config.add_cleanup(lambda: shutil.rmtree(shared, ignore_errors=True))
    draw = checkpoints.write

    @functools.wraps(draw)
    def write(kind: str, folder: Path | str, storage: str = "fp16", seed: int = 0) -> Path:
        name = checkpoints.file_name(kind, storage, seed)
        if not (target := Path(folder) / name).exists():
            if not (shared / name).exists():  # at once, whoever else writes it too
                draw(kind, shared / str(os.getpid()), storage, seed).replace(shared / name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(shared / name, target)
        return target

    checkpoints.write = write


class _RootIsNoPackage:
    """The pack is loaded as ComfyUI loads it. Pytest would import its entry point once more, under the name of the folder that the
    repository lies in, and fail where that is none of Python's."""

    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(
        _RootIsNoPackage()
    )  # not this file's own hook: those are asked about what lies below it
    gpu = ROOT / "tests" / "gpu"
    if not COMFYUI and not all(gpu in [path := Path(name).resolve(), *path.parents] for name in config.args):
        pytest.exit("COMFYUI_PATH is not set: call `python3 dev.py test`, which also takes pytest's arguments.", 2)
    if not config.getoption("numprocesses", None):  # who hands the tests out to workers needs neither torch nor ComfyUI
        pack.load()
        share_checkpoints(config)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Nets this small gain nothing from a second thread, and where other work shares the cores they wait for it for minutes."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
