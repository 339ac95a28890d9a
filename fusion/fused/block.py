"""Who computes a block: our ops, or stock's own forward.

Three questions, each answered in one place. Under which policy? `base/policy.py`. Is the call ours? That
depends on the input's type, on how the file's weights are stored, and on what other nodes have done
to the block since it was fused (`Parts`). And if it is not ours? Stock computes, the reason goes to
the ledger once, and under the policy `on` it is an error (`HandBack`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import contains, is_, itemgetter, methodcaller
from typing import Any

import comfy.model_management
import torch
from comfy.cli_args import args
from torch import Tensor, nn

from ...kernels_cuda import LEDGER, KernelPolicy, KernelRefused
from ...kernels_cuda.ops.views.checks import word
from ..base.hooks import BLOCK_PARTS, STREAMED
from ..base.policy import policy_of
from ..base.subclassing import mix
from ..stream.text_kv import OfText
from ..weights import saturation
from ..weights.storage import INTEGER_LAYOUTS
from .named_attention import another_is_preferred

# The types of a stream that blocks take whose products alone are fp16. Flags that make ComfyUI compute
# in fp32 are obeyed.
AROUND_FP32 = (torch.float16,) if args.force_fp32 or args.fp32_unet else (torch.float16, torch.float32)
VALUES: Any = methodcaller("values")
# What a convolution's module says of how it convolves. Nodes for seamless pictures write to the first.
CONVOLVES: Any = itemgetter("padding_mode", "padding", "stride", "dilation")
# Methods that compute, which nodes write into whole classes: AnimateDiff into torch's GroupNorm, for as
# long as it samples.
COMPUTES = ("forward", "forward_comfy_cast_weights")
OURS = __name__.removesuffix("fused.block")  # how the names of our own modules begin

# ---------------------------------------------------------------------------------------------------------- handing back


class HandBack:
    """Reports why stock computes instead. The ledger is told once, because this may be a hot path.
    The default words are for blocks of a diffusion model.

    what        in the ledger: "wan block"
    by          the candidate that did not serve
    of, cannot  in an error: "this model", "compute its blocks"
    instead     who computes
    """

    def __init__(
        self,
        what: str,
        by: str = "fused ops",
        of: str = "this model",
        cannot: str = "compute its blocks",
        instead: str = "stock's block",
    ) -> None:
        self._what, self._by, self._of, self._cannot, self._instead = what, by, of, cannot, instead

    def __call__(self, reason: str, x: Tensor, *, forced: bool, quietly: bool = False) -> None:
        """forced: whether the policy insists. quietly: report nothing, because there was no choice,
        as on the CPU."""
        if forced:
            raise KernelRefused(
                f"kernels is 'on' for {self._of}, and FuseStream cannot {self._cannot}: {reason}. Choose 'auto'."
            )
        if not quietly and not LEDGER.knows(self._what, self._by, reason):
            LEDGER.refused(self._what, self._by, reason, f"{x.dtype}{list(x.shape)}", self._instead)


# ---------------------------------------------------------------------------------------------------------------- blocks


def wrong_type(x: Tensor, types: Container[torch.dtype] = (torch.float16,)) -> str | None:
    """Why our kernels do not compute in x's type, in words a user understands. types: those that a
    block takes."""
    if x.dtype in types:
        return None
    return f"the model computes in {word(x)}, the kernels in float16"


def unserved(x: Tensor, types: Container[torch.dtype] = (torch.float16,)) -> str | None:
    """Why no fused block serves an input like x, in words a user understands. types: those that it
    takes."""
    if (reason := wrong_type(x, types)) is not None:
        return reason
    if torch.is_grad_enabled() and x.requires_grad:
        return "gradients are wanted"
    return None


def is_overridden(own: Mapping[str, Any], *hooks: Mapping[int, Any]) -> bool:
    """Whether another node computes something at or around a module. own: its __dict__. hooks: both kinds
    of its hooks."""
    return "forward" in own or "_conv_forward" in own or any(hooks)


class Code:
    """The methods that compute in the classes of some modules, at the time when these were fused."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        kinds = {one for module in modules for one in type(module).__mro__ if not one.__module__.startswith(OURS)}
        methods = [(one, name) for one in kinds for name in COMPUTES if name in vars(one)]
        self._classes, self._names = [one for one, _ in methods], [name for _, name in methods]
        self._methods = [*map(getattr, self._classes, self._names)]

    def is_as_it_was(self) -> bool:
        return all(map(is_, map(getattr, self._classes, self._names), self._methods))

    def written(self) -> str | None:
        """What another node has written into a class, in words a user understands; None: nothing."""
        for kind, name, method in zip(self._classes, self._names, self._methods, strict=True):
            if getattr(kind, name) is not method:
                return f"another node has replaced {kind.__name__}.{name} of all models"
        return None


class Parts:
    """A block's modules at the time when it was fused, compared at each call of the block. It
    refers to what is inside of the block, never to the block, because the cycle would keep both
    alive."""

    def __init__(self, block: nn.Module, obstacle: str | None = None, apart: Sequence[str] = ()) -> None:
        """obstacle: the family's permanent reason against it. apart: lists whose members are
        checked by themselves."""
        inner = tuple(f"{name}." for name in apart)
        named = [
            (name, part) for name, part in block.named_modules() if part is not block and not name.startswith(inner)
        ]
        self._for_good = obstacle or next((why for _, part in named if (why := _as_stored(part)) is not None), None)
        self._calls = [(name, part.__dict__, part._forward_hooks, part._forward_pre_hooks) for name, part in named]
        groups = [("", block), *((name, part) for name, part in named if part._modules)]
        self._holding = [(name, part._modules) for name, part in groups]
        # The same as flat lists, which C code walks through, because a whole network has thousands.
        self._owns = [own for _, own, _, _ in self._calls]
        self._convolving = [part.__dict__ for _, part in named if hasattr(part, "_conv_forward")]
        self._as_fused = [*map(CONVOLVES, self._convolving)]
        self._itself = CONVOLVES(block.__dict__) if hasattr(block, "_conv_forward") else None
        self._code = Code(part for _, part in named)
        self._own_code = Code([block])
        self._hooks = [hooks for _, _, *both in self._calls for hooks in both]
        self._held = [modules for _, modules in self._holding]
        self._look_inside()
        self._weights = [part for _, part in named if "weight" in part._parameters]

    def _look_inside(self) -> None:
        self._groups = [(name, modules, tuple(modules.values())) for name, modules in self._holding]
        self._inner, self._sizes = [*chain.from_iterable(map(VALUES, self._held))], [*map(len, self._held)]

    def leave_to_stock(self, reason: str) -> None:
        """Leave the block to stock permanently."""
        self._for_good = self._for_good or reason

    @property
    def is_stocks(self) -> bool:
        """Whether stock must compute the block for any input."""
        return self._for_good is not None

    def obstacle(self, block: nn.Module, x: Tensor) -> str | None:
        """Why stock must compute this block for x, in words a user understands; None if it is
        ours."""
        if self._for_good is not None:
            return self._for_good
        if self._itself is not None and ("_conv_forward" in (own := block.__dict__) or CONVOLVES(own) != self._itself):
            return "another node has replaced how it convolves"
        replaced = self.replaced() or self._own_code.written()
        if replaced is not None:
            return replaced
        return None if STREAMED in block.__dict__ else self._elsewhere(x.device)

    def replaced(self) -> str | None:
        """Which part another node has replaced, in words a user understands; None: no part."""
        is_as_it_was = (
            not any(self._hooks)
            and not any(map(contains, self._owns, repeat("forward")))
            and not any(map(contains, self._convolving, repeat("_conv_forward")))
            and [*map(CONVOLVES, self._convolving)] == self._as_fused
            and self._code.is_as_it_was()
            and [*map(len, self._held)] == self._sizes
            and all(map(is_, chain.from_iterable(map(VALUES, self._held)), self._inner))
        )
        return None if is_as_it_was else self._name_of_replaced()

    def _name_of_replaced(self) -> str | None:
        was = {id(own): geometry for own, geometry in zip(self._convolving, self._as_fused, strict=True)}
        for name, own, hooks, hooks_before in self._calls:
            if is_overridden(own, hooks, hooks_before):
                return f"another node has replaced {name}"
            if id(own) in was and CONVOLVES(own) != was[id(own)]:
                return f"another node has replaced {name}"
        if (written := self._code.written()) is not None:
            return written
        for name, modules, before in self._groups:
            if not another_is_preferred(modules, before):
                changed = next((part for part, module in modules.items() if module not in before), "a part")
                return f"another node has replaced {changed}{f' of {name}' if name else ''}"
        self._look_inside()  # a LoRA's attention for a layer, which is asked for at each call
        return None

    def _elsewhere(self, device: torch.device) -> str | None:
        """Why weights are not on the device, in words a user understands; None: they are. This asks
        each weight, which takes a while; streamed blocks do not need it."""
        for part in self._weights:
            weight = part._parameters["weight"]
            if weight is not None and weight.device != device:
                return f"the weights are on the {weight.device.type.upper()}: set a vram_budget, so that they stream"
        return None


def multiplied_by_stock(part: Any) -> bool:
    """Whether stock multiplies an operation's quantised weight as stored, with instructions of this
    card that our ops lack: fp8 from RTX 40 on. Files of integers are ours."""
    return getattr(part, "layout_type", None) not in (None, *INTEGER_LAYOUTS) and not part._full_precision_mm


def _as_stored(part: Any) -> str | None:
    """The reason why our kernels cannot take a weight as stored; None: they can."""
    if multiplied_by_stock(part):
        return "this card multiplies the file's quantised weights as they are"
    if getattr(part, "pre_quant_scale", None) is not None:
        return "the file scales activations before its quantised weights"
    return None


class FusedBlock:
    """Mixed into a block's class, by a family's subclass."""

    fusestream_hand_back: HandBack
    # The types of its input; fp32 for a block whose products alone are fp16.
    fusestream_types: Container[torch.dtype] = (torch.float16,)

    def fusestream_in_parts(self) -> Sequence[Sequence[nn.Module]]:
        """Groups of the block's modules that are used one after another, each through calls of its
        modules, so that it can be paged by itself (`stream/segments.py`). Code that computes
        without these calls uses `block_hooks.within`. Empty: the block stays whole."""
        return ()

    def fusestream_of_text(self) -> OfText | None:
        """The part of the block that only texts pass through, if there is one and the block asks
        `block_hooks.of_text` for its results."""
        return None

    def policy_for(self, x: Tensor, options: Mapping[str, Any]) -> KernelPolicy | None:
        """The policy under which this block is ours to compute for x, by its transformer_options;
        None: it is stock's. Raises stock's exception if the user has interrupted."""
        policy = policy_of(options)
        if policy is None or policy.is_off:
            return None
        module: Any = self
        reason = unserved(x, self.fusestream_types) or module.__dict__[BLOCK_PARTS].obstacle(module, x)
        if reason is None:
            # Stock's operations ask this; ours do not.
            comfy.model_management.throw_exception_if_processing_interrupted()
            return policy
        self.fusestream_hand_back(reason, x, forced=policy.default == "on")
        return None


def fuse_block(
    block: nn.Module, mixin: type[FusedBlock], obstacle: str | None = None, apart: Sequence[str] = ()
) -> None:
    """Let a block compute through our ops, in place, under the policy that comes with each call.
    obstacle: a permanent reason against it, reported at the calls that it affects. apart: as in
    `Parts`."""
    mix(block, mixin, **{BLOCK_PARTS: Parts(block, obstacle, apart)})


def fuse_blocks(
    net: nn.Module, kind: type[nn.Module], mixin: type[FusedBlock], obstacle: Callable[[Any], str | None]
) -> int:
    """The same for each block of a network that is of this class of stock's, before they are streamed.
    Counts what saturates behind the last. Returns their number."""
    blocks = [module for module in net.modules() if type(module) is kind]
    for module in blocks:
        fuse_block(module, mixin, obstacle(module))
    saturation.watch(blocks)
    return len(blocks)
