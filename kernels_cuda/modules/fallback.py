"""Questions that every module asks before it computes with our ops, and the way back to torch.

An op refuses a call with a reason. So does a module, for things that only it can see: what it
holds, and what torch is doing around it. `auto` then goes on with torch's own modules and tells the
ledger, once for each reason. `on` makes it an error, as for an op. `off` was asked for, so nothing
is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils.parametrize import is_parametrized

from ..call import Call, Options, Tensors
from ..errors import KernelRefused
from ..ledger import LEDGER
from ..ops.views.checks import word, wrong_dtype
from ..policy import KernelPolicy
from ..registry import GRADIENT, Op

DEVICES = ("cuda",)  # tests add the CPU, where the ops run their references
TYPES = (torch.float16,)
TRACED = "torch is tracing: it sees, and its compiler fuses, torch's own operations"

# Private to torch, so its absence is no error.
_transform: Callable[[], Any] = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None)


def traced() -> bool:
    """Whether torch records operations by running this code once: torch.compile, torch.export,
    torch.jit.trace."""
    return torch.compiler.is_compiling() or bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def general_obstacle(x: Any, weights: Iterable[Tensor | None]) -> str | None:
    """Why none of our ops may be given x and these weights, in words for a user; None if one
    may."""
    if type(x) not in (Tensor, nn.Parameter):
        return f"x is a {type(x).__name__}, not a plain tensor"
    if x.is_nested or x.layout is not torch.strided:
        return "x is nested, or sparse"
    if x.device.type not in DEVICES:
        return f"x is on the {x.device.type.upper()}"
    if x.dtype not in TYPES:
        return next(wrong_dtype(TYPES, x=x))
    if _transform() is not None:
        return "a transform of torch.func is at work"
    # Forward mode marks no tensor, so within its context any may carry a derivative.
    if getattr(forward_ad, "_current_level", -1) >= 0:
        return GRADIENT
    if torch.is_grad_enabled() and (x.requires_grad or any(t is not None and t.requires_grad for t in weights)):
        return GRADIENT
    return "autocast is on, and chooses the types" if torch.is_autocast_enabled() else None


def replaced(name: str, part: nn.Module, known: type[nn.Module]) -> str | None:
    """Why a part of a module does not compute what torch's class does: it is of another class, or
    was changed. None: it does."""
    if type(part) is not known:
        return f"{name} is a {type(part).__module__}.{type(part).__qualname__}, not torch's {known.__name__}"
    if part._forward_hooks or part._forward_pre_hooks:
        return f"{name} has hooks, which only torch's own computation calls"
    return f"the forward of {name} was replaced" if "forward" in part.__dict__ else None


def own_obstacle(op: Op, module: nn.Module, policy: KernelPolicy) -> str | None:
    """Why torch computes whatever x is: torch traces, the kernels are off, or the weight is not
    torch's plain one."""
    if traced():
        return TRACED
    if policy.mode(op.name) == "off":
        return f"the kernels of {op.name} are off"
    return "its weights are parametrised" if is_parametrized(module) else None


def unlike(x: Tensor, weights: Iterable[Tensor | None]) -> str | None:
    """A reason if weights are of another type or device than x, because torch has an error of its
    own for it, or promotes."""
    for t in weights:
        if t is not None and (t.dtype is not x.dtype or t.device != x.device):
            return f"x is {x.dtype} on {x.device}, the weights are {t.dtype} on {t.device}"
    return None


def refusal(op: Op, tensors: Tensors, options: Options, policy: KernelPolicy) -> str | None:
    """Why no kernel of our op can compute a call; None if one can."""
    call = Call(op.name, tensors, options, policy)
    reasons = [candidate.refuse(call) for candidate in op.candidates if candidate.ours]
    return None if None in reasons else "; ".join(reason for reason in reasons if reason)


def hand_back(module: str, op: str, reason: str, x: Any, policy: KernelPolicy) -> None:
    """Leave a call to torch, and tell why. The ledger is asked first, because this may be a hot
    path."""
    mode = policy.mode(op)
    if mode == "on":
        raise KernelRefused(f"{module} is forced on but cannot serve {_describe(x)}: {reason}")
    if mode == "auto" and reason != TRACED and not LEDGER.knows(module, op, reason):
        LEDGER.refused(module, op, reason, _describe(x), "torch")


def _describe(x: Any) -> str:
    """The argument in words, for messages."""
    if not isinstance(x, Tensor) or x.is_nested:
        return f"a {type(x).__name__}"
    return f"{word(x)}{list(x.shape)} on {x.device}"
