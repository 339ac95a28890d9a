"""What torch leaves half open when CUDA gives a recording up, and launches that find no memory: over a torch that pretends."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusestream.gpu import graphs
from fusestream.gpu.graphs import CudaRecorder, NotRecorded

DEVICE = torch.device("cuda", 0)
INVALIDATED = "CUDA error: operation failed due to a previous error during capture\nCUDA kernel errors might"
NONE_LEFT = "CUDA error: out of memory\nCUDA kernel errors might"


class Torch:
    """Its allocator, generator and graphs, as torch 2.11 has them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open: set[tuple[int, int]] = set()  # pools that allocations go to
        self.held: set[tuple[int, int]] = set()  # pools that somebody uses
        self.is_recording = False  # the generator
        self.fails: dict[str, str] = {}
        self.free = 100
        self.waited = self.cleared = 0
        self.allocator, self.state = "native", 1
        torch_: Any = self

        class Graph:
            pool: Any = None
            ended = False

            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"
                self.pool = pool
                torch_.open.add(pool)
                torch_.held.add(pool)
                torch_.is_recording = True
                torch_.fail("begin")

            def capture_end(self) -> None:
                torch_.fail("end")
                torch_.open.discard(self.pool)
                torch_.is_recording, self.ended = False, True
                torch_.fail("instantiate")

            def replay(self) -> None:
                torch_.fail("replay")
                torch_.free -= 10

            def reset(self) -> None:
                if self.ended:
                    torch_.held.remove(self.pool)
                    self.ended = False

        class Generator:
            def clone_state(self) -> str:
                return "a clone"

            def graphsafe_set_state(self, state: str) -> None:
                assert state == "a clone"
                torch_.is_recording = False

        def end(_device: int, pool: Any) -> None:
            if pool not in torch_.open:
                raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
            torch_.open.discard(pool)

        pools = iter(range(1, 100))
        for name, value in {
            "CUDAGraph": Graph,
            "graph_pool_handle": lambda: (0, next(pools)),
            "default_generators": (Generator(),),
            "current_device": lambda: 0,
            "device": lambda _: contextlib.nullcontext(),
            "stream": lambda _: contextlib.nullcontext(),
            "Stream": lambda _: SimpleNamespace(cuda_stream=1),
            "synchronize": lambda *_: setattr(torch_, "waited", torch_.waited + 1),
            "empty_cache": lambda: None,
            "mem_get_info": lambda *_: (torch_.free, 100),
            "get_allocator_backend": lambda: torch_.allocator,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(
            torch._C, "_cuda_clearCublasWorkspaces", lambda: setattr(torch_, "cleared", torch_.cleared + 1)
        )
        monkeypatch.setattr(graphs, "driver", lambda: SimpleNamespace(bind=lambda name: getattr(torch_, name)))
        monkeypatch.setattr(torch._C, graphs.END_OF_A_POOL, end)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda _, pool: torch_.held.remove(pool))
        monkeypatch.setattr(graphs, "other_maker", lambda _: None)

    def cuStreamIsCapturing(self, stream: Any, state: Any) -> int:
        assert stream.value == 1
        state._obj.value = self.state
        return 0

    def fail(self, where: str) -> None:
        if where in self.fails:
            raise RuntimeError(self.fails.pop(where))

    @property
    def is_whole(self) -> bool:
        return not self.open and not self.is_recording


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Torch]:
    monkeypatch.delenv(graphs.SWITCH, raising=False)
    yield Torch(monkeypatch)
    monkeypatch.undo()


def works() -> None: ...


def test_nothing_is_recorded_where_it_is_switched_off(fake: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CudaRecorder().obstacle(DEVICE) is None
    monkeypatch.setenv(graphs.SWITCH, "0")
    assert f"{graphs.SWITCH}=0" in str(CudaRecorder().obstacle(DEVICE))


def test_a_recording_and_its_release(fake: Torch) -> None:
    recorded = CudaRecorder().record(DEVICE, works)
    assert fake.is_whole and len(fake.held) == 1
    recorded.replay()
    assert recorded.nbytes == 10
    recorded.replay()
    assert recorded.nbytes == 10, "of the first"
    recorded.release()
    recorded.release()
    assert not fake.held and recorded.nbytes == 0


@pytest.mark.parametrize("where", ["begin", "end"])
def test_a_recording_that_cuda_gives_up(fake: Torch, where: str) -> None:
    """Torch can go on as if nothing had been, and nobody tries again."""
    recorder = CudaRecorder()
    fake.fails[where] = INVALIDATED
    with pytest.raises(NotRecorded, match=r"previous error during capture$"):
        recorder.record(DEVICE, works)
    assert fake.is_whole and not fake.held
    assert "recording failed in this session" in str(recorder.obstacle(DEVICE))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("none left"), RuntimeError("a refusal")])
def test_work_that_fails_while_it_is_recorded(fake: Torch, error: BaseException) -> None:
    """What it raises is what counts, whether or not CUDA has given up as well."""

    def fails() -> None:
        raise error

    for ends in ({}, {"end": INVALIDATED}):
        recorder = CudaRecorder()
        fake.fails = dict(ends)
        with pytest.raises(NotRecorded if type(error) is RuntimeError else type(error)):
            recorder.record(DEVICE, fails)
        assert fake.is_whole and not fake.held
        assert (recorder.obstacle(DEVICE) is None) == (not ends)


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_cannot_be_freed_is_kept(fake: Torch, is_lost: bool) -> None:
    """CUDA refuses to free what was allocated in a recording that it has given up, and torch ends the process then."""
    fake.allocator = "cudaMallocAsync"
    seen: list[Any] = []

    def fails() -> None:
        tensor = torch.zeros(1)
        seen.append(weakref.ref(tensor))
        if is_lost:
            fake.fails["end"], fake.state = INVALIDATED, graphs.GIVEN_UP
        raise RuntimeError("a refusal")

    recorder = CudaRecorder()
    with pytest.raises(NotRecorded):
        recorder.record(DEVICE, fails)
    assert (seen[0]() is not None) == is_lost and fake.cleared == (1 if is_lost else 2)
    assert fake.is_whole and (recorder.obstacle(DEVICE) is not None) == is_lost


def test_what_cannot_be_made_ready_for_want_of_memory(fake: Torch) -> None:
    recorder = CudaRecorder()
    fake.fails["instantiate"] = NONE_LEFT
    with pytest.raises(torch.OutOfMemoryError):
        recorder.record(DEVICE, works)
    assert fake.is_whole and not fake.held and recorder.obstacle(DEVICE) is None
    recorder.record(DEVICE, works)


def test_a_launch_that_finds_no_memory(fake: Torch) -> None:
    """Torch says it in its general error, of which nobody knows that a step may be tried again."""
    recorded = CudaRecorder().record(DEVICE, works)
    fake.fails["replay"] = NONE_LEFT
    with pytest.raises(torch.OutOfMemoryError):
        recorded.replay()
    recorded.replay()
    assert recorded.nbytes == 10, "the first that ran"
    fake.fails["replay"] = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal"):
        recorded.replay()


def test_nobody_waits_for_the_device_while_another_thread_records(fake: Torch) -> None:
    """A recording that is waited for ends."""
    recorder = CudaRecorder()
    recorded = recorder.record(DEVICE, works)
    begun, go_on, released = threading.Event(), threading.Event(), threading.Event()

    def long() -> None:
        begun.set()
        assert go_on.wait(10)
        assert not released.is_set()

    def release() -> None:
        assert begun.wait(10)
        recorded.release()
        released.set()

    thread = threading.Thread(target=release)
    other = threading.Thread(target=lambda: SimpleNamespace(it=recorder.record(DEVICE, long)))
    thread.start()
    other.start()
    assert begun.wait(10)
    assert not released.wait(0.2)
    go_on.set()
    other.join(10)
    assert released.wait(10)
    thread.join(10)
