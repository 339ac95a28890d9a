"""Whether a module makes each row of its output from the same row of its input alone.

A module's own code is followed by torch.fx: its `forward` is called with a stand-in for the rows, in
which each operation leaves a node. Norms over the last dimension and stock's Linears are nodes; all
else must be elementwise, or take apart the last dimension. What cannot be followed is not row-wise.

fx's usual tracer would replace `nn.Module.__call__` for all threads meanwhile. Here the module is
copied without its weights instead, with leaves that leave nodes (`_skeleton`). What a forward does to
itself happens to the copy.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional
from comfy.ops import CastWeightBiasOp
from torch import Tensor, nn
from torch.fx import Graph, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

# By their names in torch, torch.nn.functional or operator, or as a tensor's method, in place or not.
ELEMENTWISE = {
    "abs", "add", "clamp", "clip", "div", "elu", "erf", "exp", "gelu", "hardswish", "leaky_relu", "maximum", "minimum",
    "mish", "mul", "nan_to_num", "neg", "pow", "relu", "relu6", "rsqrt", "rsub", "sigmoid", "silu", "softplus", "sqrt",
    "square", "sub", "tanh", "true_divide", "truediv",
}  # fmt: skip
SPACES = (torch, torch.nn.functional, operator)
CONSTANTS = (bool, int, float, str, type(None))
NORMS = (nn.LayerNorm, nn.RMSNorm)
FACTS = ("dtype", "device", "type")  # that are the same for all rows
COMPARED = (operator.eq, operator.ne)
MOST_WAYS = 8  # through the code of one module
LAST = -1  # the dimension of a row

Width: TypeAlias = "int | tuple[int, ...]"  # of rows, or of several tensors of rows
FACT = ()  # in the place of a width


class Rows(NamedTuple):
    """What a row-wise module makes of a row, in elements.

    out     of the output
    widest  of the widest product that is not the output; 0: there is none
    between of all tensors that it makes beside the output. Its code may hold each of them until it
            returns
    """

    out: int
    widest: int
    between: int


def rows_of(module: nn.Module) -> Rows | None:
    """What a module makes of each row of one tensor; None: it is not row-wise."""
    widths = dict.fromkeys(one.in_features for one in products_in(module))
    return next((rows for width in widths if (rows := _followed(module, width)) is not None), None)


def products_in(module: nn.Module) -> Iterator[Any]:
    """The Linears of a module, whatever scales they have."""
    return (one for one in module.modules() if _is_product(one))


def _is_product(module: Any) -> bool:
    return isinstance(module, nn.Linear | CastWeightBiasOp) and hasattr(module, "in_features")


def _followed(module: nn.Module, width: int) -> Rows | None:
    """The same for rows of this width, whichever way the code goes."""
    found, ways = list[Rows](), [list[bool]()]
    while ways:
        tracer = _Tracer(way := ways.pop())
        rows = _one_way(module, width, tracer)
        if rows is None or len(found) == MOST_WAYS or (found and found[0].out != rows.out):
            return None
        found.append(rows)
        ways += [[*tracer.way[:i], True] for i in range(len(way), len(tracer.way))]
    return max(found, key=lambda rows: rows.between)


def _one_way(module: nn.Module, width: int, tracer: _Tracer) -> Rows | None:
    try:
        copy = _skeleton(module, tracer)
        before = [dict(part.__dict__) for part in copy.modules()]
        out = copy.forward(tracer.given(width))
    except Exception:  # any code may stumble over a stand-in, in any way
        return None
    now = [part.__dict__ for part in copy.modules()]
    is_as_it_was = [*map(_identities, now)] == [*map(_identities, before)]  # what it kept might be of some rows
    return tracer.rows(out.node) if is_as_it_was and isinstance(out, Proxy) else None


def _identities(held: Mapping[str, Any]) -> dict[str, int]:
    return {name: id(value) for name, value in held.items()}


# ---------------------------------------------------------------------------------------------------------------- nodes


class _NotRowWise(Exception):
    """A node that is not row-wise, or that is not known to be."""


class _Leaf(nn.Module):
    """In the place of a Linear or a norm."""

    weight = None  # stock's `linear_input_act` asks whether it is quantised

    def __init__(self, tracer: _Tracer, takes: int, makes: int, *, is_product: bool) -> None:
        super().__init__()
        self.tracer, self.takes, self.makes, self.is_product = tracer, takes, makes, is_product

    def forward(self, x: Any) -> Any:
        return self.tracer.create_proxy("call_function", self, (x,), {}, name="leaf")


def _skeleton(module: Any, tracer: _Tracer) -> Any:
    """A module's code without its weights."""
    if _is_product(module):
        return _Leaf(tracer, module.in_features, module.out_features, is_product=True)
    if isinstance(module, NORMS):
        if len(module.normalized_shape) != 1:
            raise _NotRowWise
        return _Leaf(tracer, *module.normalized_shape, *module.normalized_shape, is_product=False)
    hooks = module._forward_hooks, module._forward_pre_hooks
    own = *module._parameters.values(), *module._buffers.values()
    if any(hooks) or "forward" in module.__dict__ or any(one is not None for one in own):
        raise _NotRowWise
    copy = object.__new__(type(module))
    parts = {name: part and _skeleton(part, tracer) for name, part in module._modules.items()}
    copy.__dict__.update(module.__dict__, _modules=parts)
    return copy


class _StandIn(Proxy):
    """In the place of a tensor. What is read of it leaves a node, too, whatever is done with it."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if not callable(getattr(Tensor, name, None)):
            found.node  # noqa: B018 - is made when it is asked for
        return found


class _Tracer(GraphAppendingTracer):
    """Notes of each node how wide it is, and refuses those that are not row-wise.

    way  answers to the questions of the code about types and devices, in their order; no to those
         beyond
    """

    def __init__(self, way: Sequence[bool]) -> None:
        super().__init__(Graph())
        self.way, self.asked = list(way), 0
        self.is_refused = False  # the code may go on after an exception
        self.widths: dict[Node, Width] = {}
        self.made: list[Node] = []  # those with memory of their own

    def given(self, width: int) -> Proxy:
        """The input."""
        node = self.graph.placeholder("x")
        self.widths[node] = width
        return self.proxy(node)

    def proxy(self, node: Node) -> Proxy:
        return _StandIn(node, self)

    def to_bool(self, obj: Proxy) -> bool:
        """The code asks whether something is so."""
        if self.widths[obj.node] != FACT:
            self.is_refused = True
            raise _NotRowWise
        self.asked += 1
        self.way += [False] * (self.asked - len(self.way))
        return self.way[self.asked - 1]

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *others: Any, **more: Any) -> Node:
        try:
            width, is_made = self._of(kind, target, args, kwargs)
        except Exception:
            self.is_refused = True
            raise
        node = super().create_node(kind, target, args, kwargs, *others, **more)
        self.widths[node] = width
        if is_made:
            self.made.append(node)
        return node

    def rows(self, out: Node) -> Rows | None:
        """Of a module with this output; None: that is not one tensor, or not only its row was seen."""
        width = self.widths[out]
        # `x.dtype is torch.float16` leaves no trace of what was asked.
        unused = any(width == FACT and not node.users for node, width in self.widths.items() if node.target is getattr)
        if self.is_refused or unused or not isinstance(width, int):
            return None
        inner = [node for node in self.made if node is not out]
        products = [node.target.makes for node in inner if isinstance(node.target, _Leaf) and node.target.is_product]
        return Rows(width, max(products, default=0), sum(self._one(node) for node in inner))

    def _of(self, kind: str, target: Any, args: Sequence[Any], kwargs: Any) -> tuple[Width, bool]:
        """The width of what a call makes, and whether that has memory of its own."""
        if isinstance(target, _Leaf):
            if self._one(args[0]) != target.takes:
                raise _NotRowWise
            return target.makes, True
        if target is getattr and args[1] in FACTS:
            return FACT, False
        if target in COMPARED and all(self.widths[one] == FACT for one in args if isinstance(one, Node)):
            return FACT, False
        name = target if kind == "call_method" else getattr(target, "__name__", "")
        if kind == "call_function" and not any(getattr(space, name, None) is target for space in SPACES):
            raise _NotRowWise
        if name == "getitem":
            return self._item(*args), False
        if name in ("chunk", "split"):
            return self._divided(name, *args, **kwargs), False
        if name == "dropout" and not kwargs.get("training"):
            return self._one(args[0]), False
        is_in_place = (kind == "call_method" and name.endswith("_")) or bool(kwargs.get("inplace"))
        if kind == "call_method":
            name = name.removesuffix("_")
        if name not in ELEMENTWISE or "out" in kwargs:
            raise _NotRowWise
        values = [one for one in (*args, *kwargs.values()) if not isinstance(one, CONSTANTS)]
        widths = {self._one(one) for one in values} - {1}
        if len(widths) > 1:
            raise _NotRowWise
        return max(widths, default=1), not is_in_place

    def _one(self, value: Any) -> int:
        """The width of one tensor."""
        width = self.widths.get(value) if isinstance(value, Node) else None
        if not isinstance(width, int):
            raise _NotRowWise
        return width

    def _item(self, value: Node, key: Any) -> Width:
        """One of several tensors, or a part of each row: x[..., first:last]."""
        width = self.widths[value]
        if isinstance(width, tuple) and isinstance(key, int):
            return width[key]
        if isinstance(width, tuple) or not (isinstance(key, tuple) and len(key) == 2 and key[0] is Ellipsis):
            raise _NotRowWise
        if not isinstance(key[1], slice):
            raise _NotRowWise
        return len(range(width)[key[1]])

    def _divided(self, name: str, value: Any, by: Any, dim: Any = 0) -> Width:
        """The parts of each row."""
        width = self._one(value)
        if dim != LAST:
            raise _NotRowWise
        if not isinstance(by, int):
            return tuple(by)
        step = by if name == "split" else -(-width // by)
        return tuple(min(step, width - at) for at in range(0, width, step))
