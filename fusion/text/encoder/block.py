"""A block of a bidirectional encoder or of a vision tower over our kernels, in FP16 around an FP32
stream (`weights/fp32_residual.py`).

    x += out(attention(q, k, v))                q, k, v of norm(x)
    x += outer(gate(inner(n)) [* inner(n)])     n = norm(x)

T5, CLIP, SigLIP and the vision towers of Qwen2.5-VL and Qwen3-VL differ only in what a `Block`
says: norms, biases, matrices, activation, sizes. What differs from call to call is in `Call`: who
sees whom, and positions.

Attention serves heads of some sizes; others (72 and 80 of the vision towers) are padded with zeros
to the next one, which changes no result. Tokens pass in chunks, except in the attention, which has
all queries, keys and values as fp16. Groups of tokens that see only each other, such as pictures,
frames and windows, are one call where they have one size, like prompts of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import comfy.model_management
import torch
from torch import Tensor

from ....kernels_cuda import attention, rms_rope_
from ....kernels_cuda.ops.attention.attention import HEADS, WIDE
from ...weights.fp32_residual import Gate, Wide

# Patches of a picture between two products: 100 MB of fp32, for the 8B's vision tower of Qwen3-VL. A
# picture of 768x768 has 2304 there.
PATCHES = 3072
SERVED = tuple(size for size in HEADS if size != WIDE)  # elements of a head; WIDE is a VAE's


class Norm(NamedTuple):
    """One of stock's norms. rms: without a mean and a bias; otherwise it is a LayerNorm."""

    module: Any
    eps: float
    rms: bool


class Block(NamedTuple):
    """One of stock's blocks, as `described.py` reads it.

    norms        before the attention, and before the feed-forward
    qkv          stock's Linears for queries, keys and values: three, or one for all
    out          its Linear behind the attention
    heads, head  how many, and how many elements each has
    scale        of the scores
    inner        Linears into the feed-forward: one, or the gate's and the other factor's
    outer        the Linear out of it
    gate         its activation; None: one that is not known here
    stored       factor of what is stored between the two (`Wide.hidden`)
    """

    norms: tuple[Norm, Norm]
    qkv: Sequence[Any]
    out: Any
    heads: int
    head: int
    scale: float
    inner: Sequence[Any]
    outer: Any
    gate: Gate | None
    stored: float = 1.0

    @property
    def obstacle(self) -> str | None:
        """Why no call of it is ours, in words a user understands."""
        if self.gate is None:
            return "the feed-forward has an activation that is not known here"
        if self.head > SERVED[-1] or self.head % 2:
            return f"the attention has heads of {self.head}, which no kernel serves"
        return None


@dataclass(frozen=True)
class Call:
    """Arguments shared by all blocks of one call.

    wide      how to compute
    mask      [batch, 1, 1 or tokens, tokens] bool: the keys that a query sees; None: all
    causal    a query sees keys up to its own only
    lengths   [batch] int32: the number of keys that there are; None: all
    cos, sin  [tokens, head / 2] fp32, by which queries and keys turn; None: they do not
    groups    sizes of groups of adjacent tokens that see only each other; empty: one group
    rows      of the stream between two products; None: `CHUNK_ROWS`
    """

    wide: Wide
    mask: Tensor | None = None
    causal: bool = False
    lengths: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    groups: tuple[int, ...] = ()
    rows: int | None = None

    def chunks(self, x: Tensor) -> Sequence[Tensor]:
        """x [batch, tokens, width] in pieces of its tokens."""
        return self.wide.chunks(x, self.rows)

    def runs(self, tokens: int) -> Iterator[tuple[slice, int]]:
        """Slices of so many tokens, each with the one size of the groups in it."""
        at = 0
        for size, alike in groupby(self.groups or (tokens,)):
            last = at + size * len(list(alike))
            yield slice(at, last), size
            at = last


def compute(block: Block, x: Tensor, call: Call, bias: Tensor | None = None) -> Tensor:
    """x after the block: the caller's own stream [batch, tokens, width] fp32, which is added to in
    place.

    bias  [heads, 2 tokens - 1] fp32, added to the scores by the distance of a key from a query
    """
    # Stock's operations ask this; ours do not.
    comfy.model_management.throw_exception_if_processing_interrupted()
    attend(block, x, call, bias)
    feed_forward(block, x, call)
    return x


def attend(block: Block, x: Tensor, call: Call, bias: Tensor | None = None) -> None:
    """x += out(attention(q, k, v)) of the normalised x."""
    q, k, v = heads_of(block, x, call)
    lengths, scale = call.lengths, block.scale
    options: Any = {"scale": scale, "causal": call.causal, "key_lengths": lengths, "distance_bias": bias}
    found = []
    for some, size in call.runs(x.shape[1]):
        one, two, three = (t[:, some].view(-1, size, *t.shape[2:]) for t in (q, k, v))
        seen = attention(one, two, three, call.mask, **options, policy=call.wide.ops)
        found.append(seen[..., : block.head].reshape(x.shape[0], -1, block.heads * block.head))
    whole = found[0] if len(found) == 1 else torch.cat(found, 1)
    for rows, values in zip(call.chunks(x), call.chunks(whole), strict=True):
        call.wide.add(rows, [values], block.out)


def heads_of(block: Block, x: Tensor, call: Call) -> Sequence[Tensor]:
    """Queries, keys and values of x [batch, tokens, width], [batch, tokens, heads, d] fp16 each,
    with d as the attention serves it."""
    room, chunks = next(size for size in SERVED if size >= block.head), call.chunks(x)
    if len(chunks) == 1 and room == block.head:
        return turned(block, x, call, 0)
    empty = torch.zeros if room > block.head else torch.empty
    made = empty(*x.shape[:2], 3, block.heads, room, dtype=torch.float16, device=x.device)
    at = 0
    for rows in chunks:
        last = at + rows.shape[1]
        for i, part in enumerate(turned(block, rows, call, at)):
            made[:, at:last, i, :, : block.head] = part
        at = last
    return made.unbind(2)


def turned(block: Block, x: Tensor, call: Call, first: int) -> Sequence[Tensor]:
    """The same without padding, of the tokens from `first` on."""
    shape = block.heads, block.head
    made = call.wide.projections(normed(block.norms[0], x, call.wide), block.qkv)
    if len(made) == 1:
        q, k, v = made[0].view(*x.shape[:2], 3, *shape).unbind(2)
    else:
        q, k, v = (part.view(*x.shape[:2], *shape) for part in made)
    if call.cos is not None and call.sin is not None:
        table = (t[first : first + x.shape[1]] for t in (call.cos, call.sin))
        rms_rope_(q, k, None, None, *table, eps=0.0, norm="none", interleaved=False, policy=call.wide.ops)
    return q, k, v


def feed_forward(block: Block, x: Tensor, call: Call) -> None:
    """x += outer(gate(inner(n)) [* inner(n)]) of the normalised x."""
    assert block.gate is not None, "otherwise it is stock's"
    for rows in call.chunks(x):
        h = normed(block.norms[1], rows, call.wide)
        hidden = call.wide.hidden(h, block.inner, block.gate, block.stored)
        call.wide.add(rows, hidden, block.outer, 1 / block.stored)


def normed(norm: Norm, x: Tensor, wide: Wide) -> Tensor:
    """x [.., width] fp32 after one of stock's norms, as the input of a product."""
    if not norm.rms:
        return wide.normed(norm.module, x)
    if getattr(norm.module, "weight_function", None):  # another node's patches
        return wide.rounded(norm.module(x))
    return wide.operand(x, norm.module.weight, norm.eps)
