"""What each of torch's operations makes of a band. An operation that is in no table, and that torch
does not compose of others, is refused by its name: then stock computes all at once, as ever.

A rule gives the part of the result that depends on the band alone, and where it lies. It computes
with the operation itself, so values are those of stock's code on the whole tensor. A convolution
may sum in another order if its library takes another algorithm for another size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..bands import Span
from .arguments import mapped, on_meta, tensors
from .tensor import NEVER, Banded, Later, Unreadable

aten = torch.ops.aten
Rule = Callable[..., Any]
Entered = TypeVar("Entered", bound=Rule)
RULES: dict[Any, Rule] = {}
LIGHT: set[Any] = set()  # operations that are done again rather than that their result is kept
DRAWS = {aten.randn_like, aten.rand_like}
RANDOM = torch.Tag.nondeterministic_seeded
# Refused, because every row depends on all others.
REFUSED = {
    **dict.fromkeys((aten.group_norm, aten.native_group_norm, aten.instance_norm), "a group norm reads whole pictures"),
    **dict.fromkeys(
        (aten.scaled_dot_product_attention, aten.bmm, aten.baddbmm, aten.matmul), "an attention reads whole pictures"
    ),
}
CONVOLUTIONS = {aten.convolution, aten.conv2d, aten.conv3d}
KEPT_WHOLE = {aten.scaled_dot_product_attention}  # composed of others, but computed by one kernel


def rule(*operations: Any) -> Callable[[Entered], Entered]:
    """Enter a function into the table, for these operations."""

    def enter(function: Entered) -> Entered:
        for operation in operations:
            RULES[operation] = function
        return function

    return enter


def moving(*operations: Any) -> Callable[[Entered], Entered]:
    """The same for a function that is not told which of the operations it is."""

    def enter(function: Entered) -> Entered:
        rule(*operations)(lambda _func, *args, **kwargs: function(*args, **kwargs))
        LIGHT.update(operations)
        return function

    return enter


def apply(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation of which at least one argument is a `Banded`."""
    bands = _bands(args, kwargs)
    if func.overloadpacket is aten.copy_ and isinstance(args[0], Banded) and args[0].sink is not None:
        return _delivered(args[0], args[1])
    if func.overloadpacket is aten.cudnn_convolution and bands[0].held.is_meta:
        x, weight, padding, stride, dilation, groups = args[:6]
        args = (x, weight, None, stride, padding, dilation, False, [0] * len(padding), groups)
        return apply(aten.convolution.default, args, {})
    if all(band.is_skipped for band in bands) or any(band.later is NEVER for band in bands):
        return _skip(func, args, kwargs, bands)
    if any(band.is_skipped for band in bands):
        args, kwargs = mapped(_made, args), mapped(_made, kwargs)
        bands = _bands(args, kwargs)
    if all(band.axis is None for band in bands):
        return _whole(func, args, kwargs, bands)
    if any(band.axis is None for band in bands):
        raise Unreadable("it adds something to a band that is not cut")
    if func.overloadpacket in REFUSED:
        raise Unreadable(REFUSED[func.overloadpacket])
    known = RULES.get(func.overloadpacket)
    if known is not None:
        return known(func, *args, **kwargs)
    made = func.decompose(*args, **kwargs)
    if made is NotImplemented:
        raise Unreadable(f"it computes {_name(func)}")
    return made


def _name(func: Any) -> str:
    return str(func.overloadpacket).removeprefix("aten.")


def _bands(*arguments: Any) -> list[Banded]:
    return [
        each
        for group in arguments
        for each in tensors(group.values() if isinstance(group, dict) else group)
        if isinstance(each, Banded)
    ]


def _numberless(value: Tensor) -> Tensor:
    return value.held if isinstance(value, Banded) else on_meta(value)


@cache
def _is_composed(func: Any) -> bool:
    """Whether torch computes it of other operations."""
    key = "CompositeImplicitAutograd"
    return func.overloadpacket not in KEPT_WHOLE and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """The operation without numbers. args, kwargs: plain tensors on the meta device."""
    if func.overloadpacket in VALUE_BY_VALUE and kwargs.get("memory_format") is None:
        given = list(tensors(args))
        if func._schema.is_mutable:
            return given[0]
        if len(given) == 1 and kwargs.get("dtype", given[0].dtype) is given[0].dtype:
            return torch.empty_like(given[0])
        if len({each.dtype for each in given}) == 1 < len(given):
            largest = max(given, key=Tensor.numel)
            if largest.shape == torch.broadcast_shapes(*(each.shape for each in given)):  # type: ignore[no-untyped-call]
                return torch.empty_like(largest)
    return func(*args, **kwargs)


def run(func: Any, source: Banded, *args: Any, **kwargs: Any) -> Any:
    """The operation on plain tensors. Without numbers if the source has none; its meter counts."""
    if not source.held.is_meta:
        return func(*args, **kwargs)
    args, kwargs = mapped(on_meta, args), mapped(on_meta, kwargs)
    kwargs.pop("device", None)
    made = _on_meta(func, args, kwargs)
    if source.meter is not None:
        source.meter.count(func, args, kwargs, made)
    return made


def wrap(source: Banded, made: Any, dim: int | None, span: Span, whole: int, device: Any = None) -> Banded:
    """A result as a band like the source, perhaps on another device."""
    if device is None or torch.device(device) == source.device:
        return source.like(made, dim, span, whole)
    device, meter = torch.device(device), source.meter
    share = None
    if meter is not None:
        share = meter.share(made) if device == meter.device else meter.elsewhere()
    return Banded(made, dim, span, whole, device, share)


def named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The operation's arguments by their names."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


# ------------------------------------------------------------------------------------------------ nothing is cut


def _skip(func: Any, args: Any, kwargs: Any, bands: Iterable[Banded]) -> Any:
    """Another call computes it. Numbers that are drawn by chance are drawn here, too, because those
    that follow depend on it."""
    if func._schema.is_mutable and not (isinstance(args[0], Banded) and args[0].is_skipped):
        raise Unreadable("it writes into a tensor of its own")
    device = kwargs.get("device") or next(iter(bands)).device
    if RANDOM in func.tags and not _is_idle(func, args, kwargs):
        _drawn(func, args, kwargs)
    given, options = _without_numbers(args, kwargs)
    found = _on_meta(func, given, options)
    same, device = {id(band.held): band for band in bands}, torch.device(device)
    made = mapped(lambda t: same[id(t)] if id(t) in same else Banded(t, device=device), found)
    _made_later(func, args, kwargs, bands, made)
    return made


def _made_later(func: Any, args: Any, kwargs: Any, bands: Iterable[Banded], made: Any) -> None:
    """Say of a result how it is made, if its operation and those before take little."""
    results = list(tensors((made,)))
    if any(band.later is NEVER for band in bands):
        for each in results:
            each.later = NEVER  # type: ignore[attr-defined]
        return
    is_light = func.overloadpacket in LIGHT
    if func.overloadpacket in CONVOLUTIONS:
        is_light = args[1].shape[2:].numel() == 1
    if func._schema.is_mutable or not is_light or any(band.later is None for band in bands):
        for each in results:
            each.later = None  # type: ignore[attr-defined]
        return
    again = Later(lambda: list(tensors((apply(func, mapped(_made, args), mapped(_made, kwargs)),))))
    for at, each in enumerate(results):
        each.later = Later(lambda at=at: again.value()[at])  # type: ignore[attr-defined, misc]


def _made(value: Tensor) -> Tensor:
    """What a band meets that another call computes."""
    if not isinstance(value, Banded) or not value.is_skipped:
        return value
    if value.later is None:
        raise Unreadable("something passes beside the module where bands begin")
    return value.later.value()  # type: ignore[no-any-return]


def _whole(func: Any, args: Any, kwargs: Any, bands: list[Banded]) -> Any:
    """All of it, without numbers; counted."""
    first, meter = bands[0], bands[0].meter
    assert meter is not None
    if _is_composed(func):
        made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
    device = torch.device(kwargs.get("device") or first.device)
    given, options = _without_numbers(args, kwargs)
    found = _on_meta(func, given, options)
    meter.count(func, given, options, found)
    same = {id(band.held): band for band in bands}

    def wrapped(made: Tensor) -> Banded:
        if id(made) in same:
            return same[id(made)]
        share = meter.share(made, *bands) if device == meter.device else meter.elsewhere()
        return Banded(made, device=device, share=share)

    return mapped(wrapped, found)


def _without_numbers(args: Any, kwargs: Any) -> Any:
    options = {name: value for name, value in kwargs.items() if name != "device"}
    return mapped(_numberless, args), mapped(_numberless, options)


def _delivered(sink: Banded, piece: Any) -> Banded:
    """Write the rows of a piece into the result."""
    if not isinstance(piece, Banded):
        raise Unreadable("its result is not made of what it is given")
    if piece.is_skipped or piece.axis is None:
        return sink  # another call makes it, or nothing is cut
    assert piece.axis == sink.axis and sink.sink is not None
    sink.sink.append(piece.span)
    if not piece.held.is_meta:
        sink.part(piece.span).copy_(piece.held)
    return sink


def _drawn(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Random numbers for a whole tensor."""
    if func.overloadpacket not in DRAWS:
        raise Unreadable(f"it draws numbers with {_name(func)}")
    like = args[0]
    empty = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    return func(empty, **kwargs)  # type: ignore[no-any-return]


def _is_idle(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether it is a dropout, or what torch makes of one, that drops nothing."""
    given = named(func, args, kwargs)
    may_drop = any(argument.name == "dropout_p" for argument in func._schema.arguments)
    return given.get("train") is False or (may_drop and not given.get("dropout_p"))


@moving(aten.dropout, aten.dropout_, aten.feature_dropout, aten.feature_dropout_)
def dropout(x: Banded, _share: float, train: bool) -> Banded:
    """In training alone."""
    if train:
        raise Unreadable("it drops values by chance")
    return x


@rule(*DRAWS)
def draw(func: Any, x: Banded, **kwargs: Any) -> Banded:
    """Drawn for the whole tensor, so that each band has its part of the same numbers."""
    assert x.axis is not None
    if x.held.is_meta:
        return x.like(torch.empty_like(x.held), x.axis, x.span, x.whole)
    made = _drawn(func, (x,), kwargs).narrow(x.axis, x.span[0], x.span[1] - x.span[0]).clone()
    return x.like(made, x.axis, x.span, x.whole)


# -------------------------------------------------------------------------------------------------- value by value

POINTWISE = (
    "abs abs_ add add_ addcdiv addcdiv_ addcmul addcmul_ ceil clamp clamp_ clamp_max clamp_min clamp_min_ clone copy_ "
    "cos div div_ elu empty_like exp exp_ fill_ floor full_like gelu hardtanh leaky_relu leaky_relu_ lerp log maximum "
    "minimum mish mul mul_ nan_to_num nan_to_num_ neg ones_like pow pow_ reciprocal relu relu_ round rsqrt rsub sigmoid "
    "sigmoid_ sign silu silu_ sin softplus sqrt sqrt_ square sub sub_ tanh tanh_ where zero_ zeros_like _to_copy"
)
VALUE_BY_VALUE = {getattr(aten, name) for name in POINTWISE.split()}
LIGHT.update(VALUE_BY_VALUE)


@rule(*VALUE_BY_VALUE)
def pointwise(func: Any, *args: Any, **kwargs: Any) -> Banded:
    """Of several bands, the rows that all of them have. Plain tensors are cut to these."""
    bands = _bands(args, kwargs)
    first = bands[0]
    ends = {(band.axis or 0) - band.ndim for band in bands}
    if len(ends) > 1 or len({band.whole for band in bands}) > 1:
        raise Unreadable(f"{_name(func)} joins tensors that are cut along different dimensions")
    end, whole = ends.pop(), first.whole
    span = max(band.span[0] for band in bands), min(band.span[1] for band in bands)
    if span[0] >= span[1]:
        raise Unreadable("the bands are too narrow")

    def cut(value: Tensor) -> Tensor:
        if isinstance(value, Banded):
            return value.part(span)
        if value.ndim >= -end and value.shape[end] != 1:
            if value.shape[end] != whole:
                raise Unreadable(f"{_name(func)} meets a tensor of another size")
            return value.narrow(value.ndim + end, span[0], span[1] - span[0])
        return value

    if func._schema.is_mutable:
        target = args[0]
        if target.numel() == 0:
            return target  # type: ignore[no-any-return]
        if not isinstance(target, Banded) or not target.is_writable or target.span != span:
            raise Unreadable(f"{_name(func)} writes into a part of a tensor")
        run(func, first, *mapped(cut, args), **kwargs)
        return target
    made = run(func, first, *mapped(cut, args), **mapped(cut, kwargs))
    return wrap(first, made, end + made.ndim, span, whole, kwargs.get("device"))


@rule(aten.new_empty, aten.new_zeros, aten.new_ones)
def new(func: Any, x: Banded, shape: Any, **kwargs: Any) -> Tensor:
    """Made anew, in the size of the picture; or of no frames."""
    assert x.axis is not None
    sizes = list(shape)
    if 0 in sizes:
        return torch.empty(sizes, dtype=kwargs.get("dtype") or x.dtype, device=x.device)
    if len(sizes) != x.ndim or sizes[x.axis] != x.whole:
        raise Unreadable(f"{_name(func)} makes something of another size")
    sizes[x.axis] = x.span[1] - x.span[0]
    kwargs.pop("device", None)
    return x.like(run(func, x, x.held, sizes, **kwargs), x.axis, x.span, x.whole)


# ---------------------------------------------------------------------------------------------- along other dimensions

REDUCING = "amax amin linalg_vector_norm mean norm std sum var var_mean"


@rule(*(getattr(aten, name) for name in REDUCING.split()))
def reduce(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Over other dimensions than the one that is cut."""
    given, x = named(func, args, kwargs), args[0]
    over = given.get("dim")
    dims = [d % x.ndim for d in ([over] if isinstance(over, int) else over or range(x.ndim))]
    if x.axis in dims:
        raise Unreadable(f"{_name(func)} is over whole pictures")
    dim = x.axis if given.get("keepdim") else x.axis - sum(d < x.axis for d in dims)
    found = run(func, x, x.held, *args[1:], **kwargs)
    return mapped(lambda made: x.like(made, dim, x.span, x.whole), found)


@rule(aten._softmax, aten.cumsum, aten.flip)
def along(func: Any, x: Banded, dims: Any, *args: Any, **kwargs: Any) -> Banded:
    """Along another dimension, whose size stays."""
    if x.axis in [d % x.ndim for d in ([dims] if isinstance(dims, int) else dims)]:
        raise Unreadable(f"{_name(func)} is along whole pictures")
    return x.like(run(func, x, x.held, dims, *args, **kwargs), x.axis, x.span, x.whole)


@rule(aten.avg_pool2d)
def pool(func: Any, x: Banded, *args: Any, **kwargs: Any) -> Banded:
    """Means over the last two dimensions, as of frames."""
    assert x.axis is not None
    if x.axis >= x.ndim - 2:
        raise Unreadable("it takes means of neighbours")
    return x.like(run(func, x, x.held, *args, **kwargs), x.axis, x.span, x.whole)


@rule(aten.native_layer_norm)
def layer_norm(func: Any, x: Banded, shape: Any, *args: Any) -> Any:
    """A norm over the last dimensions."""
    assert x.axis is not None
    if x.axis >= x.ndim - len(shape):
        raise Unreadable("a norm is over whole pictures")
    found = run(func, x, x.held, shape, *args)
    return tuple(x.like(made, x.axis, x.span, x.whole) for made in found)


@rule(aten.linear)
def linear(func: Any, x: Banded, *args: Any, **kwargs: Any) -> Banded:
    """A product with the last dimension."""
    if not isinstance(x, Banded) or x.axis == x.ndim - 1 or _bands(args, kwargs):
        raise Unreadable("a product is along whole pictures")
    return x.like(run(func, x, x.held, *args, **kwargs), x.axis, x.span, x.whole)


Banded.operation = staticmethod(apply)
