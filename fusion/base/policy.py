"""The kernel policy of a model: put on it when it is loaded, and read here by all that computes.

MODEL      among its `transformer_options`, of which every clone has its own. Stock hands them to
           each call
CLIP, VAE  on each of its fused networks (`POLICY`), because stock hands their calls no options. A
           clone carries another one as an object patch, which stock puts in when it loads the clone
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import comfy.model_management

from ...gpu.nvidia import capability
from ...kernels_cuda import LEDGER, KernelPolicy
from ...kernels_cuda.binary.arch import has_tensor_cores
from .format import IN_BYTES, quality
from .hooks import POLICY

SAYS = (
    "This card multiplies FP16 at 1/64 of the rate of FP32, and bytes at four times that rate. So quality 'auto' computes "
    f"as '{quality(IN_BYTES)}' here: weights, queries, keys and values are rounded to 8 bits. 'Exact' leaves products and "
    "attention to torch, in FP32."
)


def policy_of(options: Mapping[str, Any]) -> KernelPolicy | None:
    """The policy under which a model is called with these transformer_options; None: none of ours."""
    found: KernelPolicy | None = options.get(POLICY)
    return found


def policy_on(model: Any) -> KernelPolicy | None:
    """The policy under which a stock MODEL will be called; None: none of ours."""
    return policy_of(model.model_options.get("transformer_options", {}))


def policy_for_card(policy: KernelPolicy) -> KernelPolicy:
    """The policy as ComfyUI's card takes it: `auto` computes in bytes on a card without tensor cores (GTX 10)."""
    if policy.precision != "auto" or policy.is_off:
        return policy
    found = capability(comfy.model_management.get_torch_device())
    if found is None or has_tensor_cores(found):
        return policy
    LEDGER.say_once(SAYS)
    return replace(policy, precision=IN_BYTES)


def put_on(model: Any, policy: KernelPolicy) -> dict[str, Any]:
    """Let a stock MODEL be called under this policy. Returns its transformer_options."""
    options: dict[str, Any] = model.model_options.setdefault("transformer_options", {})
    options[POLICY] = policy
    return options


def standing(policy: KernelPolicy) -> dict[str, KernelPolicy]:
    """The attribute that a fused network of a CLIP or a VAE gets."""
    return {POLICY: policy}


def network_policy(network: Any) -> KernelPolicy | None:
    """The policy that stands on a network of a CLIP or a VAE; None: it is not fused."""
    found: KernelPolicy | None = getattr(network, POLICY, None)
    return found


def places_in(model: Any) -> Iterator[str]:
    """The names of the attributes, within a CLIP's or VAE's model, that hold a policy. One that is an
    object patch already counts too."""
    for path, module in model.named_modules():
        if POLICY in module.__dict__:
            yield f"{path}.{POLICY}" if path else POLICY


def all_off(policy: KernelPolicy, ops: Iterable[str] | None = None) -> bool:
    """Whether all of these ops are off; None: every op there is, by the default and without an exception."""
    return policy.is_off if ops is None else all(policy.mode(op) == "off" for op in ops)
