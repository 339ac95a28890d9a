"""Wan transformers whose self-attention was trained sparse: what is in their files, where it goes in
stock's blocks, and what a block tells of it.

    SLA   TurboDiffusion's. Of each block blocks.N.self_attn.attn_op.local_attn.proj_l, a Linear from
          a head to a head
    VSA   FastVideo's FastWan. Of each block blocks.N.to_gate_compress, a Linear of the size of q's

Stock has no place for either, says so in its log, and computes dense attention without it. Here a
block gets it as one more operation, under the file's name, before the network is filled: so it
streams, takes LoRAs, and is saved as the others.

How much is visited is in no file: it is what the published scripts train and run the model with.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from ...base.hooks import LEARNED_GATE
from ...base.subclassing import mix
from ...base.trained_sparse import TrainedSparse
from ...sparse.sla import Sla
from ...sparse.trained import with_learned
from ...sparse.vsa import Vsa
from .layout import SLA, VSA

SLA_SHARE = 0.1
# By width: 1.3B, 5B, 14B.
VSA_SHARES = {1536: 0.2, 3072: 0.2, 5120: 0.1}
VSA_SHARE = 0.2
Options = dict[str, Any]


def learned(names: Collection[str], width: int) -> TrainedSparse | None:
    """The sparse attention that a model with these tensors was trained with."""
    if f"blocks.0.{SLA}.weight" in names:
        return TrainedSparse("SLA", SLA_SHARE)
    if f"blocks.0.{VSA}.weight" in names:
        return TrainedSparse("VSA", VSA_SHARES.get(width, VSA_SHARE))
    return None


def grow(net: Any, names: Collection[str]) -> int:
    """Give each block of stock's WanModel the operation for what its file has beyond stock's.
    Returns their number."""
    grown = 0
    for i, block in enumerate(net.blocks):
        attn = block.self_attn
        for name, size in ((SLA, attn.head_dim), (VSA, attn.dim)):
            if f"blocks.{i}.{name}.weight" in names:
                _put(block, name, attn.q, size)
                grown += 1
    return grown


def _put(block: nn.Module, name: str, like: Any, size: int) -> None:
    """A Linear of this size of the same kind as another one, under a name in a block."""
    *outer, last = name.split(".")
    for part in outer:
        if part not in block._modules:
            block.add_module(part, nn.Module())
        block = block.get_submodule(part)
    # Some operations make their weights when they load them, and may note the type.
    dtype = getattr(like, "weight_comfy_model_dtype", None) or getattr(getattr(like, "weight", None), "dtype", None)
    block.add_module(last, type(like)(size, size, bias=True, dtype=dtype))


def learn(block: Any) -> None:
    """Let a block's self-attention compute as it was trained, if its network has grown for it. In
    place, and before the block is streamed."""
    if (gate := block._modules.get(VSA)) is not None or "attn_op" in block.self_attn._modules:
        mix(block.self_attn, _Learned, **{LEARNED_GATE: gate})


def learns(block: Any) -> bool:
    """Whether a block's self-attention computes as it was trained."""
    return LEARNED_GATE in block.self_attn.__dict__


def gate_of(attn: Any) -> tuple[nn.Module, ...]:
    """The operation that makes the gate of a self-attention of what q, k and v are made of; empty: it
    has none."""
    gate: nn.Module | None = attn.__dict__.get(LEARNED_GATE)
    return () if gate is None else (gate,)


def as_learned(attn: Any, options: Options, gate: Tensor | None = None) -> Options:
    """The transformer_options for the call of a self-attention. gate: [batch, tokens, dim], if it has
    one."""
    if LEARNED_GATE not in attn.__dict__:
        return options
    return with_learned(options, Sla(attn.attn_op.local_attn.proj_l) if gate is None else Vsa(gate))


class _Learned:
    """Mixed into stock's self-attention, for blocks that stock computes."""

    def forward(self, x: Tensor, freqs: Tensor, transformer_options: Options | None = None) -> Tensor:
        gate = (operation(x) for operation in gate_of(self))
        options = as_learned(self, transformer_options or {}, *gate)
        out: Tensor = super().forward(x, freqs, transformer_options=options)  # type: ignore[misc]
        return out
