"""How stock's classes of blocks are read: for each a `Block`, which `block.py` computes.

A block is read at each call, because other nodes may put another part into it. No class of stock's
is imported here: they are known by their names, so that one that ComfyUI renames costs the others
nothing. An activation is known by what it makes of a few numbers, because stock has lambdas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ....kernels_cuda import KernelPolicy
from ...weights.fp32_residual import HIDDEN_SCALE, Gate
from .. import common
from .block import Block, Norm

# ---------------------------------------------------------------------------------------------------- activations


def gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def gelu_quick(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


GELU = Gate("gelu", functional.gelu)
GELU_TANH = Gate("gelu_tanh", gelu_tanh)
SILU = Gate("silu", functional.silu)
GATES = (GELU, GELU_TANH, SILU, Gate("relu", functional.relu), Gate("none", gelu_quick, quick=True))
PROBES = (-1e4, -30.0, -6.0, -2.5, -1.0, -0.3, 0.0, 0.1, 0.7, 1.5, 3.0, 9.0, 1e4)


@functools.lru_cache(maxsize=32)
def gate_of(function: Callable[[Tensor], Tensor]) -> Gate | None:
    """Which of our activations a function is; None: none of them."""
    numbers = torch.tensor(PROBES, device="cpu", dtype=torch.float32)
    found = function(numbers.clone())
    return next((gate for gate in GATES if torch.allclose(found, gate.function(numbers), rtol=1e-6, atol=1e-6)), None)


# --------------------------------------------------------------------------------------------------------- blocks


def t5(block: Any) -> Block:
    """Without biases; scores are not scaled; gated, or in T5's first form with one matrix."""
    attend, last = block.layer[0], block.layer[-1]
    own, dense = attend.SelfAttention, last.DenseReluDense
    norms = (Norm(one.layer_norm, one.layer_norm.variance_epsilon, rms=True) for one in (attend, last))
    inner = (dense.wi_0, dense.wi_1) if hasattr(dense, "wi_0") else (dense.wi,)
    return Block(
        norms=(next(norms), next(norms)),
        qkv=(own.q, own.k, own.v),
        out=own.o,
        heads=own.num_heads,
        head=own.q.out_features // own.num_heads,
        scale=1.0,
        inner=inner,
        outer=dense.wo,
        gate=gate_of(dense.act),
        stored=HIDDEN_SCALE,
    )


def clip(layer: Any) -> Block:
    """CLIP's for text, and SigLIP's."""
    own, mlp = layer.self_attn, layer.mlp
    head = own.q_proj.out_features // own.heads
    return Block(
        norms=(_layer_norm(layer.layer_norm1), _layer_norm(layer.layer_norm2)),
        qkv=(own.q_proj, own.k_proj, own.v_proj),
        out=own.out_proj,
        heads=own.heads,
        head=head,
        scale=head**-0.5,
        inner=(mlp.fc1,),
        outer=mlp.fc2,
        gate=gate_of(mlp.activation),
    )


def qwen3_vision(block: Any) -> Block:
    """Of Qwen3-VL's vision tower."""
    own, mlp = block.attn, block.mlp
    return Block(
        norms=(_layer_norm(block.norm1), _layer_norm(block.norm2)),
        qkv=(own.qkv,),
        out=own.proj,
        heads=own.num_heads,
        head=own.head_dim,
        scale=own.head_dim**-0.5,
        inner=(mlp.linear_fc1,),
        outer=mlp.linear_fc2,
        gate=GELU_TANH,
    )


def qwen2_vision(block: Any) -> Block:
    """Of Qwen2.5-VL's vision tower."""
    own, mlp = block.attn, block.mlp
    return Block(
        norms=(Norm(block.norm1, block.norm1.eps, rms=True), Norm(block.norm2, block.norm2.eps, rms=True)),
        qkv=(own.qkv,),
        out=own.proj,
        heads=own.num_heads,
        head=own.head_dim,
        scale=own.head_dim**-0.5,
        inner=(mlp.gate_proj, mlp.up_proj),
        outer=mlp.down_proj,
        gate=SILU if type(mlp.act_fn) is nn.SiLU else None,
        stored=HIDDEN_SCALE,
    )


def _layer_norm(module: Any) -> Norm:
    return Norm(module, module.eps, rms=False)


READERS: dict[str, Callable[[Any], Block]] = {
    "comfy.text_encoders.t5.T5Block": t5,
    "comfy.clip_model.CLIPLayer": clip,
    "comfy.text_encoders.qwen35.Qwen35VisionBlock": qwen3_vision,
    "comfy.text_encoders.qwen_vl.VisionBlock": qwen2_vision,
}


def described(block: Any) -> Block:
    """One of stock's blocks, fused or not, of a class in `READERS`."""
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(block).__mro__)
    return next(READERS[name] for name in names if name in READERS)(block)


# ---------------------------------------------------------------------------------------------------- whose it is


def obstacle(
    blocks: Sequence[Any],
    x: Tensor,
    policy: KernelPolicy,
    *,
    on_cpu: bool,
    attention_mask: Tensor | None = None,
    others: Sequence[Any] = (),
) -> str | None:
    """Why stock must compute a call of these blocks, in words a user understands; None if we may.

    x       [batch, tokens, width], what the first one gets
    on_cpu  whether we also compute on the CPU
    others  modules around the blocks whose weights we take, too
    """
    reason = common.obstacle((*blocks, *others), x, attention_mask, policy, on_cpu=on_cpu, runs=len(blocks))
    if reason is not None:
        return reason
    return next((why for block in blocks if (why := described(block).obstacle) is not None), None)
