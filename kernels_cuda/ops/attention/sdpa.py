"""What torch's own scaled_dot_product_attention can do of `attention`, backend by backend.

torch takes one mask, so everything beside a plain or causal product (lengths, windows, distances, block lists) becomes a
dense mask first, as stock ComfyUI would hand it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda as switches
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ...call import Begun, Call, Plan
from ...registry import OneWay
from ...tune.warm_up import begin
from .attention_operands import Operands

# Torch before 2.6 knows no order but its own: flash first.
IN_ORDER = {"set_priority": True} if "set_priority" in inspect.signature(sdpa_kernel).parameters else {}
# In the order in which stock ComfyUI prefers them.
BACKENDS = {
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch mem-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
SERVING = {name: backend for name, backend in BACKENDS.items() if backend is not SDPBackend.MATH}
TILE = 128  # tokens: cuDNN compiles one kernel for whole ones, another for others, and one more for a single query
# Products and sums of a call, below which cuDNN's attention is not tried: it takes half a second to be compiled, and 50 ms of the
# host for each size, where all that it could gain is microseconds.
LEAST_WORK = 2**31
MOST_SCORES = 2**25  # held at a time by torch's math: 128 MB in fp32, and as much again for their softmax
# Whether torch may use a backend, and to say so.
_SWITCHES: dict[SDPBackend, tuple[Callable[[], bool], Callable[[bool], None]]] = {
    SDPBackend.FLASH_ATTENTION: (switches.flash_sdp_enabled, switches.enable_flash_sdp),
    SDPBackend.CUDNN_ATTENTION: (switches.cudnn_sdp_enabled, switches.enable_cudnn_sdp),
    SDPBackend.EFFICIENT_ATTENTION: (switches.mem_efficient_sdp_enabled, switches.enable_mem_efficient_sdp),
    SDPBackend.MATH: (switches.math_sdp_enabled, switches.enable_math_sdp),
}
_ABLE = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.can_use_flash_attention,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.can_use_cudnn_attention,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.can_use_efficient_attention,
}


def sdpa_arguments(o: Operands, mask: Callable[[Operands], Tensor | None]) -> dict[str, Any]:
    """q, k, v as [batch, heads, tokens, d] views, the mask if one is needed, and the flags."""
    causal = only_causal(o)
    return {
        "query": o.q.transpose(1, 2),
        "key": o.keys.transpose(1, 2),
        "value": o.values.transpose(1, 2),
        "attn_mask": None if causal else mask(o),
        "is_causal": causal,
        "scale": o.scale,
        "enable_gqa": o.q.shape[2] != o.k.shape[2],
    }


def only_causal(o: Operands) -> bool:
    """Whether torch's own flag says all that is asked of the mask."""
    nothing_else = o.key_lengths is None and o.mask is None and o.distance_bias is None and o.blocks is None
    return nothing_else and o.causal and o.shift == 0 and o.left < 0 and o.right < 0


def dense_mask(o: Operands) -> Tensor | None:
    """One mask for torch: bool, or of q's type where something is added."""
    tokens = o.q.shape[1]
    seen, added = o.seen(0, tokens), o.added(0, tokens, o.q.dtype)
    if added is None or seen is None:
        return added if seen is None else seen
    lowest = torch.full((), -torch.inf, dtype=added.dtype, device=added.device)
    return torch.where(seen, added, lowest)


def stand_in_mask(o: Operands) -> Tensor | None:
    """A mask of the type and size of `dense_mask`, in the memory of a row of keys: for torch's checks, which read no mask. Of a
    long video each mask would be gigabytes."""
    if not (o.hides or o.adds):
        return None
    b, tokens, heads, _ = o.q.shape
    keys = o.k.shape[1] + (0 if o.tail is None else o.tail.k.shape[1])
    row = torch.empty(keys, dtype=o.q.dtype if o.adds else torch.bool, device=o.q.device)
    return row.expand(b, heads, tokens, keys)


def _is_nothing(o: Operands) -> bool:
    """Whether there is nothing to compute."""
    return o.q.numel() == 0 or o.k.shape[1] == 0


def run_sdpa(o: Operands, backends: Iterable[SDPBackend]) -> Tensor:
    """torch's attention through the first of these backends that serves: contiguous [batch, tokens, heads, d]."""
    if _is_nothing(o):
        return torch.zeros(o.q.shape, dtype=o.q.dtype, device=o.q.device)
    with sdpa_kernel(list(backends), **IN_ORDER):
        out: Tensor = scaled_dot_product_attention(**sdpa_arguments(o, dense_mask))
    return out.transpose(1, 2).contiguous()


def run_stock(o: Operands) -> Tensor:
    """torch's attention as stock runs it: flash before cuDNN before mem-efficient before math."""
    return run_math(o) if _only_math(o) else run_sdpa(o, BACKENDS.values())


def run_math(o: Operands) -> Tensor:
    """torch's attention without a kernel of its own, which holds the scores of all pairs: of some queries at a time where they
    are many. The softmax goes along keys, so it is the same."""
    b, tokens, heads, _ = o.q.shape
    some = max(1, MOST_SCORES // max(1, b * heads * o.k.shape[1]))
    if tokens <= some or not o.plain or o.key_lengths is not None:
        return run_sdpa(o, (SDPBackend.MATH,))
    out = torch.empty(o.q.shape, dtype=o.q.dtype, device=o.q.device)
    for q, place in zip(torch.split(o.q, some, 1), torch.split(out, some, 1), strict=True):
        place.copy_(run_sdpa(replace(o, q=q), (SDPBackend.MATH,)))
    return out


def _only_math(o: Operands) -> bool:
    """Whether none of torch's kernels serves. On the CPU its flash does, whatever the size of heads."""
    if o.q.device.type != "cuda" or _is_nothing(o):
        return False
    asked = _asked(o)
    return not any(able(asked, False) for able in _ABLE.values())


def _asked(o: Operands) -> torch.backends.cuda.SDPAParams:
    """A call as torch's own checks want it."""
    a = sdpa_arguments(o, stand_in_mask)
    return torch.backends.cuda.SDPAParams(
        a["query"], a["key"], a["value"], a["attn_mask"], 0.0, a["is_causal"], a["enable_gqa"]
    )


class alone:
    """As `sdpa_kernel` of one backend, in a tenth of its time: a block does this twice."""

    __slots__ = ("_backend", "_changed")

    def __init__(self, backend: SDPBackend) -> None:
        self._backend = backend
        self._changed: list[tuple[Callable[[bool], None], bool]] = []

    def __enter__(self) -> None:
        for backend, (is_on, turn) in _SWITCHES.items():
            wanted = backend is self._backend
            if is_on() is not wanted:
                turn(wanted)
                self._changed.append((turn, not wanted))

    def __exit__(self, *_: object) -> None:
        for turn, before in self._changed:
            turn(before)


@dataclass(frozen=True)
class First:
    """cuDNN's attention at its first use: it is compiled for such heads and masks, and for how tokens fill its tiles, however many
    they are. tokens, keys: made up, as few as are alike in that."""

    device: torch.device
    dtype: torch.dtype
    d: int
    heads: int
    key_heads: int
    causal: bool
    is_masked: bool
    tokens: int
    keys: int

    def run(self) -> None:
        """Attention over a few made-up tokens. Not by torch's switches, which hold for all threads."""
        q, k = (
            torch.zeros(1, tokens, heads, self.d, dtype=self.dtype, device=self.device).transpose(1, 2)
            for tokens, heads in ((self.tokens, self.heads), (self.keys, self.key_heads))
        )
        mask = None
        if self.is_masked:
            mask = torch.zeros(1, 1, self.tokens, self.keys, dtype=self.dtype, device=self.device)
            mask = mask.expand(1, self.heads, -1, -1)
        torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, k, mask, False, 0.0, self.causal, False)


def _few(tokens: int) -> int:
    """As few tokens as fill cuDNN's tiles alike."""
    return 1 if tokens == 1 else TILE + tokens % TILE


def _cudnn_begins(o: Operands) -> Begun:
    causal = only_causal(o)
    kind = First(
        o.q.device, o.q.dtype, o.q.shape[3], o.q.shape[2], o.k.shape[2],
        causal, not causal and not (o.plain and o.key_lengths is None), _few(o.q.shape[1]), _few(o.k.shape[1]),
    )  # fmt: skip
    return begin(kind, o.q.device, kind.run)


def stock_begins(call: Call) -> Begun | None:
    """Stock takes cuDNN's where flash does not serve: with a mask."""
    if call.device.type != "cuda":
        return None
    o = Operands.of(call.tensors, call.options)
    if _is_nothing(o):
        return None
    asked = _asked(o)
    if _ABLE[SDPBackend.FLASH_ATTENTION](asked, False) or not _ABLE[SDPBackend.CUDNN_ATTENTION](asked, False):
        return None
    return _cudnn_begins(o)


@dataclass(frozen=True)
class TorchBackend(OneWay):
    """One backend of torch's attention, as a candidate of its own."""

    name: str
    backend: SDPBackend
    ours: bool = False

    def refuse(self, call: Call) -> str | None:
        if call.device.type != "cuda":
            return f"tensor is on the {call.device.type.upper()}"
        o = Operands.of(call.tensors, call.options)
        if _is_nothing(o):
            return "there is nothing to compute"
        if self.backend is SDPBackend.CUDNN_ATTENTION:
            if 4 * o.q.numel() * o.k.shape[1] < LEAST_WORK:
                return "it is done sooner than cuDNN compiles its kernel for it"
            if o.causal and o.shift < 0:
                return "the first queries see no key, of which cuDNN makes something"
        return None if _ABLE[self.backend](_asked(o), False) else "torch says that this backend cannot serve the call"

    def begin(self, call: Call) -> Begun | None:
        if self.backend is not SDPBackend.CUDNN_ATTENTION:
            return None
        return _cudnn_begins(Operands.of(call.tensors, call.options))

    def prepare(self, call: Call) -> Plan:
        options, backend = call.options, self.backend
        o = Operands.of(call.tensors, options)
        if not o.plain or o.key_lengths is not None:
            return lambda *tensors: run_sdpa(Operands.of(tensors, options), (backend,))
        scale, grouped = o.scale, o.q.shape[2] != o.k.shape[2]

        def plain(q: Tensor, k: Tensor, v: Tensor, *_: None) -> Tensor:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            with alone(backend):
                out: Tensor = scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped)
            return out.transpose(1, 2).contiguous()

        return plain
