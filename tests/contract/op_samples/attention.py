"""Attention, and the blocks of keys that it looks at."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from contract.op_contract import HALF, SINGLE, Contract, Draw, Operands, ones
from torch import Tensor

from fusestream.kernels_cuda import BlockList, Tail, attention, choose_blocks, decode_attention, linear_attention

LISTED = {"blocks": BlockList(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1), 4, 4)}
TAIL = Tail(torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 1, 2))


def _heads(draw: Draw, d: int, dtype: torch.dtype, *lengths: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of few tokens; or of one of these lengths, now and then."""
    batch, queries, keys, (heads, key_heads) = (
        draw.size(1, 2),
        draw.size(1, 6),
        draw.size(1, 9),
        draw.of((1, 1), (2, 2), (4, 2)),
    )
    queries, keys = draw.of(*[(queries, keys)] * 6, *lengths)
    shapes = (queries, heads), (keys, key_heads), (keys, key_heads)
    q, k, v = (draw.apart(draw.normal(batch, *shape, d, dtype=dtype)) for shape in shapes)
    return q, k, v


def _attended(draw: Draw) -> Operands:
    q, k, v = _heads(draw, 8, draw.of(HALF, SINGLE))
    (b, s, h, _), t = q.shape, k.shape[1]
    dtype = q.dtype
    mask = draw.of(
        lambda: None,
        lambda: draw.uniform(b, 1, s, t) > 0.4,
        lambda: draw.normal(1, h, s, t, dtype=dtype),
        lambda: draw.uniform(b, 1, 1, t) > 0.3,
        lambda: draw.uniform(1, h, s, t) > 0.3,
    )()
    rows = -(-s // 4), -(-t // 3)
    blocks = None
    if draw.of(False, False, True) and all(rows):
        keys = draw.uniform(1, h, *rows).argsort(-1).int()
        blocks = BlockList(keys, draw.whole(1, h, rows[0], low=1, high=rows[1] + 1, dtype=torch.int32), 4, 3)
    return {
        "q": q, "k": k, "v": v, "mask": mask, "scale": draw.of(None, 1.0, 0.3), "causal": draw.of(True, False),
        "window": draw.of((-1, -1), (2, -1), (-1, 1), (1, 0), (0, 0)),
        "key_lengths": draw.maybe(lambda: draw.whole(b, low=0, high=t + 1, dtype=torch.int32)),
        "distance_bias": draw.maybe(lambda: draw.normal(h, max(s + t - 1, 0), dtype=SINGLE)), "blocks": blocks,
    }  # fmt: skip


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, scale: float | None = None, causal: bool = False,
    window: tuple[int, int] = (-1, -1), key_lengths: Tensor | None = None, distance_bias: Tensor | None = None,
    blocks: BlockList | None = None,
) -> Tensor:  # fmt: skip
    """Query by query and key by key."""
    b, s, h, d = q.shape
    t, group = k.shape[1], h // k.shape[2]
    scale = d**-0.5 if scale is None else scale
    out = torch.zeros(b, s, h, d, dtype=torch.float64)
    full = None if mask is None else mask.expand(b, h, s, t)

    def is_seen(n: int, head: int, i: int, j: int) -> bool:
        at = i + t - s  # the key that stands where the query stands
        if (causal and j > at) or (window[0] >= 0 and j < at - window[0]) or (window[1] >= 0 and j > at + window[1]):
            return False
        if key_lengths is not None and j >= key_lengths[n]:
            return False
        if blocks is not None:
            row = min(n, blocks.keys.shape[0] - 1), min(head, blocks.keys.shape[1] - 1), i // blocks.rows
            if j // blocks.size not in blocks.keys[row][: int(blocks.counts[row])].tolist():
                return False
        return full is None or full.dtype is not torch.bool or bool(full[n, head, i, j])

    def score(n: int, head: int, i: int, j: int) -> Tensor:
        value = scale * (q[n, i, head].double() @ k[n, j, head // group].double())
        if full is not None and full.dtype is not torch.bool:
            value = value + full[n, head, i, j].double()
        return value if distance_bias is None else value + distance_bias[head, j - i + s - 1].double()

    for n, head, i in itertools.product(range(b), range(h), range(s)):
        seen = [j for j in range(t) if is_seen(n, head, i, j)]
        if seen:
            weights = torch.softmax(torch.stack([score(n, head, i, j) for j in seen]), 0)
            out[n, i, head] = weights @ v[n, seen, head // group].double()
    return out


def _decoded(draw: Draw) -> Operands:
    """A query over what a cache keeps up to its place; behind it is room that nobody wrote to yet."""
    batch, key_heads, group, d, room = (
        draw.size(1, 2),
        draw.of(1, 3),
        draw.of(1, 4),
        draw.of(8, 64, 128),
        draw.of(1, 17, 70),
    )
    keys, values = (draw.normal(batch, key_heads, room, d).transpose(1, 2) for _ in range(2))
    at = draw.whole(1, low=0, high=room, dtype=torch.int32)
    keys[:, int(at) + 1 :], values[:, int(at) + 1 :] = torch.nan, torch.inf
    return {
        "q": draw.normal(batch, 1, key_heads * group, d),
        "keys": keys,
        "values": values,
        "at": at,
        "scale": draw.of(None, 0.3),
    }


def _over_kept(q: Tensor, keys: Tensor, values: Tensor, at: Tensor, scale: float | None) -> Tensor:
    group, seen = q.shape[2] // keys.shape[2], slice(0, int(at) + 1)
    keys, values = (t[:, seen].double().repeat_interleave(group, 2) for t in (keys, values))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), keys) * (q.shape[3] ** -0.5 if scale is None else scale)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values)


def _linear(draw: Draw) -> Operands:
    d, feature_map = draw.of(1, 5, 12), draw.of("elu", "relu", "softmax", "rbf")
    q, k, v = _heads(draw, d, HALF, (300, 700), (520, 260), (1, 600))  # more than a chunk
    features = draw.normal(7, d) if feature_map in ("softmax", "rbf") else None
    more = {"causal": draw.of(True, False), "scale": draw.of(None, 0.05), "feature_map": feature_map}
    return {"q": q, "k": k, "v": v, "features": features, **more}


def _by_weights(
    q: Tensor, k: Tensor, v: Tensor, features: Tensor | None, feature_map: str, causal: bool, scale: float | None
) -> Tensor:
    """Every weight by itself: tests/linear_attention_oracle.py."""
    from linear_attention_oracle import exactly

    return exactly(q, k, v, features, feature_map=feature_map, causal=causal, scale=scale)[0]


# ----------------------------------------------------------------------------------------------------- sparse routing


def _routed(draw: Draw) -> Operands:
    b, s, t, h, hk = draw.of(
        (1, 700, 700, 2, 2),
        (2, 300, 1500, 4, 2),
        (1, 1, 1, 1, 1),
        (1, 640, 640, 1, 1),
        (1, 130, 0, 2, 1),
        (1, 0, 70, 1, 1),
    )
    q, k, v = (draw.normal(b, n, heads, 8, dtype=torch.float64) for n, heads in ((s, h), (t, hk), (t, hk)))
    most, near, sinks, deviations, left, scale = draw.of(
        (3, 1, 1, None, None, None),
        (0, 0, 0, 1.0, None, None),
        (99, 2, 3, 0.5, None, 2.0),
        (2, 0, 0, None, 0.3, None),
        (0, 1, 0, None, 0.05, 9.0),
        (0, 0, 1, None, 0.0, 1.0),
        (2, None, 1, None, None, None),
    )
    asked = {"most": most, "near": near, "sinks": sinks, "deviations": deviations, "left": left, "scale": scale}
    return {"q": q, "k": k, "v": v, **asked}


def _chosen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    most: int,
    near: int | None,
    sinks: int,
    deviations: float | None,
    left: float | None,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """Which blocks each row of (batch, head, query block) looks at, and the means of all blocks."""
    b, s, h, _ = q.shape
    group = h // k.shape[2]
    query_blocks, blocks = -(-s // 128), -(-k.shape[1] // 64)
    visited = torch.zeros(b, h, query_blocks, blocks, dtype=torch.float64)
    means = [torch.stack([part.mean(1) for part in t.split(64, 1)], 2) if blocks else t.transpose(1, 2) for t in (k, v)]
    for n, head, i in itertools.product(range(b), range(h), range(query_blocks if blocks else 0)):
        q_mean = q[n, i * 128 : i * 128 + 128, head].mean(0)
        scores = torch.stack([q_mean @ mean for mean in means[0][n, head // group]])
        each = blocks / query_blocks
        chosen: set[int] = set()
        if near is not None:
            chosen = {j for j in range(blocks) if j < sinks or i * each - near - 1 < j < (i + 1) * each + near}
            chosen |= {blocks - 1} if k.shape[1] % 64 else set()
        rank = scores
        if left is not None:
            sizes, rank = torch.tensor([min(64, k.shape[1] - j * 64) for j in range(blocks)]), torch.zeros(blocks)
            halves = q[n, i * 128 : i * 128 + 128, head].split(64)
            for half in halves:
                by_half = torch.stack([half.mean(0) @ mean for mean in means[0][n, head // group]])
                weights = sizes * (by_half * (q.shape[3] ** -0.5 if scale is None else scale)).exp()
                rank = rank + weights / weights.sum() * len(half) / sum(map(len, halves))
        best = sorted(set(range(blocks)) - chosen, key=lambda j: (-float(rank[j]), j))
        count = max(most - len(chosen), 0)
        if left is not None:
            while float(rank[best[count:]].sum()) > left:
                count += 1
        chosen |= set(best[:count])
        if deviations is not None:
            bar = scores.mean() + deviations * scores.std(correction=0)
            chosen |= {j for j in range(blocks) if scores[j] > bar}
        visited[n, head, i, list(chosen)] = 1
    return visited, visited, visited.sum(-1), *means


def _lists_and_words(
    keys: Tensor, counts: Tensor, words: Tensor, k_means: Tensor, v_means: Tensor
) -> tuple[Tensor, ...]:
    """Of lists, and of words of bits, which blocks they say; what is behind a list's end says nothing."""
    blocks = k_means.shape[2]
    listed = torch.zeros(*keys.shape[:-1], blocks, dtype=torch.int64, device=keys.device)
    for row in itertools.product(*map(range, counts.shape)):
        listed[row][keys[row][: int(counts[row])].long()] = 1
    bits = (words[..., None] >> torch.arange(32, device=words.device)) & 1
    assert words.shape[-1] % 2 == 0
    return listed, bits.flatten(-2)[..., :blocks], counts, k_means, v_means


_ATTENDED = {name: torch.zeros(1, 4, 2, 8) for name in ("q", "k", "v")}
_Q, _KEYS, _AT = ones(1, 1, 4, 64), ones(1, 8, 2, 64), torch.zeros(1, dtype=torch.int32)


def _list(keys: tuple[int, ...], counts: tuple[int, ...], rows: int = 4) -> dict[str, Any]:
    return {"blocks": BlockList(torch.zeros(keys), torch.zeros(counts), rows, 4)}


CONTRACTS = {
    "attention": Contract(
        attention,
        _attended,
        by_hand,
        slack=4e-6,
        stock=1e-2,
        base=_ATTENDED,
        wrong=[
            (r"q: \[1, 4, 8\] is not", {"q": torch.zeros(1, 4, 8)}),
            *((".* q's heads a multiple of k's", {"k": torch.zeros(1, 4, heads, 8)}) for heads in (3, 0)),
            ("v: .* is not k's shape", {"v": torch.zeros(1, 5, 2, 8)}),
            ("mask: .* does not broadcast", {"mask": torch.zeros(3, 1, 4, 4)}),
            ("mask: torch.int32 is neither", {"mask": torch.zeros(4, 4, dtype=torch.int32)}),
            (r"key_lengths: \[2\] is not one", {"key_lengths": torch.zeros(2, dtype=torch.int32)}),
            (r"distance_bias: \[2, 6\], expected \[2, 7\]", {"distance_bias": torch.zeros(2, 6)}),
            ("window: left is -2", {"window": (-2, 0)}),
            ("scale is nan", {"scale": math.nan}),
            (r"blocks: keys \[1, 1, 2, 1\]", _list((1, 1, 2, 1), (1, 1, 2))),
            ("blocks: counts", _list((1, 1, 1, 1), (1, 1, 2))),
            (".* is no block", _list((1, 1, 1, 1), (1, 1, 1), 0)),
            ("tail: there is no list", {"tail": TAIL}),
            ("tail: masks, windows", {**LISTED, "tail": TAIL, "causal": True}),
            ("tail: masks, windows", {**LISTED, "tail": TAIL, "key_lengths": torch.ones(1, dtype=torch.int32)}),
            (
                r"tail: k \[1, 2, 2, 8\], expected the means of 1",
                {**LISTED, "tail": TAIL._replace(k=torch.zeros(1, 2, 2, 8))},
            ),
            (
                r".*visited \[1, 1, 1, 1\], expected \[1, 1, 1, 2\]",
                {**LISTED, "tail": TAIL._replace(visited=torch.zeros(1, 1, 1, 1))},
            ),
        ],
    ),
    "decode_attention": Contract(
        decode_attention,
        _decoded,
        _over_kept,
        slack=4e-6,
        stock=2e-2,
        special=("q",),
        base={"q": _Q, "keys": _KEYS, "values": _KEYS, "at": _AT},
        wrong=[
            (r"q: \[1, 2, 4, 64\] is not \[batch, 1, heads, d\]", {"q": ones(1, 2, 4, 64)}),
            (r"keys: .* is not \[1, room, heads, 64\]", {"keys": ones(1, 8, 2, 32)}),
            ("keys: .* with heads that divide 4", {"keys": ones(1, 8, 3, 64)}),
            (r"values: \[1, 4, 2, 64\] is not the keys' shape", {"values": ones(1, 4, 2, 64)}),
            (".* there is no key to see", {"keys": ones(1, 0, 2, 64), "values": ones(1, 0, 2, 64)}),
            ("at: torch.int64", {"at": _AT.long()}),
        ],
    ),
    "linear_attention": Contract(
        linear_attention,
        _linear,
        _by_weights,
        slack=2e-5,
        stock=2e-2,
        base={name: ones(2, 5, 1, 8) for name in ("q", "k", "v")},
        wrong=[
            (r"q: \[2, 3, 4\] is not", {"q": ones(2, 3, 4)}),
            (r"k: \[1, 5, 1, 8\] does not go", {"k": ones(1, 5, 1, 8)}),
            (r"k: \[2, 5, 1, 4\] does not go", {"k": ones(2, 5, 1, 4)}),
            (r"k: \[2, 5, 2, 8\] does not go", {"q": ones(2, 3, 3, 8), "k": ones(2, 5, 2, 8)}),
            (r"v: \[2, 6, 1, 8\] is not k's shape", {"v": ones(2, 6, 1, 8)}),
            ("feature_map is 'gelu'", {"feature_map": "gelu"}),
            (r"features: None, expected \[any but 0, 8\]", {"feature_map": "rbf"}),
            (r"features: \[4, 6\], expected", {"features": ones(4, 6), "feature_map": "softmax"}),
            (r"features: \[0, 8\], expected", {"features": ones(0, 8), "feature_map": "softmax"}),
            (r"features: \[4, 8\], but elu has no matrix", {"features": ones(4, 8)}),
            ("scale is -1.0", {"features": ones(4, 8), "feature_map": "softmax", "scale": -1.0}),
            ("eps is nan", {"feature_map": "relu", "eps": math.nan}),
            ("eps is -1.0", {"eps": -1.0}),
        ],
    ),
    "choose_blocks": Contract(
        choose_blocks,
        _routed,
        _chosen,
        stock=None,
        seen=_lists_and_words,
        bf16=True,
        base={**_ATTENDED, "most": 1},
        wrong=[
            ("k: 3 heads do not go with q's 2", {"k": torch.zeros(1, 4, 3, 8), "v": torch.zeros(1, 4, 3, 8)}),
            (".* batch and d are equal", {"k": torch.zeros(2, 4, 2, 8)}),
            (".* is not k's shape", {"v": torch.zeros(1, 5, 2, 8)}),
            *((f"{name} is {value}", {name: value}) for name, value in (("most", -1), ("near", -1), ("sinks", -2))),
            ("deviations is nan", {"deviations": math.nan}),
            ("left is nan", {"left": math.nan}),
            ("left is 1.5", {"left": 1.5}),
            ("left and deviations are two ends", {"left": 0.1, "deviations": 1.0}),
            ("scale is 0.0", {"scale": 0.0}),
            ("scale is inf", {"scale": math.inf}),
        ],
    ),
}  # fmt: skip
