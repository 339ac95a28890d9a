"""Qwen2.5-VL's vision tower over our kernels: stock's modules, computing in FP16 around an FP32
stream.

    patches ─ product ─ blocks ─ merger, of 2 x 2 neighbours

Stock computes it in FP32 and widens every weight at every use. Here products are FP16 with FP32
sums, in the blocks of `text/encoder/block.py`. In most of them the patches of a window of 8 x 8 see
each other only, in every eighth those of a whole picture. Patches are in the order of `windows.py`
from the first block to the merger. Heads of 80 are padded, and so are the 3420 values of the
feed-forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from comfy.text_encoders import llama
from comfy.text_encoders import qwen_vl as stock
from torch import Tensor, nn

from ....kernels_cuda import KernelPolicy
from ...base.policy import all_off, standing
from ...base.subclassing import mix
from ...weights.fp32_residual import Wide
from ..encoder.block import Call, Norm, compute, normed
from ..encoder.described import described
from . import patches
from .patches import Grid, cut, cut_on_the_device, embedded, is_ours, merged, picture_of
from .windows import layout

OPS = ("norm_modulate", "rms_parts", "linear", "linear_", "join_sums", "attention", "rms_rope_")


def fuse(model: nn.Module, policy: KernelPolicy, *, on_cpu: bool) -> int:
    """Let the towers of all Qwen2.5-VLs in a stock text encoder model compute through our ops, in
    place. Returns how many blocks."""
    fused = 0
    for tower in () if all_off(policy, OPS) else towers(model):
        mix(tower, FusedTower, **standing(policy), fusestream_on_cpu=on_cpu)
        for block in tower.blocks:
            mix(block, FusedBlock)
            fused += 1
    cut_on_the_device(model, llama.Qwen25_7BVLI, FusedTower, CutsOnTheDevice)
    return fused


def towers(model: nn.Module) -> Iterator[Any]:
    """The Qwen2.5-VL vision towers in a model."""
    return (module for module in model.modules() if isinstance(module, stock.Qwen2VLVisionTransformer))


class CutsOnTheDevice:
    """Mixed into the class of a network with a fused tower: pictures are copied to the device first,
    and cut into patches there."""

    visual: Any

    def preprocess_embed(self, embed: Any, device: torch.device) -> Any:
        """Stock's function, for a picture [1, height, width, 3] or another embedded input."""
        picture = picture_of(embed, self.visual, OPS)
        if picture is None:
            return super().preprocess_embed(embed, device)  # type: ignore[misc]
        x, grid = cut(picture, device)
        return self.visual(x, grid), grid


class FusedTower:
    """Mixed into the class of a fused tower. fusestream_on_cpu: also computes on the CPU, over the
    references."""

    fusestream_policy: KernelPolicy
    fusestream_on_cpu: bool

    def forward(self, pixel_values: Tensor, image_grid_thw: Tensor | None = None) -> Tensor:
        """Stock's Qwen2VLVisionTransformer, for patches [n, 3 * 2 * 14 * 14] fp32, with the four
        that will be merged adjacent, and the grid [pictures, 3] of frames, rows and columns.
        Returns [n / 4, the language model's width] fp32."""
        tower: Any = self
        if image_grid_thw is not None and is_ours(tower, pixel_values, OPS, (tower.patch_embed, tower.merger)):
            return seen(tower, Wide(self.fusestream_policy), pixel_values, image_grid_thw)
        found: Tensor = super().forward(pixel_values, image_grid_thw)  # type: ignore[misc]
        return found


def seen(tower: Any, wide: Wide, x: Tensor, grid_thw: Tensor) -> Tensor:
    """Stock's forward over our ops."""
    grid: Grid = [(t, h, w) for t, h, w in grid_thw.tolist()]
    merge = tower.spatial_merge_size
    found = layout(grid, tower.window_size // merge // tower.patch_size, merge)
    order = found.order.to(x.device)
    angle = tower.get_position_embeddings(torch.tensor(grid), torch.device("cpu")).to(x.device, torch.float32)
    x, angle = (t.reshape(len(order), merge * merge, -1)[order].flatten(0, 1) for t in (x, angle))
    near = Call(wide, cos=angle.cos(), sin=angle.sin(), groups=found.sizes, rows=patches.CHUNK)
    far = replace(near, groups=found.frames)
    x = embedded(tower.patch_embed.proj, wide, x)[None]
    for i, block in enumerate(tower.blocks):
        x = block(x, far if i in tower.fullatt_block_indexes else near)
    merger = tower.merger
    norm = Norm(merger.ln_q, merger.ln_q.eps, rms=True)
    out = merged(x[0], lambda rows: normed(norm, rows, wide), merger.mlp[0], merger.mlp[2], wide)
    return torch.empty_like(out).index_copy_(0, order, out)


class FusedBlock:
    """Mixed into the class of a fused block."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        cu_seqlens: Any = None,
        optimized_attention: Any = None,
    ) -> Any:
        """Stock's VisionBlock. If the tower is ours, `position_embeddings` is its `Call`, and
        `hidden_states` [1, patches, width] its own fp32 stream, which is added to in place;
        otherwise it is a call of stock's."""
        if not isinstance(position_embeddings, Call):
            return super().forward(  # type: ignore[misc]
                hidden_states, position_embeddings, cu_seqlens, optimized_attention
            )
        return compute(described(self), hidden_states, position_embeddings)
