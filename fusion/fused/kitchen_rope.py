"""RoPE of a network that no family knows, through our op.

ComfyUI's networks turn q and k, with or without RMSNorm over heads before, by functions of
comfy-kitchen, whose registry asks one backend after another. Kitchen's CUDA kernels do it in one
pass. Where they do not serve, and ComfyUI switches them off where torch's CUDA is older than 13,
kitchen's eager backend makes a dozen of it. A backend of ours is in the registry, too, and in
nobody's list: a call of a model chooses it, for its thread and its time (`turning`). What it does
not serve goes on to kitchen's own choice, which for eager torch rounds between norm and rotation;
ours is FP32 and rounds once, but where only a part of a head turns.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import threading
from collections.abc import Iterator, Mapping
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import comfy.quant_ops
import torch

from ...kernels_cuda import LEDGER, KernelPolicy, obstacle, rms_rope_
from ..base.hooks import KITCHEN_BACKEND
from .kitchen_calls import FUNCTIONS, STREAMS, KitchenCall, in_place

ONE_PASS = ("cuda", "triton", "hip", "ascend")  # kitchen's backends whose functions are one kernel
# What is asked of the registry, and the arguments of that.
REGISTRY = {
    "register": ["name", "module", "capabilities"],
    "use_backend": ["backend_name"],
    "is_available": ["backend_name"],
    "validate_backend_for_call": ["backend_name", "func_name", "kwargs"],
}
UNKNOWN = "comfy-kitchen's registry is not as it is known here: models without a family turn q and k as ComfyUI does"


class _OfThread(threading.local):
    """The policy of the call that a thread is in, which stands beside the registry's choice for it."""

    policy: KernelPolicy | None = None


_now = _OfThread()


@contextlib.contextmanager
def turning(policy: KernelPolicy | None) -> Iterator[None]:
    """Kitchen's functions are ours in this thread meanwhile, where the policy lets them. None: they are
    not, within a call of another model either."""
    before = _now.policy
    _now.policy = None if policy is None or policy.mode("rms_rope_") == "off" else policy
    try:
        registry = None if _now.policy is None else _registered()
        if registry is None or not registry.is_available(KITCHEN_BACKEND):  # a user may switch it off
            yield
        else:
            with registry.use_backend(KITCHEN_BACKEND):
                yield
    finally:
        _now.policy = before


@cache
def _registered() -> Any:
    """Kitchen's registry, with our backend in it; None: it is not as it is known here."""
    kitchen = getattr(comfy.quant_ops, "ck", None)
    if kitchen is None:
        return None
    registry: Any = getattr(kitchen, "registry", None)
    names, constraints = _functions(), _constraints(kitchen)
    if not names or constraints is None or any(_arguments(registry, one) != wanted for one, wanted in REGISTRY.items()):
        LEDGER.say_once(UNKNOWN, logging.INFO)
        return None

    def answer(name: str, given: Mapping[str, Any]) -> Any:
        reason = next(_obstacles(registry, name, given), None)
        result = constraints.ValidationResult
        return result.ok() if reason is None else result.fail(name, reason)

    rules = {name: constraints.FunctionConstraints(call_rules=(partial(answer, name),)) for name in names}
    registry.register(KITCHEN_BACKEND, SimpleNamespace(**{name: partial(_turned, name) for name in names}), rules)
    return registry


def _functions() -> list[str]:
    """Kitchen's functions whose arguments are as they are known here."""
    found = ((name, getattr(torch.ops.comfy_kitchen, name, None)) for name in FUNCTIONS)
    return [
        name
        for name, op in found
        if op is not None and tuple(a.name for a in op.default._schema.arguments) == FUNCTIONS[name]
    ]


def _constraints(kitchen: Any) -> Any:
    """Kitchen's module of that name; None: its rules for calls are not as they are known here."""
    try:
        found = importlib.import_module(f"{kitchen.__name__}.constraints")
    except ImportError:
        return None
    result, rules = getattr(found, "ValidationResult", None), _arguments(found, "FunctionConstraints")
    if rules is None or "call_rules" not in rules or _arguments(result, "ok") != []:
        return None
    return found if _arguments(result, "fail") == ["param", "reason"] else None


def _arguments(holder: Any, name: str) -> list[str] | None:
    """Of a function, by name; None: there is none."""
    function = getattr(holder, name, None)
    return list(inspect.signature(function).parameters) if callable(function) else None


def runs_on(device: torch.device, policy: KernelPolicy) -> bool:
    """Whether our kernels run there."""
    return device.type == "cuda" and obstacle(device, policy.isa) is None


def _obstacles(registry: Any, name: str, given: Mapping[str, Any]) -> Iterator[str]:
    """Why a call of a function is not ours, in words."""
    if (policy := _now.policy) is None:
        yield "no call of a model of FuseStream's wants it"
        return
    call = KitchenCall.of(name, given)
    if not runs_on(call.table.device, policy):
        yield f"the kernels do not run on {call.table.device}"
    if any(registry.validate_backend_for_call(one, name, given).success for one in ONE_PASS):
        yield "a kernel of kitchen's own serves it"
    yield from call.obstacles(in_place(name))


def _turned(name: str, **given: Any) -> Any:
    """What one of kitchen's functions returns, for a call without obstacles."""
    policy = _now.policy
    assert policy is not None
    results = {one: given[one] for one in STREAMS if one in given}
    if not in_place(name):  # copies with the strides that torch.compile expects of them
        results = {one: x.clone() for one, x in results.items()}
    call = KitchenCall.of(name, {**given, **results})
    (q, *k), weights = call.views, call.weights
    pair, norms = [q, *k, None][:2], [*weights, None, None][:2]
    turn: Any = partial(rms_rope_, eps=call.eps, policy=policy)
    if weights and call.part < q.shape[3]:
        turn(*pair, *norms, norm="head")
        pair, norms = [x if x is None else x[..., : call.part] for x in pair], [None, None]
    norm = "none" if norms[0] is None else "head"
    turn(*pair, *norms, call.rotation, norm=norm, interleaved=not call.halves)
    return tuple(results.values()) if len(results) > 1 else results.popitem()[1]
