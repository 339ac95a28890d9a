"""mlp: two products with an activation between them, over a few tokens at a time.

The hidden activation is several times as wide as what goes in and comes out (14B at 480x832x81: 0.9 GB). It exists only
for one chunk of tokens, and each chunk is written where it belongs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...policy import STANDARD, KernelPolicy
from ..views.rows import frames_of, tokens_per_frame
from .integer_linear import RoundedRows
from .linear import Activation
from .matrices import Matrix, multiply, multiply_, multiply_pair, part_of

CHUNK_BYTES = 256 * 2**20
CHUNK_ROWS = 768  # a multiple of every kernel's tile: a chunk leaves none half empty
Part = tuple[slice, slice]  # of [batch, tokens]


def mlp(
    x: Tensor | RoundedRows,
    w_in: Matrix,
    w_out: Matrix,
    b_in: Tensor | None = None,
    b_out: Tensor | None = None,
    *,
    up: Matrix | None = None,
    gated: bool = False,
    activation: Activation = "gelu_tanh",
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    hidden_scale: float = 1.0,
    saturate: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """residual + gate * (activation(x @ w_in^T + b_in) @ w_out^T + b_out); with `up`, the activation is multiplied by
    x @ up^T. With `gated`, w_in is both, and the activation is SiLU.

    x             [batch, ..., k] fp16, or rows that were rounded for w_in and up
    w_in, up      [hidden, k] fp16 or of integers; b_in [hidden]. A pair has no b_in; of unlike numbers it is SiLU's
    gated         w_in is [2 * hidden, k], the rows of the gate first, fp16 or of integers
    w_out         [n, hidden] fp16, or of integers, whatever w_in is; b_out [n]
    residual, gate, out_dtype   of the second `linear`
    hidden_scale  of a pair: its product is stored multiplied by this, a power of two, and the second product divided by it
    saturate      what overflows the fp16 result becomes +-65504 instead of infinity; so does what lies between, if the product
                  is gated or the result is fp32
    out           [batch, ..., n], contiguous, where to write instead of into a new tensor; may be the residual itself. Of
                  [batch, tokens, n] rows may be anywhere
    chunk_bytes   about the most the hidden activation may take
    Returns a contiguous [batch, ..., n]. Where our kernels compute it, the chunks do not change the result: every row is
    summed in the same order wherever it stands. (With half sums, a row that shares a tile with one whose half sums
    overflowed is summed in fp32 too.)
    """
    if hidden_scale != 1 and up is None and not gated:
        raise ValueError(f"mlp: hidden_scale is {hidden_scale}, and only the product of a pair can be scaled")
    if up is not None and gated:
        raise ValueError("mlp: gated, and up is given: w_in has both, or neither")
    if (up is not None or gated) and b_in is not None:
        raise ValueError(f"mlp: b_in: {list(b_in.shape)}, and a pair has no bias")
    stored = x if isinstance(x, Tensor) else x.numbers
    batches = stored.shape[0] if stored.ndim > 2 else 1
    shape = (*stored.shape[:-1], w_out.shape[0])
    dtype = out_dtype or (
        residual.dtype if residual is not None else x.dtype if isinstance(x, Tensor) else torch.float16
    )
    # Who needs fp32 for the result has large numbers before it, too.
    within = saturate and dtype is torch.float32

    def hidden(part: Tensor | RoundedRows) -> Tensor:
        if gated or up is not None:
            kind: Activation = "silu" if gated else activation
            return multiply_pair(part, w_in, up, activation=kind, scale=hidden_scale, saturate=saturate, policy=policy)
        return multiply(part, w_in, b_in, activation=activation, saturate=within, policy=policy)

    ends: Any = {"scale": 1 / hidden_scale, "saturate": saturate, "policy": policy}
    tokens = stored.shape[:-1].numel() // max(batches, 1)
    parts = parts_of(batches, tokens, most_rows(w_in.shape[0], chunk_bytes))
    if len(parts) <= 1 and out is None:
        return multiply(hidden(x), w_out, b_out, residual=residual, gate=gate, out_dtype=out_dtype, **ends)
    if out is None:
        out = torch.empty(batches, tokens, shape[-1], dtype=dtype, device=stored.device)
    elif out.shape != shape or out.dtype is not dtype or not (out.ndim == 3 or out.is_contiguous()):
        raise ValueError(f"mlp: out is {out.dtype}{list(out.shape)}, and a contiguous {dtype}{list(shape)} is written")
    if len(parts) <= 1:
        multiply_(out, hidden(x), w_out, b_out, residual=residual, gate=gate, **ends)
        return out
    out = out.view(batches, tokens, shape[-1])
    rows = (batches, tokens, stored.shape[-1])
    x = (
        x.reshape(rows)
        if isinstance(x, Tensor)
        else x._replace(numbers=stored.reshape(rows), scales=x.scales.reshape(rows[:2]))
    )
    added = None if residual is None else residual.reshape(out.shape)
    for part in parts:
        multiply_(
            out[part],
            hidden(part_of(x, part)),
            w_out,
            b_out,
            residual=None if added is None else added[part],
            gate=gate_of(gate, batches, tokens, shape[-1], part),
            **ends,
        )
    return out.reshape(shape)


def most_rows(hidden: int, most_bytes: int) -> int:
    """Rows of a chunk at most: whole tiles, at least one."""
    return max(most_bytes // max(hidden * 2, 1) // CHUNK_ROWS, 1) * CHUNK_ROWS


def parts_of(batches: int, tokens: int, most: int) -> list[Part]:
    """[batches, tokens] in parts of at most so many rows, each in one piece where the whole is: a part across rows of a
    batch would have to be copied together first. Long rows are cut into about equal chunks, short ones stay whole."""
    if tokens <= most:
        step = max(most // max(tokens, 1), 1)
        return [(slice(b, min(b + step, batches)), slice(0, tokens)) for b in range(0, batches, step)]
    chunk = -(-tokens // -(-tokens // most))
    chunk = -(-chunk // CHUNK_ROWS) * CHUNK_ROWS
    starts = range(0, tokens, chunk)
    return [(slice(b, b + 1), slice(at, min(at + chunk, tokens))) for b in range(batches) for at in starts]


def gate_of(gate: Tensor | None, batches: int, tokens: int, n: int, part: Part) -> Tensor | None:
    """The gate's rows for a part: as they lie, or one for each of the tokens."""
    if gate is None:
        return None
    rows, some = part
    view = frames_of(gate, batches, n, "gate")
    view = view[rows] if view.shape[0] > 1 else view
    frames = view.shape[1]
    if frames == 1:
        return view
    if frames == tokens:
        return view[:, some]
    places = torch.arange(some.start, some.stop, device=gate.device) // tokens_per_frame(tokens, frames, "gate")
    return view[:, places]
