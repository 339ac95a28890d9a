"""The Flux blocks that are ours: stock's modules, with a forward that computes the whole block
through our ops.

Changes by other nodes count: attention goes through stock's function and so through any override,
patches on it are called with the tensors that they expect, and masks, references and modulation by
segments of tokens are computed. A block is stock's if another node has replaced a part of it, if it
is of another kind (Ovis-Image's feed-forward), or if it does not compute in fp16. The ledger has
the reason. Blocks that a node replaces as a whole (`patches_replace`), and ControlNet's residuals
between blocks, are handled by stock's network, which calls our blocks as it would call its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import comfy.ldm.flux.layers as stock
from torch import Tensor, nn

from ....kernels_cuda import STANDARD, KernelPolicy
from ...fused.block import FusedBlock, HandBack, fuse_block
from ...weights import saturation
from . import double, single
from .modulation import Segments, unserved

HAND_BACK = HandBack("flux block")
Options = dict[str, Any]


def fuse(net: nn.Module, _policy: KernelPolicy = STANDARD) -> int:
    """Let the blocks of stock's Flux and Chroma compute through our ops, under the policy that
    comes with each call. In place, and before they are streamed. Returns the number of blocks."""
    fused: list[nn.Module] = []
    for module in list(net.modules()):
        kind: Any = type(module)
        if kind is stock.DoubleStreamBlock:
            fuse_block(module, _FusedDouble, _obstacle((module.img_attn, module.txt_attn), double.obstacle(module)))
        elif kind is stock.SingleStreamBlock:
            fuse_block(module, _FusedSingle, _obstacle((module,), single.obstacle(module)))
        else:
            continue
        fused.append(module)
    saturation.watch(fused)
    return len(fused)


def _obstacle(attentions: Iterable[Any], other: str | None) -> str | None:
    """Why a block can never be ours, in words a user understands. other: the obstacle of its
    feed-forward."""
    if any(type(attention.norm) is not stock.QKNorm for attention in attentions):
        return "its attention is of a kind without fused kernels"
    return other


class _FusedDouble(FusedBlock):
    """Mixed into a double block's class, with stock's signature."""

    fusestream_hand_back = HAND_BACK

    def fusestream_in_parts(self) -> Sequence[Sequence[nn.Module]]:
        return double.parts(self)

    def forward(
        self,
        img: Tensor,
        txt: Tensor,
        vec: Any,
        pe: Tensor,
        attn_mask: Tensor | None = None,
        modulation_dims_img: Segments | None = None,
        modulation_dims_txt: Segments | None = None,
        transformer_options: Options | None = None,
    ) -> tuple[Tensor, Tensor]:
        options = {} if transformer_options is None else transformer_options
        policy = self.policy_for(img, options)
        if policy is not None:
            of_img, of_txt = double.modulation(self, vec)
            parts = ((img, of_img, modulation_dims_img), (txt, of_txt, modulation_dims_txt))
            reason = next((why for x, mods, dims in parts if (why := unserved(x, mods, dims)) is not None), None)
            if reason is None:
                picture = double.Stream(img, *of_img, modulation_dims_img)
                text = double.Stream(txt, *of_txt, modulation_dims_txt)
                found = double.block(self, policy, picture, text, pe, attn_mask, options)
                saturation.look(self, found[0])
                return found
            self.fusestream_hand_back(reason, img, forced=policy.default == "on")
        out: tuple[Tensor, Tensor] = super().forward(  # type: ignore[misc]
            img, txt, vec, pe, attn_mask, modulation_dims_img, modulation_dims_txt, transformer_options=options
        )
        return out


class _FusedSingle(FusedBlock):
    """The same for a block of the joint stream."""

    fusestream_hand_back = HAND_BACK

    def fusestream_in_parts(self) -> Sequence[Sequence[nn.Module]]:
        return single.parts(self)

    def forward(
        self,
        x: Tensor,
        vec: Any,
        pe: Tensor,
        attn_mask: Tensor | None = None,
        modulation_dims: Segments | None = None,
        transformer_options: Options | None = None,
    ) -> Tensor:
        options = {} if transformer_options is None else transformer_options
        policy = self.policy_for(x, options)
        if policy is not None:
            mod = single.modulation(self, vec)
            reason = unserved(x, (mod,), modulation_dims)
            if reason is None:
                out = single.block(self, policy, x, mod, modulation_dims, pe, attn_mask, options)
                return saturation.look(self, out)
            self.fusestream_hand_back(reason, x, forced=policy.default == "on")
        stocks: Tensor = super().forward(x, vec, pe, attn_mask, modulation_dims, transformer_options=options)  # type: ignore[misc]
        return stocks
