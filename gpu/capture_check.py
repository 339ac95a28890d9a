"""A rehearsal: work is run once, eagerly, before it is recorded, to find out whether it can be.

In a recording the host must not wait for the device, and a copy from ordinary host memory would be
read again at each replay, after that memory is gone. A wait ends the rehearsal. Copies are taken
for constants (ComfyUI makes the frequencies of Wan's time embedding on the CPU, at each call): the
rehearsal keeps them on the device, and `recalled` hands out a copy whenever the work makes the same
ones again.

Python does not see all of torch's work (`torch.tensor` on a device, for one). So on a GPU torch is
told to warn whenever it lets the host wait, and functions that wait by name are watched. This
matters because a recording in which the host waits is lost, and under cudaMallocAsync the process
with it: memory that was allocated in the recording can then not be freed.

Operations of other libraries may launch anywhere. torchvision's deformable convolution launches on
CUDA's default stream, which no recording sees: the work was done once, during the recording, and
each replay then read what lay there since (BiRefNet's masks were 0.14 off). So only libraries are
accepted that are known to launch on torch's stream.

The rehearsal also tells whether the work, done once more in vain, would leave everything as it was:
whether it draws no random numbers, and writes to nothing that lasts.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))
DRAWING, DROPPED = torch.Tag.nondeterministic_seeded, "dropout_p"
INDEXING = frozenset((torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default))
MASKS = frozenset((torch.bool, torch.uint8))
KEYS = {"cuda": "CUDA", "cpu": "CPU", "meta": "Meta"}  # torch's names of dispatch keys
COMPOSITE = "CompositeImplicitAutograd"
# Libraries whose operations launch on torch's current stream: torch's, ours, comfy-kitchen's.
ON_THE_STREAM = ("aten", "prim", "prims", "fusestream", "comfy_kitchen")
# Functions that every wait by name goes through.
WAITS = (
    (torch._C, "_cuda_synchronize"),
    (torch._C, "_cuda_emptyCache"),
    (torch.cuda.Stream, "synchronize"),
    (torch.cuda.Event, "synchronize"),
)
_listening = threading.RLock()
# Torch's warning about a wait, and its warning about asking for such warnings.
WAITED, PROTOTYPE = "called a synchronizing CUDA operation", "Synchronization debug mode is a prototype"
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
Meet = Callable[[Tensor, "Tensor | None", Callable[[], Tensor]], Tensor]

_NESTED = (Tensor, list, tuple, type(None))  # first items of lists that may hold tensors
TO, INTO = torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default


class NotRecordable(BaseException):
    """Why the work cannot be recorded, in words for a user. A BaseException, so that code that
    tries one way after the other does not catch it."""


class Rehearsal:
    """Rehearsal of one piece of work on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._constants: list[tuple[Tensor, Tensor]] = []  # (on the CPU, on the device)
        self._next = 0
        self.is_repeatable = True

    @property
    def nbytes(self) -> int:
        """Device bytes of the constants."""
        return sum(there.nbytes for _, there in self._constants)

    @contextlib.contextmanager
    def watched(self, lasting: Container[int] = ()) -> Iterator[None]:
        """Watch the work in this block. Raises NotRecordable. lasting: addresses of memory that
        exists before the work and after it."""
        self._constants = []
        watch = _Watch(self.device, self._learn, lasting)
        with _waits_told(self.device), _waits_heard(), watch:
            yield
        self.is_repeatable = watch.is_repeatable

    @contextlib.contextmanager
    def recalled(self) -> Iterator[None]:
        """Hand out the constants while the same work is recorded in this block. Raises
        NotRecordable if it is not the same work."""
        self._next = 0
        with _Watch(self.device, self._recall):
            yield
        if self._next != len(self._constants):
            raise NotRecordable("it does not do the same twice")

    def _learn(self, source: Tensor, into: Tensor | None, bring: Callable[[], Tensor]) -> Tensor:  # noqa: ARG002
        with _untold(self.device):
            brought = bring()
        # cloned, because the work may write to what it is given
        self._constants.append((source.clone(), brought.clone()))
        return brought

    def _recall(self, source: Tensor, into: Tensor | None, bring: Callable[[], Tensor]) -> Tensor:  # noqa: ARG002
        if self._next >= len(self._constants):
            raise NotRecordable("it does not do the same twice")
        known, there = self._constants[self._next]
        self._next += 1
        if known.shape != source.shape or known.dtype != source.dtype or not torch.equal(known, source):
            raise NotRecordable("it does not do the same twice")
        return there.clone() if into is None else into.copy_(there)


@contextlib.contextmanager
def _waits_told(device: torch.device) -> Iterator[None]:
    """Raise NotRecordable if torch warned in this block that the host waits for the device."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    waits = [one for one in said if WAITED in str(one.message)]
    for one in said:
        if one not in waits and PROTOTYPE not in str(one.message):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    if waits:
        raise NotRecordable("it waits for the card")


@contextlib.contextmanager
def _waits_heard() -> Iterator[None]:
    """Raise NotRecordable if this thread called a function that waits in this block, whatever came
    of it.

    The functions are replaced meanwhile, because a profile function (`sys.setprofile`) takes as
    long as the work.
    """
    heard: list[str] = []
    thread, before = threading.get_ident(), list[tuple[Any, str, Any]]()

    def heard_by(function: Any, name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def ask(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                heard.append(name)
            return function(*args, **kwargs)

        return ask

    with _listening:
        for owner, name in WAITS:
            function = vars(owner).get(name)
            if function is not None:
                before.append((owner, name, function))
                setattr(owner, name, heard_by(function, name))
        try:
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)
    if heard:
        raise NotRecordable(f"it waits for the card ({heard[0].removeprefix('_cuda_')})")


@contextlib.contextmanager
def _untold(device: torch.device) -> Iterator[None]:
    """Let the host wait in this block without a warning."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class _Kind(NamedTuple):
    """Properties of a torch operation on one type of device."""

    is_made_of_others: bool
    strays: bool  # it may launch on another stream than torch's
    waits: bool
    indexes: bool
    draws: bool  # random numbers
    drops: int | None  # which argument is attention's dropout share, which may be 0
    writes: tuple[tuple[int, str], ...]  # arguments that it writes to, by place and name


_kinds: dict[tuple[Any, str], _Kind] = {}


def _kind(func: Any, device: str) -> _Kind:
    found = _kinds.get((func, device))
    if found is None:
        is_made = _has_kernel(func.name(), COMPOSITE) and not _has_kernel(func.name(), KEYS[device])
        arguments = [*enumerate(func._schema.arguments)]
        writes = tuple((i, one.name) for i, one in arguments if one.alias_info is not None and one.alias_info.is_write)
        waits, draws = not WAITING.isdisjoint(func.tags), DRAWING in func.tags
        drops = next((i for i, one in arguments if one.name == DROPPED), None)
        strays = not func.name().startswith(ON_THE_STREAM)
        found = _kinds[func, device] = _Kind(is_made, strays, waits, func in INDEXING, draws, drops, writes)
    return found


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at each of torch's operations, quickly, because a network calls thousands.

    meet: brings a tensor from the CPU to the device; called with the tensor, the tensor to write to
    or None for a new one, and torch's way of doing it.
    """

    def __init__(self, device: torch.device, meet: Meet, lasting: Container[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lasting, self.is_repeatable = lasting, True
        self._type, self._meet = device.type, meet
        self._is_there: Callable[[Tensor], bool] = attrgetter(f"is_{device.type}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func, self._type)
        if kind.is_made_of_others:
            with self:  # inference mode does not decompose these before the dispatch
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if kind.draws or kind.writes:
            self.is_repeatable = self.is_repeatable and not self._leaves_traces(kind, args, kwargs)
        if func is TO:
            return self._moved(func, args, kwargs)
        if func is INTO and args[0].device != args[1].device:
            return self._copied(func, args, kwargs)
        self._look(func, kind, [*_tensors(args), *_tensors(kwargs.values())])
        return func(*args, **kwargs)

    def _leaves_traces(self, kind: _Kind, args: Sequence[Any], kwargs: Any) -> bool:
        """Whether the operation draws random numbers, or writes to memory that lasts."""
        if kind.draws and (kind.drops is None or _argument(kind.drops, DROPPED, args, kwargs)):
            return True
        written = _tensors(_argument(i, name, args, kwargs) for i, name in kind.writes)
        return any(tensor.untyped_storage().data_ptr() in self._lasting for tensor in written)

    def _moved(self, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        source, target = args[0], kwargs.get("device") or args[0].device
        there, wanted = self._is_there(source), torch.device(target).type == self._type
        if there and not wanted:
            raise NotRecordable("it reads from the card")
        if there == wanted:
            return func(*args, **kwargs)
        return self._meet(source, None, partial(func, *args, **kwargs))

    def _copied(self, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        target, source = args[:2]
        if self._is_there(source):
            raise NotRecordable("it reads from the card")
        return self._meet(source, target, partial(func, *args, **kwargs))

    def _look(self, func: Any, kind: _Kind, tensors: Sequence[Tensor]) -> None:
        there = [self._is_there(tensor) for tensor in tensors]
        if not any(there):
            return
        if kind.strays:
            raise NotRecordable(f"another library computes in it, on a stream of its own ({func.name()})")
        waits = any(tensor.dtype in MASKS for tensor in tensors[1:]) if kind.indexes else kind.waits
        if waits:
            raise NotRecordable(f"it waits for the card ({func.name().removeprefix('aten::')})")
        if not all(there) and any(not here and tensor.ndim for here, tensor in zip(there, tensors, strict=True)):
            raise NotRecordable(f"it mixes tensors of CPU and card ({func.name().removeprefix('aten::')})")


def _argument(place: int, name: str, args: Sequence[Any], kwargs: Any) -> Any:
    return args[place] if place < len(args) else kwargs.get(name)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple) and value and isinstance(value[0], _NESTED):
            found += _tensors(value)
    return found
