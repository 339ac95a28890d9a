"""What candidates are measured on: the first tokens of a call that has very many, the first rows of a large picture.

A video has tens of thousands of tokens, and measuring runs each candidate a dozen times, stock's with all of its temporaries.
On the whole of it that takes seconds and more VRAM than the call itself, which an 8 GB card does not have. Every token costs
the same, so a part of them tells which candidate is fastest, as long as it fills the card and not only its cache. Pictures
likewise: a band of one is as large as there is room for, and what torch's ways need beside it there is not.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

ENOUGH = 2**25  # elements of the widest operand: 64 MB in fp16, more than any card's cache
LEAST_ROWS = 8  # of a picture: more than a convolution has taps
LEAST = 8192  # tokens of a product: enough for whole rounds of tiles on every card


def first_tokens(
    tensors: Sequence[Tensor | None], along: Sequence[int], shared: Sequence[int] = (), width: int = 0, least: int = 1
) -> tuple[Tensor | None, ...]:
    """The tensors for fewer tokens: views of them, or themselves where there are not too many.

    along   positions of the operands [batch, tokens, ...]
    shared  positions of those that a batch has for all its tokens, [d] or [1 or batch, 1, d]; one that differs between
            tokens keeps everything whole
    width   elements of a token in the widest operand, if that is not the first
    least   tokens that it takes in any case
    """
    first = tensors[along[0]]
    assert first is not None
    if first.ndim < 3:
        return tuple(tensors)
    batches, tokens = first.shape[:2]
    width = max(width, first.shape[2:].numel(), 1)
    limit = max(least, ENOUGH // width)
    if batches * tokens <= limit or any(_differs(tensors[i], batches) for i in shared):
        return tuple(tensors)
    some = max(1, limit // tokens)  # whole batches where several fit: their rows lie as they lay

    def fewer(i: int, t: Tensor | None) -> Tensor | None:
        if t is None or (i not in along and i not in shared):
            return t
        part = t[:some] if t.ndim > 2 and t.shape[0] == batches else t
        return part[:, : min(tokens, limit)] if i in along else part

    return tuple(fewer(i, t) for i, t in enumerate(tensors))


def first_rows(x: Tensor, along: int, width: int = 0) -> Tensor:
    """Fewer pictures [batch, c, ..., h, w], or fewer rows of one: a view, or x itself where it is not too large, or where rows do
    not lie together because it is not channels-last.

    along  the dimension of the rows: the outermost of the image
    width  elements that a row is in the widest operand, if that is not x
    """
    batches, rows = x.shape[0], x.shape[along]
    if not x.numel() or x.stride(1) != 1:
        return x
    limit = max(LEAST_ROWS, ENOUGH // max(width, x.numel() // (batches * rows)))
    return x if batches * rows <= limit else x[: max(1, limit // rows)].narrow(along, 0, min(rows, limit))


def _differs(t: Tensor | None, batches: int) -> bool:
    """Whether a broadcast operand has more than a row for each of the batch."""
    return t is not None and t.numel() > t.shape[-1] * batches
