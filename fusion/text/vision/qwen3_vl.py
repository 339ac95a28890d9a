"""Qwen3-VL's vision tower over our kernels: stock's modules, computing in FP16 around an FP32 stream.

    patches ─ product, + places ─ blocks ─ merger, of 2 x 2 neighbours

Stock computes it in FP32 and widens every weight at every use. Here products are FP16 with FP32
sums, in the blocks of `text/encoder/block.py`. The patches of a picture or frame see each other
only. Heads of 72, as in the 8B, are padded. After some blocks a merger gives the language model
what was seen so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from comfy.text_encoders import qwen3vl as stock
from torch import Tensor, nn

from ....kernels_cuda import KernelPolicy
from ...base.policy import all_off, standing
from ...base.subclassing import mix
from ...weights.fp32_residual import Wide
from ..encoder.block import Call, compute
from ..encoder.described import described
from . import patches
from .patches import Grid, cut, cut_on_the_device, embedded, is_ours, merged, picture_of

OPS = ("norm_modulate", "linear", "linear_", "join_sums", "attention", "rms_rope_")
# Stock's settings for cutting a picture into patches.
STOCKS = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def fuse(model: nn.Module, policy: KernelPolicy, *, on_cpu: bool) -> int:
    """Let the towers of all Qwen3-VLs in a stock text encoder model compute through our ops, in
    place. Returns how many blocks."""
    fused = 0
    for tower in () if all_off(policy, OPS) else towers(model):
        mix(tower, FusedTower, **standing(policy), fusestream_on_cpu=on_cpu)
        for block in tower.blocks:
            mix(block, FusedBlock)
            fused += 1
        for merger in (tower.merger, *tower.deepstack_merger_list):
            mix(merger, FusedMerger)
    cut_on_the_device(model, stock.Qwen3VL, FusedTower, CutsOnTheDevice)
    return fused


def towers(model: nn.Module) -> Iterator[Any]:
    """The Qwen3-VL vision towers in a model."""
    return (module for module in model.modules() if isinstance(module, stock.Qwen3VLVisionModel))


# ------------------------------------------------------------------------------------------------------------ the tower


class CutsOnTheDevice:
    """Mixed into the class of a network with a fused tower: pictures are copied to the device first,
    and cut into patches there."""

    visual: Any

    def preprocess_embed(self, embed: Any, device: torch.device) -> Any:
        """Stock's function, for a picture [1, height, width, 3] or another embedded input."""
        picture = picture_of(embed, self.visual, OPS)
        if picture is None:
            return super().preprocess_embed(embed, device)  # type: ignore[misc]
        x, grid = cut(picture, device, **STOCKS)
        seen, early = self.visual(x, grid)
        return seen, {"grid": grid, "deepstack": early}


class FusedTower:
    """Mixed into the class of a fused tower. fusestream_on_cpu: also computes on the CPU, over the
    references."""

    fusestream_policy: KernelPolicy
    fusestream_on_cpu: bool

    def forward(self, x: Tensor, grid_thw: Tensor) -> Any:
        """Stock's Qwen3VLVisionModel, for patches [n, 3 * 2 * 16 * 16] fp32, with the four that
        will be merged adjacent, and the grid [pictures, 3] of frames, rows and columns. Returns [n
        / 4, width] fp32, and the same from each merger in between."""
        tower: Any = self
        if is_ours(tower, x, OPS, (tower.patch_embed, tower.merger, *tower.deepstack_merger_list)):
            return seen(tower, Wide(self.fusestream_policy), x, grid_thw)
        return super().forward(x, grid_thw)  # type: ignore[misc]


def seen(tower: Any, wide: Wide, x: Tensor, grid_thw: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Stock's forward over our ops."""
    grid: Grid = [(t, h, w) for t, h, w in grid_thw.tolist()]
    x = embedded(tower.patch_embed.proj, wide, x)
    x += places(tower, grid, x.device)
    angle = tower.rot_pos_emb(torch.tensor(grid)).to(x.device, torch.float32).reshape(x.shape[0], -1)
    frames = tuple(h * w for t, h, w in grid for _ in range(t))
    call = Call(wide, cos=angle.cos(), sin=angle.sin(), groups=frames, rows=patches.CHUNK)
    early: list[Tensor] = []
    x = x[None]
    for i, block in enumerate(tower.blocks):
        x = block(x, call)
        if i in tower.deepstack_visual_indexes:
            early.append(tower.deepstack_merger_list[tower.deepstack_visual_indexes.index(i)](x[0], wide))
    return tower.merger(x[0], wide), early


def places(tower: Any, grid: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """The learnt places of a square, interpolated over each picture: [patches, width]. Computed in
    the table's type and in stock's order, but without its lists of numbers."""
    side, merge, found = tower.num_grid_per_side, tower.spatial_merge_size, []
    table = tower.pos_embed
    own = table.weight.dtype
    for frames, height, width in grid:
        down, across = (torch.linspace(0, side - 1, n) for n in (height, width))
        above, before = down.int(), across.int()
        below, behind = ((at + 1).clip(max=side - 1) for at in (above, before))
        dh, dw = down - above, across - before
        corners = torch.stack(
            [(row[:, None] * side + column[None]).flatten() for row in (above, below) for column in (before, behind)]
        )
        shares = torch.stack([(a[:, None] * b[None]).flatten() for a in (1 - dh, dh) for b in (1 - dw, dw)])
        parts = table(corners.long().to(device)).to(device) * shares.to(device, own)[..., None]
        one = (parts[0] + parts[1] + parts[2] + parts[3]).view(height // merge, merge, width // merge, merge, -1)
        found.append(one.transpose(1, 2).flatten(0, 3).repeat(frames, 1))
    return torch.cat(found)


# ------------------------------------------------------------------------------------------------------------ its parts


class FusedBlock:
    """Mixed into the class of a fused block."""

    def forward(
        self, x: Tensor, cu_seqlens: Any = None, position_embeddings: Any = None, optimized_attention: Any = None
    ) -> Any:
        """Stock's Qwen35VisionBlock. If the tower is ours, `cu_seqlens` is its `Call`, and x [1,
        patches, width] its own fp32 stream, which is added to in place; otherwise it is a call of
        stock's."""
        if not isinstance(cu_seqlens, Call):
            return super().forward(x, cu_seqlens, position_embeddings, optimized_attention)  # type: ignore[misc]
        return compute(described(self), x, cu_seqlens)


class FusedMerger:
    """Mixed into the class of a fused merger."""

    def forward(self, x: Tensor, wide: Wide | None = None) -> Tensor:
        """Stock's merger, for x [patches, width] fp32 with four neighbours adjacent: [patches / 4,
        the language model's width]. wide: given if the tower is ours. The norm is over each patch,
        or over the four together."""
        if wide is None:
            found: Tensor = super().forward(x)  # type: ignore[misc]
            return found
        own: Any = self
        norm, width = own.norm, own.norm.weight.shape[0]
        return merged(x, lambda rows: wide.normed(norm, rows.view(1, -1, width)), own.linear_fc1, own.linear_fc2, wide)
