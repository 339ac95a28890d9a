"""Who computes a block: our ops, or stock's own forward.

Three questions, each answered in one place. Under which policy: a MODEL's travels in the `transformer_options`, of which every
clone has its own; a text encoder's or a VAE's stands on the network, where a clone puts another one as an object patch (`POLICY`
in both). Whether a call is ours: the input's type, what the file's weights are, and what other nodes have done to the block
since it was fused (`Parts`). And what happens where it is not: stock computes, the reason goes to the ledger once, and where the
policy says `on` it is an error (`HandBack`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import contains, is_, methodcaller
from typing import Any

import comfy.model_management
import torch
from torch import Tensor, nn

from ...kernels_cuda import LEDGER, KernelPolicy, KernelRefused
from ...kernels_cuda.ops.views.checks import word
from ..base.hooks import BLOCK_PARTS, POLICY, STREAMED
from ..base.subclassing import mix
from ..stream.text_kv import OfText
from ..weights.storage import INT8_LAYOUT
from .named_attention import another_is_preferred

VALUES: Any = methodcaller("values")

# -------------------------------------------------------------------------------------------------------------- policies


def policy_of(options: Mapping[str, Any]) -> KernelPolicy | None:
    """The policy under which a model was called with these transformer_options; None: none of ours."""
    found: KernelPolicy | None = options.get(POLICY)
    return found


def policy_of_model(model: Any) -> KernelPolicy | None:
    """The policy under which a stock MODEL will be called; None: none of ours."""
    return policy_of(model.model_options.get("transformer_options", {}))


def all_off(policy: KernelPolicy, ops: Iterable[str] | None = None) -> bool:
    """Whether all of these ops are off; None: every op there is, by the default and without an exception."""
    return policy.is_off if ops is None else all(policy.mode(op) == "off" for op in ops)


# ---------------------------------------------------------------------------------------------------------- handing back


class HandBack:
    """Stock computes instead, and why. The ledger is told once: this may be a hot path. By default in the words for a diffusion
    model's blocks.

    what        in the ledger: "wan block"
    by          which of its candidates did not serve
    of, cannot  in an error: "this model", "compute its blocks"
    instead     who computes then
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
        """forced: whether the policy insists. quietly: there was nothing to choose, as on the CPU, and nothing to report."""
        if forced:
            raise KernelRefused(
                f"kernels is 'on' for {self._of}, and FuseStream cannot {self._cannot}: {reason}. Choose 'auto'."
            )
        if not quietly and not LEDGER.knows(self._what, self._by, reason):
            LEDGER.refused(self._what, self._by, reason, f"{x.dtype}{list(x.shape)}", self._instead)


# ---------------------------------------------------------------------------------------------------------------- blocks


def wrong_type(x: Tensor, types: Container[torch.dtype] = (torch.float16,)) -> str | None:
    """Why our kernels do not compute in x's type, in words a user understands. types: of what a block takes."""
    if x.dtype in types:
        return None
    return f"the model computes in {word(x)}, the kernels in float16"


def unserved(x: Tensor, types: Container[torch.dtype] = (torch.float16,)) -> str | None:
    """Why no fused block serves an input like x, in words a user understands. types: of what it takes."""
    if (reason := wrong_type(x, types)) is not None:
        return reason
    if torch.is_grad_enabled() and x.requires_grad:
        return "gradients are wanted"
    return None


class Parts:
    """A block's modules as they were when it was fused. Looked at whenever the block is called, so it knows where to look. It holds
    what is inside of the block, never the block, which would keep both alive."""

    def __init__(self, block: nn.Module, obstacle: str | None = None, apart: Sequence[str] = ()) -> None:
        """obstacle: what a family has against it for good. apart: lists whose members are asked for themselves."""
        inner = tuple(f"{name}." for name in apart)
        named = [
            (name, part) for name, part in block.named_modules() if part is not block and not name.startswith(inner)
        ]
        self._for_good = obstacle or next((why for _, part in named if (why := _as_stored(part)) is not None), None)
        self._calls = [(name, part.__dict__, part._forward_hooks, part._forward_pre_hooks) for name, part in named]
        groups = [("", block), *((name, part) for name, part in named if part._modules)]
        self._holding = [(name, part._modules) for name, part in groups]
        # The same in rows, which Python walks along without a step of ours for each: of a whole network they are thousands.
        self._owns = [own for _, own, _, _ in self._calls]
        self._convolving = [part.__dict__ for _, part in named if hasattr(part, "_conv_forward")]
        self._hooks = [hooks for _, _, *both in self._calls for hooks in both]
        self._held = [modules for _, modules in self._holding]
        self._look_inside()
        self._weights = [part for _, part in named if "weight" in part._parameters]

    def _look_inside(self) -> None:
        self._groups = [(name, modules, tuple(modules.values())) for name, modules in self._holding]
        self._inner, self._sizes = [*chain.from_iterable(map(VALUES, self._held))], [*map(len, self._held)]

    def leave_to_stock(self, reason: str) -> None:
        """From now on and for good."""
        self._for_good = self._for_good or reason

    @property
    def is_stocks(self) -> bool:
        """Whether stock must compute the block, whatever it is given."""
        return self._for_good is not None

    def obstacle(self, block: nn.Module, x: Tensor) -> str | None:
        """Why stock must compute this block for x, in words a user understands; None if it is ours."""
        if self._for_good is not None:
            return self._for_good
        if "_conv_forward" in block.__dict__:
            return "another node has replaced how it convolves"
        replaced = self.replaced()
        if replaced is not None:
            return replaced
        return None if STREAMED in block.__dict__ else self._elsewhere(x.device)

    def replaced(self) -> str | None:
        """What another node has put in the place of a part, in words a user understands; None: nothing."""
        is_as_it_was = (
            not any(self._hooks)
            and not any(map(contains, self._owns, repeat("forward")))
            and not any(map(contains, self._convolving, repeat("_conv_forward")))
            and [*map(len, self._held)] == self._sizes
            and all(map(is_, chain.from_iterable(map(VALUES, self._held)), self._inner))
        )
        return None if is_as_it_was else self._name_of_replaced()

    def _name_of_replaced(self) -> str | None:
        for name, own, hooks, hooks_before in self._calls:
            if "forward" in own or "_conv_forward" in own or hooks or hooks_before:
                return f"another node has replaced {name}"
        for name, modules, before in self._groups:
            if not another_is_preferred(modules, before):
                changed = next((part for part, module in modules.items() if module not in before), "a part")
                return f"another node has replaced {changed}{f' of {name}' if name else ''}"
        self._look_inside()  # a LoRA's other attention: whoever computes asks for that at each call
        return None

    def _elsewhere(self, device: torch.device) -> str | None:
        """What stream is brought when it is wanted. Of the rest each weight is asked, which takes a while."""
        for part in self._weights:
            weight = part._parameters["weight"]
            if weight is not None and weight.device != device:
                return f"the weights are on the {weight.device.type.upper()}: set a vram_budget, so that they stream"
        return None


def multiplied_by_stock(part: Any) -> bool:
    """Whether stock multiplies an operation's quantised weight as it is, with instructions of this card that no op of ours has:
    fp8 from RTX 40 on. INT8 files are ours."""
    return getattr(part, "layout_type", None) not in (None, INT8_LAYOUT) and not part._full_precision_mm


def _as_stored(part: Any) -> str | None:
    """What no kernel of ours knows about a weight."""
    if multiplied_by_stock(part):
        return "this card multiplies the file's quantised weights as they are"
    if getattr(part, "pre_quant_scale", None) is not None:
        return "the file scales activations before its quantised weights"
    return None


class FusedBlock:
    """What a block's class is mixed with, by way of a family's subclass."""

    fusestream_hand_back: HandBack
    fusestream_types: Container[torch.dtype] = (
        torch.float16,
    )  # of its input: fp32 of one whose products alone are fp16

    def fusestream_in_parts(self) -> Sequence[Sequence[nn.Module]]:
        """What of the block is used together, one after another, by the modules that are called for it: so it may be paged
        (`stream/segments.py`). Whoever computes the block past their calls uses `block_hooks.within`. Nothing: it stays whole."""
        return ()

    def fusestream_of_text(self) -> OfText | None:
        """What of the block sees texts alone, if anything does and it asks `block_hooks.of_text` for what it makes of them."""
        return None

    def policy_for(self, x: Tensor, options: Mapping[str, Any]) -> KernelPolicy | None:
        """The policy under which this block is ours to compute for x, by its transformer_options; None: it is stock's. Raises
        stock's exception where the user has interrupted."""
        policy = policy_of(options)
        if policy is None or policy.is_off:
            return None
        module: Any = self
        reason = unserved(x, self.fusestream_types) or module.__dict__[BLOCK_PARTS].obstacle(module, x)
        if reason is None:
            comfy.model_management.throw_exception_if_processing_interrupted()  # stock's operations ask; ours do not
            return policy
        self.fusestream_hand_back(reason, x, forced=policy.default == "on")
        return None


def fuse_block(
    block: nn.Module, mixin: type[FusedBlock], obstacle: str | None = None, apart: Sequence[str] = ()
) -> None:
    """Let a block compute through our ops, under the policy that comes with each call. In place. obstacle: why it cannot, for
    good, so that the reason is told where it would have. apart: as `Parts` has it."""
    mix(block, mixin, **{BLOCK_PARTS: Parts(block, obstacle, apart)})
