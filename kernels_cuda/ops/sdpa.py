"""What torch's own scaled_dot_product_attention can do of `attention`, backend by backend.

torch takes one mask, so everything beside a plain or causal product (lengths, windows, distances, block lists) becomes a
dense mask first, as stock ComfyUI would hand it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..call import Call, Plan
from ..registry import OneWay
from .attention_operands import Operands

# In the order in which stock ComfyUI prefers them.
BACKENDS = {
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch mem-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
SERVING = {name: backend for name, backend in BACKENDS.items() if backend is not SDPBackend.MATH}
_ABLE = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.can_use_flash_attention,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.can_use_cudnn_attention,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.can_use_efficient_attention,
}


def sdpa_arguments(o: Operands) -> dict[str, Any]:
    """q, k, v as [batch, heads, tokens, d] views, the dense mask if one is needed, and the flags."""
    nothing_else = o.key_lengths is None and o.mask is None and o.distance_bias is None and o.blocks is None
    only_causal = nothing_else and o.causal and o.shift == 0 and o.left < 0 and o.right < 0
    return {
        "query": o.q.transpose(1, 2),
        "key": o.k.transpose(1, 2),
        "value": o.v.transpose(1, 2),
        "attn_mask": None if only_causal else dense_mask(o),
        "is_causal": only_causal,
        "scale": o.scale,
        "enable_gqa": o.q.shape[2] != o.k.shape[2],
    }


def dense_mask(o: Operands) -> Tensor | None:
    """One mask for torch: bool, or of q's type where something is added."""
    tokens = o.q.shape[1]
    seen, added = o.seen(0, tokens), o.added(0, tokens, o.q.dtype)
    if added is None or seen is None:
        return added if seen is None else seen
    lowest = torch.full((), -torch.inf, dtype=added.dtype, device=added.device)
    return torch.where(seen, added, lowest)


def run_sdpa(o: Operands, backends: Iterable[SDPBackend]) -> Tensor:
    """torch's attention through the first of these backends that serves: contiguous [batch, tokens, heads, d]."""
    if o.q.numel() == 0 or o.k.shape[1] == 0:
        return torch.zeros(o.q.shape, dtype=o.q.dtype, device=o.q.device)
    with sdpa_kernel(list(backends), set_priority=True):
        out: Tensor = scaled_dot_product_attention(**sdpa_arguments(o))
    return out.transpose(1, 2).contiguous()


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
        if o.q.numel() == 0 or o.k.shape[1] == 0:
            return "there is nothing to compute"
        a = sdpa_arguments(o)
        asked = torch.backends.cuda.SDPAParams(
            a["query"], a["key"], a["value"], a["attn_mask"], 0.0, a["is_causal"], a["enable_gqa"]
        )
        return None if _ABLE[self.backend](asked, False) else "torch says that this backend cannot serve the call"

    def prepare(self, call: Call) -> Plan:
        options, backends = call.options, (self.backend,)
        return lambda *tensors: run_sdpa(Operands.of(tensors, options), backends)
