"""Runs one call of a specimen by stock's code and by ours, on this machine's device with this
machine's kernels.

Three things are compared: the results; the arguments of attention, because stock's keywords, such
as "not in few bits", must reach it; and the names looked up in the call's options, because under a
name that only stock looks for, other nodes may say something that we would not hear.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import comfy.ldm.modules.attention as stock_attention
import comfy.memory_management
import comfy.model_management
import comfy.ops
import comfy.utils
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.utils._pytree import tree_leaves

from ...kernels_cuda import KernelPolicy, KernelRefused, obstacle
from ..base.hooks import POLICY
from ..base.specimen import SEED, Draw, Specimen
from ..fused.attention import HOOK
from ..fused.named_attention import NAME
from .aside import Raised
from .recorded_options import RecordedOptions
from .signatures import differences

OURS = frozenset((POLICY, HOOK))  # names that only we look for
UNTOLD = frozenset(("transformer_options", "_inside_attn_wrapper", "mask"))
_one_at_a_time = threading.Lock()  # a trial changes settings of the whole process
# Whether torch's products add in fp16: that is for stock's products and not for ours.
SUMS = "allow_fp16_accumulation"
# Whether ComfyUI pages VRAM by comfy-aimdo: then its operations have no weights until a file brings
# them, and a specimen has no file.
PAGES = "aimdo_enabled"
Call = tuple[Any, ...]
Way = Literal["plain", "named", "patched"]
WORDS: Mapping[Way, str] = {
    "plain": "",
    "named": ", where a layer names its attention",
    "patched": ", where other nodes patch it",
}


class Ran:
    """A call's traces: the tensors of its result, the calls of attention, the options that were
    looked up.

    policy  under which it is ours; None: stock's
    way     plain; or named, with layers that name an attention of their own (`named_attention.py`),
            which is not overridden; or patched, with the specimen's patches
    """

    def __init__(
        self, specimen: Specimen, module: Any, draw: Draw, policy: KernelPolicy | None, way: Way = "plain"
    ) -> None:
        self.attention: list[Call] = []
        self.asked: set[str] = set()
        self.written: set[str] = set()
        asked = self.asked, self.written
        patches = RecordedOptions(*asked)
        if way == "patched":
            patches |= {name: [patch] for name, patch in specimen.patches.items()}
        options = RecordedOptions(*asked, patches=patches)
        if policy is not None:
            options |= {POLICY: policy}
        if way != "named":
            options |= {HOOK: self._attend}
        draw.again()
        with _naming(module, self._attend_named) if way == "named" else contextlib.nullcontext():
            found = tree_leaves(specimen.call(module, draw, options))
        self.tensors = [t.float().clone() for t in found if isinstance(t, Tensor)]

    def _attend(self, _stock: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        shapes = tuple(tuple(arg.shape) if isinstance(arg, Tensor) else arg for arg in args[:4])
        told = {name: value for name, value in kwargs.items() if name not in UNTOLD}
        self.attention.append((shapes, kwargs.get("mask") is not None, told))
        # Never by the attention that ComfyUI was started with, such as one in few bits, because the
        # block is judged.
        out: Tensor = stock_attention.attention_pytorch(*args, **kwargs)
        return out

    def _attend_named(self, *args: Any, **kwargs: Any) -> Tensor:
        """An attention that a layer names. It may be given tensors in containers."""
        plain = [arg if isinstance(arg, Tensor) or not hasattr(arg, "take") else arg.take() for arg in args]
        return self._attend(stock_attention.attention_pytorch, *plain, **kwargs)


@contextlib.contextmanager
def _naming(module: nn.Module, function: Callable[..., Tensor]) -> Iterator[None]:
    """Make each layer that can name an attention name this one, within the block."""
    named = _that_name(module)
    for one in named:
        one.function = function
    try:
        yield
    finally:
        for one in named:
            one.function = None


def _that_name(module: nn.Module) -> list[Any]:
    """Stock's objects in layers that can name an attention."""
    return [one for name, one in module.named_modules() if name.rpartition(".")[2] == NAME]


def difference(specimen: Specimen, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why stock's code is not what ours stands for, in words that go on after a colon; None: it
    is."""
    try:
        changed = [why for ours, stock in specimen.replaces.items() for why in differences(ours, stock)]
        return ", ".join(changed) or _computed(specimen, device, dtype)
    except torch.OutOfMemoryError:
        comfy.model_management.soft_empty_cache()
    except Exception as error:  # any error, because a load goes on without us
        return Raised.of(error)
    try:
        return _computed(specimen, device, dtype)
    except Exception as error:
        return Raised.of(error)


def _computed(specimen: Specimen, device: torch.device, dtype: torch.dtype) -> str | None:
    with (
        _one_at_a_time,
        torch.no_grad(),
        torch.device("cpu"),
        torch.autocast(device.type, enabled=False),
        # for constructors that draw
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        _switched_off(torch.backends.cuda.matmul, SUMS),
        _without_cudnn_attention(),
        _in_silence(),
    ):
        draw = Draw(device, dtype, comfy.ops.manual_cast, torch.Generator().manual_seed(SEED))
        with _switched_off(comfy.memory_management, PAGES):
            module = specimen.build(draw).to(device).eval()
        draw.fill(module)
        ways = list(_ways(specimen, module))
        stocks = [Ran(specimen, module, draw, None, way) for way in ways]
        insists = device.type == "cuda" and obstacle(device) is None
        policy = KernelPolicy("on" if insists else "auto")
        if not specimen.fuse(module, policy):
            return "nothing of it is what it was"
        try:
            ours = [Ran(specimen, module, draw, policy, way) for way in ways]
        except KernelRefused:  # a kernel that this card lacks; its substitute is judged
            ours = [Ran(specimen, module, draw, KernelPolicy("auto"), way) for way in ways]
    for way, one, other in zip(ways, stocks, ours, strict=True):
        found = _distance(one, other, specimen.within) or _attended(one, other)
        if found is None and way != "patched":  # patches look for names of their own
            found = _looked_up(one, other)
        if found is not None:
            return found + WORDS[way]
    return None


def _ways(specimen: Specimen, module: nn.Module) -> Iterator[Way]:
    yield "plain"
    if _that_name(module):
        yield "named"
    if specimen.patches:
        yield "patched"


@contextlib.contextmanager
def _switched_off(owner: Any, name: str) -> Iterator[None]:
    """Keep a switch of the process off, if it is there."""
    before = getattr(owner, name, None)
    if before is not None:
        setattr(owner, name, False)
    try:
        yield
    finally:
        if before is not None:
            setattr(owner, name, before)


@contextlib.contextmanager
def _without_cudnn_attention() -> Iterator[None]:
    """Let torch's other kernels attend, as on Turing: cuDNN builds a program for each new shape,
    which takes one to two seconds, and a trial's shapes are no model's."""
    listed: list[Any] = getattr(comfy.ops, "SDPA_BACKEND_PRIORITY", None) or []
    cuda: Any = torch.backends.cuda
    before, enabled = list(listed), cuda.cudnn_sdp_enabled()
    listed[:] = [backend for backend in before if backend is not SDPBackend.CUDNN_ATTENTION] or before
    cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        listed[:] = before
        cuda.enable_cudnn_sdp(enabled)


@contextlib.contextmanager
def _in_silence() -> Iterator[None]:
    """Silence stock's log and progress bar in this thread, because the specimen is no model of the
    user's. Other threads keep theirs."""
    own, hook = threading.get_ident(), comfy.utils.PROGRESS_BAR_HOOK
    handlers = list(logging.root.handlers)

    def is_told(record: logging.LogRecord) -> bool:
        return record.thread != own or record.levelno > logging.INFO

    def others(*args: Any, **kwargs: Any) -> Any:
        return None if hook is None or threading.get_ident() == own else hook(*args, **kwargs)

    comfy.utils.set_progress_bar_global_hook(others)
    for handler in handlers:
        handler.addFilter(is_told)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_told)
        if comfy.utils.PROGRESS_BAR_HOOK is others:
            comfy.utils.set_progress_bar_global_hook(hook)


def _distance(stocks: Ran, ours: Ran, within: float) -> str | None:
    one, other = ([tuple(t.shape) for t in ran.tensors] for ran in (stocks, ours))
    if one != other:
        return f"it returns tensors of {one}, where {other} were returned"
    for theirs, own in zip(stocks.tensors, ours.tensors, strict=True):
        distance = float((own - theirs).norm() / theirs.norm().clamp_min(1e-9))
        if not distance <= within:  # also true for NaN
            return f"its result differs by {distance:.1%}"
    return None


def _attended(stocks: Ran, ours: Ran) -> str | None:
    """The first difference in attention, in any order: each of stock's calls needs one of ours with
    the same arguments."""
    if len(stocks.attention) != len(ours.attention):
        return f"it attends {len(stocks.attention)} times, where it attended {len(ours.attention)} times"
    left = list(ours.attention)
    for theirs in stocks.attention:
        alike = [own for own in left if own[:2] == theirs[:2]]
        if not alike:
            return f"it gives attention {theirs[0]}, which it did not"
        same = next((own for own in alike if not _untold(theirs[2], own[2])), None)
        if same is None:
            return f"it tells attention {_untold(theirs[2], alike[0][2])}"
        left.remove(same)
    return None


def _untold(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    missing = object()
    other = (
        name for name, value in theirs.items() if value is not None and not _is_same(own.get(name, missing), value)
    )
    return ", ".join(f"{name}={theirs[name]!r}" for name in other)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other or (type(one) is type(other) and not isinstance(one, Tensor) and bool(one == other))


def _looked_up(stocks: Ran, ours: Ran) -> str | None:
    unknown = sorted(stocks.asked - stocks.written - ours.asked - OURS)
    return f"it looks for {', '.join(unknown)} in the options of a call" if unknown else None
