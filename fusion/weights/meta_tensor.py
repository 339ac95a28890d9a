"""Stand-ins for the tensors of a file: shape and type, without bytes.

Stock's functions build a model out of these as out of real tensors. Their operations fall into
these kinds:

    shape, type, device      answered
    renamed, cast            still the same tensor of the file: it may be paged, and the pager casts
    some of its rows         a piece of the file, as q, k and v of OpenCLIP's in_proj are: may be
                             paged
    its bytes, renamed       as another type of the same size, as scales are: may be paged
    otherwise split, joined  no longer one tensor of the file: it can be read, but not paged
    numbers                  (a deviation, a flag) read from the file at once

Stand-ins that are not paged become real at the end, by the same steps on the bytes
(`StandIn.read`). So a file that turns out not to be streamable costs its header, and no weight is
read twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...memory import Checkpoint, Extent
from ...memory.layer import DTYPES
from ..base.errors import NotStreamable
from . import ggml_blocks

META = torch.device("meta")

# Functions that make a tensor of other tensors without looking at numbers, by torch's names.
CASTS = {
    "to", "type", "half", "float", "double", "bfloat16", "cpu", "cuda", "detach", "detach_", "contiguous", "clone", "data",
    "requires_grad_",
}  # fmt: skip
VIEWS = {
    "view", "reshape", "flatten", "unflatten", "permute", "transpose", "t", "T", "mT", "squeeze", "unsqueeze", "movedim",
    "narrow", "__getitem__", "chunk", "split", "tensor_split", "unbind", "expand", "cat", "concat", "stack", "hstack", "vstack",
}  # fmt: skip
# Functions that only ask. A property counts as one if it gives no tensor.
QUESTIONS = {
    "size", "dim", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous", "is_floating_point",
    "is_complex", "is_inference", "is_pinned", "is_shared", "data_ptr", "untyped_storage", "__len__", "__repr__", "__hash__",
    "__format__", "__reduce_ex__", "__deepcopy__", "ndimension", "get_device", "is_same_size", "has_names", "is_neg", "is_conj",
}  # fmt: skip
LIKES = {"empty_like", "zeros_like", "ones_like", "new_empty", "new_zeros", "new_full", "__setitem__"}


Kind = TypeVar("Kind", bound="StandIn")


class StandIn(torch.Tensor):
    """extent    of the file's tensor with these bytes, cast at most; None: made of a part or of
              several
    sources   names of the file's tensors that it was made of
    """

    extent: Extent | None
    sources: frozenset[str]
    _make: Callable[[], Tensor]

    @staticmethod
    def of(name: str, extent: Extent, dtype: torch.dtype, read: Callable[[], Tensor]) -> StandIn:
        """The stand-in of a tensor of a file. read: its bytes, as stored."""
        return stand_in(StandIn, torch.empty(extent.shape, dtype=dtype, device=META), read, frozenset({name}), extent)

    def read(self) -> Tensor:
        """The tensor with its bytes."""
        return self._make()

    def as_stored(self) -> StandIn:
        """The stored bytes of a packed tensor, uint8 [bytes], which only the pager reads."""
        assert self.extent is not None, "made of a part of the file's tensor, or of several"
        meta = torch.empty(self.extent.nbytes, dtype=torch.uint8, device=META)
        return stand_in(StandIn, meta, self._make, self.sources, self.extent)

    def in_the_files_type(self) -> StandIn:
        """The stand-in in the file's type, for one that was widened."""
        assert self.extent is not None, "made of a part of the file's tensor, or of several"
        kind = ggml_blocks.type_of(self.extent)
        meta = torch.empty(self.shape, dtype=kind, device=META)
        return stand_in(StandIn, meta, lambda: self._make().to(kind), self.sources, self.extent)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        name = name_of(func)
        with torch._C.DisableTorchFunctionSubclass():
            if name == "copy_":
                return _copied(*args, **kwargs)
            if name == "requires_grad_":  # the very same tensor
                return args[0]
            if name in LIKES or (name.endswith("_") and not name.endswith("__") and name not in CASTS):
                raise NotStreamable(
                    f"ComfyUI changes {_told(args)} when it loads the file (by {name}), so that it cannot stream"
                )
            if name in CASTS or name in VIEWS:
                return _made_by(func, name, args, kwargs)
            if name in QUESTIONS or func.__name__ in ("__get__", "__set__"):
                return func(*args, **kwargs)
            return func(*real(args), **real(kwargs))


def tensors_of(source: Checkpoint, *, text: bool = True) -> dict[str, Tensor]:
    """All tensors of a file by name: stand-ins, and the bytes of those that are text (tokenizers,
    settings of quantised layers), which the builder of a model needs. text: false leaves these
    unread too."""
    return {name: _tensor(source, name, extent, text) for name, extent in source.extents.items()}


def _tensor(source: Checkpoint, name: str, extent: Extent, text: bool) -> Tensor:
    kind = ggml_blocks.type_of(extent)
    if kind is None:
        path = source.file_of(extent).path
        raise NotStreamable(f"{path}: {name} is of type {extent.dtype}, which torch does not know.")

    def read() -> Tensor:
        return ggml_blocks.numbers(source.keep(extent), extent)

    if text and kind is torch.uint8 and len(extent.shape) == 1:
        return read()
    return StandIn.of(name, extent, kind, read)


def name_of(func: Any) -> str:
    """The function's name: `view` of torch.Tensor.view and torch.view; `T` of the property T."""
    name: str = func.__name__
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def stand_in(
    kind: type[Kind], meta: Tensor, make: Callable[[], Tensor], sources: frozenset[str], extent: Extent | None
) -> Kind:
    """A tensor of this class with the shape and type of one on the meta device."""
    found = torch.Tensor._make_subclass(kind, meta)
    found._make, found.sources, found.extent = make, sources, extent
    return found


def _made_by(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The outcome of a function on stand-ins: stand-ins that know how to become real."""
    sources = frozenset(source for one in _stand_ins((args, kwargs)) for source in one.sources)
    first = args[0] if isinstance(args[0], StandIn) else None
    out = _cast(func, name, args, kwargs) if name in CASTS else func(*on_meta(args), **on_meta(kwargs))
    # A cast of a cast is two roundings, which the pager would make one.
    stays = first is not None and first.extent is not None and name in CASTS
    extent = first.extent if stays and first is not None and out.dtype == first.dtype else None
    if stays and first is not None and extent is None and _is_as_stored(first):
        extent = first.extent
    if name == "__getitem__" and first is not None:
        extent = _rows_of(first, args[1])
    if name == "view" and first is not None and out.shape == first.shape:
        extent = _bytes_as(first, out.dtype)

    def make() -> Any:
        return func(*real(args), **real(kwargs))

    def part(i: int) -> Callable[[], Tensor]:
        return lambda: make()[i]

    if isinstance(out, Tensor):
        return stand_in(StandIn, out, make, sources, extent)
    return type(out)(stand_in(StandIn, one, part(i), sources, None) for i, one in enumerate(out))


def _rows_of(one: StandIn, index: Any) -> Extent | None:
    """The extent of a slice of rows in the file; None: the index is not a plain slice of rows, or
    the tensor is packed."""
    if one.extent is None or one.extent.is_packed or not isinstance(index, slice) or index.step not in (None, 1):
        return None
    first, last, _ = index.indices(one.shape[0])
    return one.extent.rows(first, max(first, last))


def _bytes_as(one: StandIn, dtype: torch.dtype) -> Extent | None:
    """The extent of the same bytes as numbers of another type; None: they are not as stored, or files
    have no such type."""
    name = next((name for name, known in DTYPES.items() if known == dtype), None)
    if name is None or one.extent is None or one.extent.is_packed or not _is_as_stored(one):
        return None
    return one.extent.of_type(name)


def _is_as_stored(one: StandIn) -> bool:
    return one.extent is not None and ggml_blocks.type_of(one.extent) == one.dtype


def _cast(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The stand-in in another type; a change of device is ignored."""
    one: Any = args[0]
    meta = one.as_subclass(Tensor)
    if name in ("to", "type", "cpu", "cuda"):
        dtype = _wanted_dtype(one, name, args[1:], kwargs)
        return torch.empty_strided(meta.size(), meta.stride(), dtype=dtype, device=META)
    found: Tensor = func(meta, *args[1:], **kwargs)
    return found


def _wanted_dtype(one: Tensor, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    own: torch.dtype = one.dtype
    given = [*args, *kwargs.values()]
    if name in ("cpu", "cuda"):
        return own
    other = next((value.dtype for value in given if isinstance(value, Tensor)), None)
    return next((value for value in given if isinstance(value, torch.dtype)), other or own)


def _copied(target: Any, source: Any, *_others: Any, **_options: Any) -> Any:
    """target.copy_(source): copies nothing to a target on the meta device, and the file's bytes to
    a real one."""
    if isinstance(target, StandIn):
        raise NotStreamable(
            f"ComfyUI changes {_told((target,))} when it loads the file (by copy_), so that it cannot stream"
        )
    if target.is_meta:
        return target
    return target.copy_(source.read())


def _told(values: Any) -> str:
    names = sorted({name for one in _stand_ins(values) for name in one.sources})
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _stand_ins(value: Any) -> Iterable[StandIn]:
    if isinstance(value, StandIn):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _stand_ins(part)
    elif isinstance(value, dict):
        yield from _stand_ins(list(value.values()))


def _changed(value: Any, change: Callable[[StandIn], Any]) -> Any:
    if isinstance(value, StandIn):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_changed(part, change) for part in value)
    if isinstance(value, dict):
        return {key: _changed(part, change) for key, part in value.items()}
    return value


def real(value: Any) -> Any:
    """The same arguments, with stand-ins read."""
    return _changed(value, lambda one: one.read())


def on_meta(value: Any) -> Any:
    """The same arguments, with stand-ins as plain tensors on the meta device."""
    return _changed(value, lambda one: one.as_subclass(Tensor))
