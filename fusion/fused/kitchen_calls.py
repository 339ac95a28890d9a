"""A call of comfy-kitchen's RoPE: its operands as our op takes them, and why our op would not serve it.

A table of rotations broadcasts over x, and so tells tokens from heads. One that turns each head
differently is taken as the rotations of all tokens' heads, one after another:

    x [b, n, m, d]   table                            our op sees
                     [1 or b, n, 1, part/2, 2, 2]     x
                     [1 or b, 1, m, part/2, 2, 2]     x [b, m, n, d], transposed
                     [1 or b, n, m, part/2, 2, 2]     x [b, n * m, 1, d]
    x [n, m, d]      [m, part/2, 2, 2]                x [1, m, n, d], transposed; kitchen norms none
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels_cuda.ops.views.checks import beside, overlap, word

TYPES = (torch.float16, torch.bfloat16)  # of what turns
STREAMS = ("xq", "xk", "q", "k", "x")  # arguments that turn
SCALES = ("q_scale", "k_scale", "scale")  # weights of norms

_PAIR, _ONE = ("xq", "xk", "freqs_cis"), ("x", "freqs_cis")
_NORMED_PAIR = ("q", "k", "freqs_cis", "q_scale", "k_scale", "epsilon")
_NORMED_ONE = ("x", "freqs_cis", "scale", "epsilon")
# Kitchen's functions, and their arguments as they are known here. Each is there once more with an
# underscore at its end, in place.
FUNCTIONS: dict[str, tuple[str, ...]] = {
    f"{name}{end}": arguments
    for name, arguments in {
        "apply_rope": _PAIR,
        "apply_rope1": _ONE,
        "apply_rope_split_half": _PAIR,
        "apply_rope_split_half1": _ONE,
        "rms_rope": _NORMED_PAIR,
        "rms_rope1": _NORMED_ONE,
        "rms_rope_split_half": (*_NORMED_PAIR, "rot_dim"),
        "rms_rope_split_half1": _NORMED_ONE,
    }.items()
    for end in ("", "_")
}


def in_place(name: str) -> bool:
    """Whether a function writes over what turns."""
    return name.endswith("_")


class KitchenCall(NamedTuple):
    """The operands of a call.

    xs       q and k, or one tensor, [b, n, m, d]
    weights  of their norms, [d] each; none without a norm
    table    2x2 matrices [1 or b, 1 or n, 1 or m, part/2, 2, 2]
    part     elements of a head that turn, from its first on; the norm is over all
    halves   elements j and j + part/2 turn together, and not 2j and 2j + 1
    """

    xs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    table: Tensor
    eps: float
    part: int
    halves: bool

    @staticmethod
    def of(name: str, given: Mapping[str, Any]) -> KitchenCall:
        """Of a function with these arguments, by name."""
        xs, table = tuple(given[one] for one in STREAMS if one in given), given["freqs_cis"]
        weights = tuple(given[one] for one in SCALES if given.get(one) is not None)
        if not weights and table.ndim == 4 and all(x.ndim == 3 for x in xs):
            xs, table = tuple(x[None] for x in xs), table[None, None]
        weights = (weights + weights[-1:])[: len(xs)]  # k's is q's where there is none
        part = int(given.get("rot_dim", 0)) or xs[0].shape[-1]
        return KitchenCall(xs, weights, table, float(given.get("epsilon", 0.0)), part, "split_half" in name)

    @property
    def by_head(self) -> bool:
        """Whether heads turn differently."""
        return self.table.shape[1] != 1 and self.table.shape[2] != 1

    @property
    def views(self) -> tuple[Tensor, ...]:
        """xs as our op takes them, [b, tokens, heads, d]."""
        if self.by_head:
            return tuple(x.view(x.shape[0], -1, 1, x.shape[3]) for x in self.xs)
        return tuple(x.transpose(1, 2) for x in self.xs) if self.table.shape[1] == 1 else self.xs

    @property
    def rotation(self) -> Tensor:
        """The table as our op takes it, [1 or b, 1 or tokens, part/2, 2, 2]."""
        if self.by_head:
            return self.table.flatten(1, 2)
        return self.table[:, 0] if self.table.shape[1] == 1 else self.table[:, :, 0]

    def obstacles(self, written: bool) -> Iterator[str]:
        """What keeps our op from serving the call, in words. Each relies on those before it. written:
        whether xs are written over, and not copies of them."""
        yield from self._of_shapes()
        yield from self._of_types()
        yield from self._of_memory(written)

    def _of_shapes(self) -> Iterator[str]:
        if any(x.ndim != 4 for x in self.xs) or self.table.ndim != 6:
            yield "tensors of 4 dimensions turn by tables of 6, and those of 3 without a norm by tables of 4"
        b, _, _, d = self.xs[0].shape
        if any(x.shape[0] != b or x.shape[3] != d for x in self.xs) or any(one.shape != (d,) for one in self.weights):
            yield "batches, heads or weights differ in size"
        batches, first, second, *pairs = self.table.shape
        if self.part % 2 or not 0 < self.part <= d or pairs != [self.part // 2, 2, 2] or batches not in (1, b):
            yield f"a table {list(self.table.shape)} does not turn {self.part} elements of heads of {d}"
        for x in self.xs:
            # Kitchen takes the first of too many rotations there, and only there.
            cut = not self.halves and first == 1 and 1 < x.shape[2] < second
            if first not in (1, x.shape[1]) or (second not in (1, x.shape[2]) and not cut):
                yield f"a table {list(self.table.shape)} does not broadcast over {list(x.shape)}"
        if not all(one.numel() for one in (*self.xs, self.table)):
            yield "there is nothing to turn"
        if not (math.isfinite(self.eps) and self.eps >= 0):
            yield f"epsilon is {self.eps}"

    def _of_types(self) -> Iterator[str]:
        x, *others = self.xs
        if x.dtype not in TYPES or any(one.dtype is not x.dtype for one in others):
            yield f"{', '.join(map(word, self.xs))} turn, and the kernels take float16 or bfloat16"
        if any(one.dtype not in beside(x) for one in self._read) or len({one.dtype for one in self.weights}) > 1:
            yield f"{', '.join(map(word, self._read))} are beside {word(x)}"
        if any(one.device != x.device for one in (*others, *self._read)):
            yield "tensors are on several devices"

    def _of_memory(self, written: bool) -> Iterator[str]:
        if any(one.requires_grad for one in (*self.xs, *self._read)) and (written or torch.is_grad_enabled()):
            yield "gradients are wanted"
        if any(one.shape[-1] > 1 and one.stride(-1) != 1 for one in (*self.xs, *self.weights)):
            yield "elements are not adjacent"
        if not self.table[0, 0, 0].is_contiguous():
            yield "the rotations of a token are not contiguous"
        if self.by_head and not all(_follow(x, written) for x in self.xs):
            yield "heads that turn differently do not follow each other"
        if written and (not all(map(_lies_once, self.xs)) or any(overlap(*pair) for pair in self._apart())):
            yield "what is written overlaps"  # kitchen has its own errors for these

    @property
    def _read(self) -> tuple[Tensor, ...]:
        return (*self.weights, self.table)

    def _apart(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What has no byte in common where xs are written."""
        if len(self.xs) == 2:
            yield self.xs[0], self.xs[1]
        yield from ((x, one) for x in self.xs for one in self._read)


def _follow(x: Tensor, written: bool) -> bool:
    """Whether a token's heads follow each other, and the next token's these: in x, or in a copy of it
    that keeps the order."""
    of_token = x.shape[2] * x.stride(2)
    if written:
        return x.stride(1) == of_token
    return x.stride(1) >= of_token and (x.shape[0] == 1 or x.stride(0) >= x.stride(1))


def _lies_once(x: Tensor) -> bool:
    """Whether no two elements share memory, of views whose dimensions nest."""
    reach = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return False
            reach = stride * size
    return True
