"""Records a device's work once, as a CUDA graph, and does it again with one launch.

A recording has memory of its own. Under torch's native allocator that is a private pool, which
stays reserved. Under cudaMallocAsync (ComfyUI's default) allocations are part of the graph, and the
driver keeps their memory from the first launch on. Nothing that the work allocates may outlive the
recording, because cudaMallocAsync could free it only after a launch, and fails otherwise. So the
work writes its results to existing tensors, an error's frames are cleared while the recording is
still open, and cuBLAS's workspaces are made and given back within it.

If CUDA gives a recording up (because the host waited for the device in it), torch leaves it half
open: no memory would go back to the system from then on, and the next random number on the device
would be an error. Both are put right, and nothing more is recorded. Under cudaMallocAsync memory
allocated in such a recording cannot even be freed, so the error that ended it is kept, with
everything that its frames hold.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from .cuda import driver
from .nvidia import other_maker

Work = Callable[[], Any]

SWITCH = "FUSESTREAM_GRAPHS"
OFF = "0"
SWITCHED_OFF = f"they are switched off: {SWITCH}={OFF} stands in the environment"
ALLOCATORS = ("native", "cudaMallocAsync")
GIVEN_UP = 2  # CU_STREAM_CAPTURE_STATUS_INVALIDATED
# Torch's function that ends the allocator's part of a recording; torch before 2.6 has another name
# for it.
END_OF_A_POOL = next(
    (name for name in ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool") if hasattr(torch._C, name)),
    "_cuda_endAllocateToPool",
)


class Timed(NamedTuple):
    """The result, and seconds until the host had asked for everything (host) and until the device
    had done it (whole)."""

    out: Any
    host: float
    whole: float


class Recorded(Protocol):
    """Work that can be done again."""

    @property
    def nbytes(self) -> int:
        """Device bytes that it takes; complete after the first replay."""

    def replay(self) -> None: ...

    def release(self) -> None:
        """Give its memory back. May be called twice."""


class Recorder(Protocol):
    """A recorder of work."""

    def obstacle(self, device: torch.device) -> str | None:
        """Why nothing can be recorded on the device, in words for a user; None: it can."""

    def timed(self, device: torch.device, work: Work) -> Timed:
        """Do the work now, on a device that has nothing else to do, and wait for it."""

    def record(self, device: torch.device, work: Work) -> Recorded:
        """Record the work without doing it. Raises what the work raises, and `NotRecorded` if CUDA
        refuses it."""


class NotRecorded(RuntimeError):
    """CUDA would not record this work."""

    __module__ = "fusestream"


class CudaRecorder:
    """Recorder for all CUDA devices of the process."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        # held by recordings, and by waits for the whole device, which would end one
        self._one_at_a_time = threading.RLock()
        # why torch's allocator is not trusted with another recording
        self._broken: str | None = None

    def obstacle(self, device: torch.device) -> str | None:
        other = other_maker(device)
        if other is not None:
            return other
        if os.environ.get(SWITCH) == OFF:
            return SWITCHED_OFF
        if self._broken is not None:
            return self._broken
        backend = torch.cuda.get_allocator_backend()
        return None if backend in ALLOCATORS else f"torch's memory is managed by {backend}"

    def timed(self, device: torch.device, work: Work) -> Timed:
        stream = torch.cuda.current_stream(device)
        stream.synchronize()
        begun = time.perf_counter()
        out = work()
        asked = time.perf_counter()
        stream.synchronize()
        return Timed(out, asked - begun, time.perf_counter() - begun)

    def record(self, device: torch.device, work: Work) -> Recorded:
        with self._one_at_a_time, torch.cuda.device(device):
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # otherwise cached memory would lie beside the recording's own
            before = torch.cuda.mem_get_info(device)[0]
            graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
            stream = self._stream(device)
            with torch.cuda.stream(stream), _no_collecting():
                failed = _begun(graph, pool)
                if failed is None:
                    failed = _done(work)
                    if not _is_stuck(stream):
                        _forget_frames(failed)
                        torch._C._cuda_clearCublasWorkspaces()
                    elif failed is not None:
                        _keep_for_good(failed)
                    failed = self._ended(graph, pool, failed)
                else:
                    self._given_up(pool, failed)
            if failed is not None:
                graph.reset()
                torch.cuda.empty_cache()
                if isinstance(failed, RuntimeError) and not isinstance(failed, torch.OutOfMemoryError):
                    raise NotRecorded(_first_line(failed)) from failed
                raise failed
            nbytes = max(0, before - torch.cuda.mem_get_info(device)[0])
            return CudaRecorded(graph, device, nbytes, self._one_at_a_time)

    def _ended(
        self, graph: torch.cuda.CUDAGraph, pool: tuple[int, int], failed: BaseException | None
    ) -> BaseException | None:
        """End the recording. Returns the error so far, or the one that ending it gave."""
        try:
            graph.capture_end()
        except RuntimeError as error:
            had_ended = self._given_up(pool, error)
            if had_ended and ran_out(error):  # the recorded work could not be made ready
                self._broken = None
                return torch.OutOfMemoryError(_first_line(error))
            return failed or error
        return failed

    def _given_up(self, pool: tuple[int, int], error: BaseException) -> bool:
        """Put right what torch has left half open. Returns whether torch's allocator had ended the
        recording."""
        self._broken = f"recording failed in this session: {_first_line(error)}"
        index, had_ended = torch.cuda.current_device(), False
        try:
            getattr(torch._C, END_OF_A_POOL)(index, pool)
            torch._C._cuda_releasePool(index, pool)
        except RuntimeError:
            had_ended = True  # `reset` gives the pool back later
        generator: Any = torch.cuda.default_generators[index]
        if hasattr(generator, "graphsafe_set_state"):  # torch 2.4 and newer
            # the same numbers follow, outside any recording
            generator.graphsafe_set_state(generator.clone_state())
        return had_ended

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


@contextlib.contextmanager
def _no_collecting() -> Iterator[None]:
    """Keep the garbage collector off, because an object that it ends, such as a model, may wait for
    the device or give its memory back."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _begun(graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> BaseException | None:
    """Begin a recording. Returns the error, if any. pool: given, because torch tells a graph's own
    only after a successful recording."""
    try:
        with torch.inference_mode(False):  # for the generators' states, which each replay writes to
            # Only for this thread, because others copy weights of other models meanwhile: those
            # copies are not recorded, and are no error.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
    except RuntimeError as error:
        return error
    return None


def _done(work: Work) -> BaseException | None:
    """Run the work. Returns the error, if any, with its frames and their tensors."""
    try:
        work()
    except BaseException as error:  # also interrupts, which are no Exception
        return error
    return None


def _forget_frames(failed: BaseException | None) -> None:
    """Free the tensors of the frames that failed, within the recording."""
    if failed is not None:
        traceback.clear_frames(failed.__traceback__)


def _keep_for_good(failed: BaseException) -> None:
    """Keep the error, its frames and their tensors beyond the process's last collection, because
    freeing them even then would abort the process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(failed))


def _is_stuck(stream: Any) -> bool:
    """Whether memory allocated since the stream is recorded cannot be freed, because CUDA has given
    the recording up, and torch ends the process when cudaFreeAsync fails. Such memory was never
    taken, so it may be kept."""
    if torch.cuda.get_allocator_backend() == "native":
        return False
    found, state = driver(), ctypes.c_int()
    status = found.bind("cuStreamIsCapturing")(ctypes.c_void_p(stream.cuda_stream), ctypes.byref(state))
    return bool(status != 0 or state.value == GIVEN_UP)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def ran_out(error: BaseException) -> bool:
    """Whether the device had no memory. A launch says so in torch's general error."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


class CudaRecorded:
    """A recording of CudaRecorder. alone: held while any recording is made."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        device: torch.device,
        nbytes: int,
        alone: contextlib.AbstractContextManager[Any],
    ) -> None:
        self.nbytes = nbytes
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._device, self._alone = device, alone
        self._ran = False

    def replay(self) -> None:
        assert self._graph is not None, "released"
        before = 0 if self._ran else torch.cuda.mem_get_info(self._device)[0]
        try:
            self._graph.replay()
        except RuntimeError as error:  # cudaMallocAsync takes the memory here; nothing was done
            if not ran_out(error) or isinstance(error, torch.OutOfMemoryError):
                raise
            raise torch.OutOfMemoryError(_first_line(error)) from error
        if not self._ran:
            self._ran = True
            self.nbytes += max(0, before - torch.cuda.mem_get_info(self._device)[0])

    def release(self) -> None:
        if self._graph is None:
            return
        graph, self._graph = self._graph, None
        with self._alone, torch.cuda.device(self._device):
            torch.cuda.synchronize()  # the graph may be running
            graph.reset()
            torch.cuda.empty_cache()
            if torch.cuda.get_allocator_backend() != "native":
                found = driver()
                trim = found.bind("cuDeviceGraphMemTrim", ctypes.c_int)
                status = trim(found.device(torch.cuda.current_device()))
                found.check(status, "cuDeviceGraphMemTrim", "memory of a released graph")
        self.nbytes = 0


RECORDER = CudaRecorder()
