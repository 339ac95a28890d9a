"""The launcher where there is no GPU: what is missing is said, and nothing raises at import."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from fusestream.gpu import Driver
from fusestream.kernels_cuda import CodeUnavailable, launcher, preload
from fusestream.kernels_cuda.binary.driver_calls import PROGRAMMATIC_SERIALIZATION, LaunchAttribute, LaunchConfig
from fusestream.kernels_cuda.errors import KernelError
from fusestream.kernels_cuda.launcher import Pointer, parameter_struct, pointer_count

ROOT = Path(__file__).resolve().parents[3]
no_driver = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@no_driver
def test_no_card():
    """The same words every time, and preload keeps quiet."""
    launcher.forget_cards()
    reasons = []
    for _ in range(2):
        with pytest.raises(CodeUnavailable) as refused:
            launcher.card(0)
        reasons.append(str(refused.value))
    assert reasons[0] == reasons[1]
    preload(0)
    preload(torch.device("cuda", 0))


def test_kernels_are_unpacked_while_the_caller_goes_on(monkeypatch):
    begun, go_on, asked = threading.Event(), threading.Event(), []

    def slow(index, forced):
        begun.set()
        go_on.wait(5)
        asked.append((index, forced))

    monkeypatch.setattr(launcher, "card", slow)
    assert launcher.unpack_soon(torch.device("cpu")) is None
    thread = launcher.unpack_soon(torch.device("cuda", 1))
    assert begun.wait(5) and not asked
    go_on.set()
    thread.join(5)
    assert asked == [(1, None)]


def test_forced_class(monkeypatch):
    monkeypatch.delenv("FUSESTREAM_FORCE_CLASS", raising=False)
    assert launcher.forced_class() is None
    monkeypatch.setenv("FUSESTREAM_FORCE_CLASS", "sm_75")
    assert launcher.forced_class() == "sm_75"
    monkeypatch.setenv("FUSESTREAM_FORCE_CLASS", "turing")
    with pytest.raises(ValueError, match="FUSESTREAM_FORCE_CLASS=turing: expected one of sm_61, sm_75, sm_80"):
        launcher.forced_class()


def test_parameter_structs():
    struct = parameter_struct("P", (Pointer, "x out"), (ctypes.c_int64, "rows"), (ctypes.c_float, "eps"))
    assert ctypes.sizeof(struct) == 32 and pointer_count(struct) == 2
    assert struct(eps=0.5).eps == 0.5
    with pytest.raises(TypeError, match="P: pointers must come first"):
        pointer_count(parameter_struct("P", (ctypes.c_int64, "rows"), (Pointer, "x")))


def test_launch_config_is_laid_out_as_the_driver_wants():
    """CUlaunchConfig: seven unsigned, a stream, a pointer, a count."""
    fields = LaunchConfig.stream, LaunchConfig.attributes, LaunchConfig.attribute_count
    assert [field.offset for field in fields] == [32, 40, 48]
    assert ctypes.sizeof(LaunchConfig) == 56


class FakeCard:
    """Keeps what it is asked to launch: the attributes as the driver would read them."""

    index, name = 0, "fake"

    def __init__(self):
        self.calls, self.seen = self, []

    def allow_shared_bytes(self, *_):
        pass

    def check(self, status, *_):
        assert status == 0

    def launch_kernel(self, config, *_):
        config = config._obj
        found = [LaunchAttribute.from_address(config.attributes + 72 * i) for i in range(config.attribute_count)]
        self.seen.append([(one.which, one.value) for one in found])
        return 0


def test_a_launch_may_begin_ahead_of_the_end_of_the_one_before(monkeypatch):
    """CUlaunchAttribute: an id, padding to eight bytes, a union of 64."""
    assert ctypes.sizeof(LaunchAttribute) == 72 and LaunchAttribute.value.offset == 8
    monkeypatch.setattr(launcher, "_stream_of", lambda _: 0)
    monkeypatch.setattr(launcher, "_current_device", lambda: 0)
    struct = parameter_struct("P", (Pointer, "x"))
    card = FakeCard()
    kernel = launcher.Kernel(card, "unit", "name", ctypes.c_void_p(), {"parameters": 8}, waits=True)
    for ahead in (False, True):
        kernel.prepare(struct(), grid=(1, 1, 1), block=32, shape="", ahead=ahead)(0)
    assert card.seen == [[], [(PROGRAMMATIC_SERIALIZATION, 1)]]
    older = launcher.Kernel(card, "unit", "name", ctypes.c_void_p(), {"parameters": 8})
    with pytest.raises(KernelError, match="does not wait for the launch before it"):
        older.prepare(struct(), grid=(1, 1, 1), block=32, shape="", ahead=True)


class Library:
    """A driver of one version."""

    def __init__(self, version):
        self.version = version

    def cuInit(self, _):
        return 0

    def cuDriverGetVersion(self, out):
        out._obj.value = self.version
        return 0


@pytest.mark.parametrize(("version", "old"), [(12020, True), (12030, False), (13000, False), (9030, True)])
def test_how_old_a_driver_is(version, old):
    assert Driver(Library(version)).is_at_least(12, 3) is not old


def test_importing_touches_no_gpu_and_no_other_package():
    """A fresh process: kernels_cuda alone, without CUDA started and without ComfyUI or our other folders."""
    script = """
import sys, types
pack = types.ModuleType("pack"); pack.__path__ = [sys.argv[1]]; sys.modules["pack"] = pack
import pack.kernels_cuda, torch
assert not torch.cuda.is_initialized()
mine = {name.split(".")[1] for name in sys.modules if name.startswith("pack.")}
assert mine == {"gpu", "kernels_cuda"}, mine
assert not any(name.split(".")[0] in ("comfy", "nodes", "folder_paths") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", script, str(ROOT)], check=True)


def test_the_build_scripts_need_no_torch():
    """ninja starts one per compilation; and whoever builds needs nothing but the compiler."""
    script = f"""
import sys
import threading
sys.modules["torch"] = None
sys.argv = ["build", "--check"]
import runpy
try:
    runpy.run_path({str(ROOT / "kernels_cuda" / "build")!r}, run_name="__main__")
except SystemExit as end:
    assert end.code in (0, 1), end.code
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


@pytest.mark.deep
def test_two_copies_of_the_pack_live_in_one_process():
    """Two folders in custom_nodes: the second registers under a namespace of its own."""
    script = """
import sys, types, torch
for name in ("one", "two"):
    pack = types.ModuleType(name); pack.__path__ = [sys.argv[1]]; sys.modules[name] = pack
import one.kernels_cuda, two.kernels_cuda
x = torch.randn(1, 2, 8).half()
assert torch.equal(one.kernels_cuda.norm_modulate(x, eps=1e-6), two.kernels_cuda.norm_modulate(x, eps=1e-6))
print(one.kernels_cuda.OPS["norm_modulate"].traced, two.kernels_cuda.OPS["norm_modulate"].traced)
"""
    run = subprocess.run([sys.executable, "-c", script, str(ROOT)], check=True, capture_output=True, text=True)
    assert run.stdout.split() == ["fusestream.norm_modulate.default", "fusestream2.norm_modulate.default"]
