"""Attention that was trained sparse by the papers' definitions, every weight by itself in float64.

For tests with a GPU and without. SLA (arXiv 2509.24006, and the code of the published checkpoints) and VSA (arXiv 2505.13389).
q, k, v are [batch, tokens, heads, d].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def _means(x: Tensor, groups: Sequence[Tensor]) -> Tensor:
    """Of each group of tokens of x [heads, tokens, d]: [heads, groups, d]."""
    return torch.stack([x[:, group].mean(1) for group in groups], 1)


def _seen(
    q: Tensor, k: Tensor, v: Tensor, rows: Sequence[Tensor], blocks: Sequence[Tensor], scores: Tensor, most: int
) -> Tensor:
    """Softmax attention of q, k, v [heads, tokens, d] in which each group of rows sees the tokens of its best blocks."""
    out = torch.zeros_like(q)
    for head, (row, queries) in itertools.product(range(q.shape[0]), enumerate(rows)):
        best = scores[head, row].topk(most).indices.tolist()
        keys = torch.cat([blocks[block] for block in best])
        weights = torch.softmax(q[head, queries] @ k[head, keys].T / math.sqrt(q.shape[-1]), -1)
        out[head, queries] = weights @ v[head, keys]
    return out


def _each(compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Of each row of a batch, heads first."""
    rows = zip(*(t.double().transpose(1, 2) for t in tensors), strict=True)
    return torch.stack([compute(*row) for row in rows]).transpose(1, 2)


def sla(q: Tensor, k: Tensor, v: Tensor, *, weight: Tensor, bias: Tensor, share: float) -> Tensor:
    """weight [d, d], bias [d]: of the linear part. The share is of the blocks of 64 keys, which each 128 queries visit."""

    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens = torch.arange(q.shape[1])
        rows, blocks = tokens.split(128), tokens.split(64)
        smooth = k - k.mean(1, keepdim=True)
        scores = _means(q, rows) @ _means(smooth, blocks).mT
        fine = _seen(q, k, v, rows, blocks, scores, max(1, int(share * len(blocks))))
        features_q, features_k = q.softmax(-1), k.softmax(-1)
        weights = features_q @ features_k.mT
        linear = weights @ v / (1e-5 + weights.sum(-1, keepdim=True))
        return fine + linear @ weight.double().T + bias.double()

    return _each(one, q, k, v)


def cubes(grid: Sequence[int]) -> list[Tensor]:
    """The tokens of each cube of 4 x 4 x 4, or of what there is of it at the edge."""
    numbers = torch.arange(math.prod(grid)).view(*grid)
    starts = itertools.product(*(range(0, size, 4) for size in grid))
    return [numbers[t : t + 4, y : y + 4, x : x + 4].flatten() for t, y, x in starts]


def vsa(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, *, grid: Sequence[int], share: float) -> Tensor:
    """gate: as q. The share is of the cubes."""
    of_grid = cubes(grid)
    most = max(1, min(math.ceil(share * len(of_grid)), len(of_grid)))

    def one(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        scores = _means(q, of_grid) @ _means(k, of_grid).mT / math.sqrt(q.shape[-1])
        coarse = scores.softmax(-1) @ _means(v, of_grid)
        out = _seen(q, k, v, of_grid, of_grid, scores, most)
        for number, cube in enumerate(of_grid):
            out[:, cube] += gate[:, cube] * coarse[:, number : number + 1]
        return out

    return _each(one, q, k, v, gate)


def teach(net: Any, tensors: dict[str, Tensor], share: float) -> None:
    """Let the self-attentions of stock's WanModel be computed by these definitions, with what is in a file's tensors."""
    from comfy.ldm.flux.math import apply_rope1

    for i, block in enumerate(net.blocks):
        own = {name.removeprefix(f"blocks.{i}."): t for name, t in tensors.items() if name.startswith(f"blocks.{i}.")}
        block.self_attn.forward = _forward(block.self_attn, own, share, apply_rope1)


def _forward(attn: Any, own: dict[str, Tensor], share: float, rotate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    projection = "self_attn.attn_op.local_attn.proj_l"

    def forward(x: Tensor, freqs: Tensor, transformer_options: dict[str, Any]) -> Tensor:
        heads = (*x.shape[:2], attn.num_heads, attn.head_dim)
        q, k = (
            rotate(norm(made(x)).view(heads), freqs) for norm, made in ((attn.norm_q, attn.q), (attn.norm_k, attn.k))
        )
        v = attn.v(x).view(heads)
        if f"{projection}.weight" in own:
            part = {name: own[f"{projection}.{name}"].to(x.device) for name in ("weight", "bias")}
            out = sla(q, k, v, share=share, **part)
        else:
            weight, bias = (own[f"to_gate_compress.{name}"].to(x.device, torch.float32) for name in ("weight", "bias"))
            gate = torch.nn.functional.linear(x.float(), weight, bias)
            out = vsa(q, k, v, gate.view(heads), grid=transformer_options["grid_sizes"], share=share)
        made: Tensor = attn.o(out.flatten(2).to(x.dtype))
        return made

    return forward
