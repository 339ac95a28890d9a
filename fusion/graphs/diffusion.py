"""A diffusion network whose calls may be captured (`calls.py`): the graph is of its `__call__`,
inside stock's `apply_model`.

The rest of the `transformer_options` decides. Their tensors and plain values belong to the call's
key. Nodes that patch blocks, wrap the network or replace its attention run code at each call that a
graph would not run; then the call is not captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from comfy.patcher_extension import WrappersMP
from comfy_api.torch_helpers.torch_compile import COMPILE_KEY
from torch import nn

from ..base.hooks import NETWORK_GRAPHS, NETWORK_METHODS, NETWORK_PARTS
from ..base.policy import policy_of
from ..base.subclassing import mix
from ..fused.attention import HOOK, AttentionOverride
from ..fused.block import Parts
from ..stream.block_stream import BlockStream
from .calls import Graphs
from .guard import Methods, own_values

OPTIONS = "transformer_options"
# Wrappers around `apply_model` or further out, which run as ever.
OUTSIDE = frozenset(
    (
        WrappersMP.OUTER_SAMPLE,
        WrappersMP.PREPARE_SAMPLING,
        WrappersMP.SAMPLER_SAMPLE,
        WrappersMP.PREDICT_NOISE,
        WrappersMP.CALC_COND_BATCH,
        WrappersMP.APPLY_MODEL,
    )
)
# Options that `obstacle` looks at, or that do not matter to a network.
UNKEYED = frozenset((HOOK, "wrappers", "callbacks", "patches", "patches_replace", "uuids"))


def attach(net: nn.Module, stream: BlockStream) -> None:
    """Let calls of this network, whose blocks stream, be captured if that pays."""
    graphs = Graphs(stream, net)
    stream.residency.graphs = graphs
    mix(net, _Graphed, **{NETWORK_GRAPHS: graphs, NETWORK_PARTS: Parts(net), NETWORK_METHODS: Methods(net)})


class _Graphed:
    """Mixin for the network's class."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        graphs: Graphs = self.__dict__[NETWORK_GRAPHS]
        options = kwargs.get(OPTIONS)
        if not isinstance(options, dict):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        reason = obstacle(self, options)
        if reason is not None:
            graphs.refuse(reason)
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        unkeyed = {name: value for name, value in options.items() if name in UNKEYED}
        keyed = {name: value for name, value in options.items() if name not in UNKEYED}
        others = {name: value for name, value in kwargs.items() if name != OPTIONS}
        call = super().__call__  # type: ignore[misc]

        def body(args: Any, others: Any, keyed: Any) -> Any:
            return call(*args, **others, **{OPTIONS: {**keyed, **unkeyed}})

        override = options.get(HOOK)
        module: Any = self
        key = None if override is None else override.policy.token, own_values(module)
        return graphs.call(body, (args, others, keyed), key, changed=partial(changed, module))


def obstacle(net: Any, options: Mapping[str, Any]) -> str | None:
    """Why a call with these options is not captured, in words for a user. Looks at no module within
    the network."""
    policy = policy_of(options)
    if policy is None or policy.is_off:
        return "the kernels are off"
    if any(options.get("patches", {}).values()) or any(options.get("patches_replace", {}).values()):
        return "another node patches its blocks"
    if any(options.get("callbacks", {}).values()):
        return "another node is called back"
    for kind, wrappers in options.get("wrappers", {}).items():
        if any(wrappers.values()) and kind not in OUTSIDE:
            return f"another node stands around it ({kind})"
        if kind == WrappersMP.APPLY_MODEL and wrappers.get(COMPILE_KEY):
            return "torch.compile compiles it"
    override = options.get(HOOK)
    if override is not None and type(override) is not AttentionOverride:
        return f"its attention is another node's, or sparse ({type(override).__name__})"
    if net._forward_hooks or net._forward_pre_hooks:
        return "another node has put a hook on the network"
    return None


def changed(net: Any) -> str | None:
    """Methods or parts that other nodes have replaced in the network, in words for a user; None:
    there are none. Looks at each of its modules."""
    methods: Methods = net.__dict__[NETWORK_METHODS]
    if (name := methods.replaced(net)) is not None:
        return f"another node has replaced {name} of the network"
    parts: Parts = net.__dict__[NETWORK_PARTS]
    return parts.replaced()
