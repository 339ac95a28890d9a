"""What vision towers share around their blocks: whose a call is, a picture cut into patches on the
card, the product that takes patches in, and the merger of four neighbours that gives them to the
language model.

Stock cuts a picture on the CPU, which takes a tenth of a second for 768x768. Its convolution of
patches is a product of rows, because kernel and stride are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from comfy.text_encoders.qwen_vl import process_qwen2vl_images
from torch import Tensor, nn

from ...base.policy import all_off
from ...base.subclassing import mix
from ...weights.fp32_residual import Wide
from ...weights.operands import operands
from ..common import HAND_BACK
from ..encoder.block import PATCHES
from ..encoder.described import GELU, obstacle

CHUNK = PATCHES

Grid = Sequence[tuple[int, int, int]]  # of each picture: frames, rows and columns of patches


def is_ours(tower: Any, x: Tensor, ops: Sequence[str], others: Sequence[Any]) -> bool:
    """Whether our ops compute a fused tower's call. If not, the ledger says why.

    x       [patches, values], what the tower is given
    others  modules around its blocks whose weights we take, too
    """
    policy = tower.fusestream_policy
    if all_off(policy, ops):
        return False
    reason = obstacle(tower.blocks, x[None], policy, on_cpu=tower.fusestream_on_cpu, others=others)
    if reason is not None:
        HAND_BACK(reason, x, forced=policy.default == "on", quietly=not x.is_cuda)
    return reason is None


def cut_on_the_device(model: nn.Module, kind: Any, tower: Any, mixin: Any) -> None:
    """Mix this into all networks of a class of stock's that have a tower fused so, and cut pictures
    as that class does."""
    for network in model.modules():
        is_cut = isinstance(network, kind) and is_stocks(network, kind, "preprocess_embed")
        if is_cut and isinstance(network.visual, tower):
            mix(network, mixin)


def picture_of(embed: Mapping[str, Any], tower: Any, ops: Sequence[str]) -> Tensor | None:
    """The picture [1, height, width, 3] that is cut on the device; None: the input is none, or the
    tower is stock's."""
    picture = embed.get("data")
    is_picture = embed.get("type") == "image" and isinstance(picture, Tensor)
    return picture if is_picture and not all_off(tower.fusestream_policy, ops) else None


def cut(picture: Tensor, device: torch.device, **settings: Any) -> tuple[Tensor, Tensor]:
    """Stock's patches [n, values] fp32 of a picture, on the device, and their grid [1, 3] on the
    host, which so does not wait to know how many there are."""
    patches, grid = process_qwen2vl_images(picture.to(device), **settings)
    return patches.to(device, torch.float32), grid.cpu()


def is_stocks(network: Any, kind: Any, method: str) -> bool:
    """Whether a network has this method of a class of stock's. Subclasses of stock's cut pictures
    in ways of their own (JoyImage, MiniMax)."""
    found = next(vars(one)[method] for one in type(network).__mro__ if method in vars(one))
    return found is vars(kind)[method]


def embedded(convolution: Any, wide: Wide, x: Tensor) -> Tensor:
    """The convolution of patches as a product of rows: x [n, values] fp32 -> [n, width] fp32."""
    with operands(x.new_empty(0, dtype=torch.float16), wide.ops, convolution) as [own]:
        weight = own.matrix.flatten(1)
        chunks = torch.split(x, CHUNK)
        return torch.cat([summed(wide, wide.rounded(rows), weight, own.bias) for rows in chunks])


def merged(x: Tensor, normed: Callable[[Tensor], Tensor], inner: Any, outer: Any, wide: Wide) -> Tensor:
    """outer(GELU(inner(normed(x)))) of four neighbours together, for stock's Linears.

    x       [patches, width] fp32, with four neighbours adjacent
    normed  gives the input of a product, for [1, patches, width]
    Returns [patches / 4, the language model's width] fp32.
    """
    found = []
    for rows in torch.split(x, max(CHUNK // 4, 1) * 4):
        h = normed(rows[None])
        h = h.view(*h.shape[:-2], -1, inner.in_features)
        hidden = wide.hidden(h, (inner,), GELU)
        with operands(hidden[0], wide.ops, outer) as [own]:
            parts = torch.stack(list(hidden)) if wide.splits else hidden[0]
            found.append(summed(wide, parts, own.matrix, own.bias)[0])
    return torch.cat(found)


def summed(wide: Wide, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product of an input in one or two parts, as fp32."""
    out = wide.product(h, weight, bias)
    return out[0] + out[1] if wide.splits else out.float()
