"""Qwen3-VL's eyes over our kernels: stock's modules, computing in FP16 around an FP32 stream.

    patches ─ product, + places ─ blocks ─ merger, of 2 x 2 neighbours
    x += proj(attention(rope(q), rope(k), v))       q, k, v of norm1(x)
    x += fc2(GELU(fc1(norm2(x))))

Stock computes them in FP32 and widens every weight at every use. Here products are FP16 with FP32
sums (`weights/fp32_residual.py`). Stock's convolution of patches is a product of rows, because
kernel and stride are equal. Heads of 72, as in the 8B, are padded with zeros to 96. After some
blocks a merger gives the language model what was seen so far.

A picture of many patches passes in chunks, except in the attention, which has all queries, keys and
values as fp16. A picture is copied to the card first and cut into patches there, which takes stock
a tenth of a second on the CPU for 768x768.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import torch
from comfy.text_encoders import qwen3vl as stock
from comfy.text_encoders.qwen_vl import process_qwen2vl_images
from torch import Tensor, nn

from ....kernels_cuda import STANDARD, KernelPolicy, attention, rms_rope_
from ....kernels_cuda.ops.views.parts import split
from ...base.policy import all_off, standing
from ...base.subclassing import mix
from ...text import common
from ...text.common import HAND_BACK
from ...text.encoder.described import GELU, GELU_TANH
from ...text.room import PATCHES
from ...weights.fp32_residual import Wide
from ...weights.operands import operands

OPS = ("norm_modulate", "linear", "linear_", "join_sums", "attention", "rms_rope_")
CHUNK = PATCHES
STOCKS = {
    "patch_size": 16,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}  # stock's settings for cutting a picture into patches
SERVED = (64, 96, 128)  # heads that the attention has kernels for


@dataclass(frozen=True)
class Sight:
    """Arguments shared by all blocks of one call.

    wide      how to compute
    cos, sin  [patches, head / 2] fp32
    frames    patches of each picture or frame, which see each other only
    """

    wide: Wide
    cos: Tensor
    sin: Tensor
    frames: tuple[int, ...]


def fuse(model: nn.Module, policy: KernelPolicy = STANDARD, *, on_cpu: bool = False) -> int:
    """Let the eyes of all Qwen3-VLs in a stock text encoder model compute through our ops, in
    place. Returns how many blocks, 0 if all is left to stock.

    on_cpu: on the CPU too, where the ops run their references: for tests.
    """
    fused = 0
    for eyes in () if all_off(policy, OPS) else eyes_of(model):
        mix(eyes, FusedEyes, **standing(policy), fusestream_on_cpu=on_cpu)
        for block in eyes.blocks:
            mix(block, FusedBlock)
            fused += 1
        for merger in (eyes.merger, *eyes.deepstack_merger_list):
            mix(merger, FusedMerger)
    for network in model.modules():
        if isinstance(network, stock.Qwen3VL) and isinstance(network.visual, FusedEyes):
            mix(network, SeesOnTheDevice)
    return fused


def eyes_of(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, stock.Qwen3VLVisionModel):
            yield module


# ------------------------------------------------------------------------------------------------------------ the eyes


class SeesOnTheDevice:
    """Mixed into the class of a network with fused eyes."""

    visual: Any

    def preprocess_embed(self, embed: Any, device: torch.device) -> Any:
        """Stock's function, for a picture [1, height, width, 3] or another embedded input. The host
        knows the number of patches, so it does not wait for their values."""
        picture = embed.get("data")
        is_picture = embed.get("type") == "image" and isinstance(picture, Tensor)
        if not is_picture or all_off(self.visual.fusestream_policy, OPS):
            return super().preprocess_embed(embed, device)  # type: ignore[misc]
        patches, grid = process_qwen2vl_images(picture.to(device), **STOCKS)
        grid = grid.cpu()
        seen, told = self.visual(patches.to(device, torch.float32), grid)
        return seen, {"grid": grid, "deepstack": told}


class FusedEyes:
    """Mixed into the class of fused eyes. fusestream_on_cpu: also computes on the CPU, over the
    references."""

    fusestream_policy: KernelPolicy
    fusestream_on_cpu: bool

    def forward(self, x: Tensor, grid_thw: Tensor) -> Any:
        """Stock's Qwen3VLVisionModel, for patches [n, 3 * 2 * 16 * 16] fp32, with the four that
        will be merged adjacent, and the grid [pictures, 3] of frames, rows and columns. Returns [n
        / 4, width] fp32, and the same from each merger in between."""
        policy, eyes = self.fusestream_policy, self
        if not all_off(policy, OPS):
            reason = obstacle(eyes, x)
            if reason is None:
                return look(eyes, Wide(policy), x, grid_thw)
            HAND_BACK(reason, x, forced=policy.default == "on", quietly=not x.is_cuda)
        return super().forward(x, grid_thw)  # type: ignore[misc]


def obstacle(eyes: Any, x: Tensor) -> str | None:
    """Why stock must compute this call, in words a user understands; None if we may."""
    policy, on_cpu = eyes.fusestream_policy, eyes.fusestream_on_cpu
    parts = (*eyes.blocks, eyes.patch_embed, eyes.merger, *eyes.deepstack_merger_list)
    reason = common.obstacle(parts, x[None], None, policy, on_cpu=on_cpu, runs=len(eyes.blocks))
    if reason is not None:
        return reason
    d = eyes.hidden_size // eyes.num_heads
    return None if d <= max(SERVED) and d % 2 == 0 else f"its eyes have heads of {d}, which no kernel serves"


def look(eyes: Any, wide: Wide, x: Tensor, grid_thw: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Stock's forward over our ops."""
    grid = [tuple(map(int, row)) for row in grid_thw.tolist()]
    x = embedded(eyes, wide, x)
    x += places(eyes, grid, x.device)
    angle = eyes.rot_pos_emb(torch.tensor(grid)).to(x.device, torch.float32).reshape(x.shape[0], -1)
    frames = tuple(h * w for t, h, w in grid for _ in range(t))
    sight = Sight(wide, angle.cos(), angle.sin(), frames)
    told: list[Tensor] = []
    x = x[None]
    for i, block in enumerate(eyes.blocks):
        x = block(x, sight)
        if i in eyes.deepstack_visual_indexes:
            told.append(eyes.deepstack_merger_list[eyes.deepstack_visual_indexes.index(i)](x[0], wide))
    return eyes.merger(x[0], wide), told


def embedded(eyes: Any, wide: Wide, x: Tensor) -> Tensor:
    """The first convolution as a product of patches [n, k] fp32: [n, width] fp32."""
    module = eyes.patch_embed.proj
    with operands(x.new_empty(0, dtype=torch.float16), wide.ops, module) as [own]:
        weight = own.matrix.flatten(1)
        return torch.cat([summed(wide, parted(wide, rows), weight, own.bias) for rows in torch.split(x, CHUNK)])


def places(eyes: Any, grid: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """The learnt places of a square, interpolated over each picture: [patches, width]. Computed in
    the table's type and in stock's order, but without its lists of numbers."""
    side, merge, found = eyes.num_grid_per_side, eyes.spatial_merge_size, []
    table = eyes.pos_embed
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


def parted(wide: Wide, x: Tensor) -> Tensor:
    """x fp32 as an operand of a product."""
    return split(x) if wide.splits else x.half()


def summed(wide: Wide, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product of an operand, as fp32."""
    out = wide.product(h, weight, bias)
    return out[0] + out[1] if wide.splits else out.float()


# ------------------------------------------------------------------------------------------------------------- a block


class FusedBlock:
    """Mixed into the class of a fused block."""

    def forward(
        self, x: Tensor, cu_seqlens: Any = None, position_embeddings: Any = None, optimized_attention: Any = None
    ) -> Any:
        """Stock's Qwen35VisionBlock. If the eyes are ours, `cu_seqlens` is their `Sight`, and x [1,
        patches, width] their own fp32 stream, which is added to in place; otherwise it is a call of
        stock's."""
        if not isinstance(cu_seqlens, Sight):
            return super().forward(x, cu_seqlens, position_embeddings, optimized_attention)  # type: ignore[misc]
        # Stock's operations ask this; ours do not.
        comfy.model_management.throw_exception_if_processing_interrupted()
        block: Any = self
        attend(block, x, cu_seqlens)
        feed_forward(block, x, cu_seqlens.wide)
        return x


def attend(block: Any, x: Tensor, sight: Sight) -> None:
    """x += proj(attention(...)) of the normalised x."""
    module, wide = block.attn, sight.wide
    d = module.head_dim
    room = next((one for one in SERVED if one >= d), d)
    heads = torch.zeros if room > d else torch.empty
    qkv = heads(1, x.shape[1], 3, module.num_heads, room, dtype=torch.float16, device=x.device)
    at = 0
    for rows in torch.split(x, CHUNK, 1):
        [made] = wide.projections(wide.normed(block.norm1, rows), (module.qkv,))
        made = made.view(1, -1, 3, module.num_heads, d)
        some = slice(at, at + rows.shape[1])
        q, k = made[:, :, 0], made[:, :, 1]
        rms_rope_(
            q, k, None, None, sight.cos[some], sight.sin[some], eps=0.0, norm="none", interleaved=False, policy=wide.ops
        )
        qkv[:, some, ..., :d] = made
        at = some.stop
    q, k, v = qkv.unbind(2)
    at = 0
    for frame in sight.frames:
        some = slice(at, at + frame)
        out = attention(q[:, some], k[:, some], v[:, some], scale=d**-0.5, policy=wide.ops)[..., :d].flatten(2)
        for rows, values in zip(torch.split(x[:, some], CHUNK, 1), torch.split(out, CHUNK, 1), strict=True):
            wide.add(rows, [values.contiguous()], module.proj)
        at = some.stop


def feed_forward(block: Any, x: Tensor, wide: Wide) -> None:
    """x += fc2(GELU(fc1(norm2(x))))."""
    for rows in torch.split(x, CHUNK, 1):
        hidden = wide.hidden(wide.normed(block.norm2, rows), (block.mlp.linear_fc1,), GELU_TANH)
        wide.add(rows, hidden, block.mlp.linear_fc2)


# ------------------------------------------------------------------------------------------------------------ a merger


class FusedMerger:
    """Mixed into the class of a fused merger."""

    def forward(self, x: Tensor, wide: Wide | None = None) -> Tensor:
        """Stock's merger, for x [patches, width] fp32 with four neighbours adjacent: [patches / 4,
        the language model's width]. wide: given if the eyes are ours."""
        if wide is None:
            found: Tensor = super().forward(x)  # type: ignore[misc]
            return found
        return merged(self, wide, x)


def merged(merger: Any, wide: Wide, x: Tensor) -> Tensor:
    """linear_fc2(GELU(linear_fc1(norm(x)))). The norm is over each patch, or over the four
    together."""
    found = []
    for rows in torch.split(x.view(-1, merger.merge_dim), CHUNK // 4):
        h = wide.normed(merger.norm, rows.view(1, -1, merger.norm.weight.shape[0]))
        hidden = wide.hidden(h.view(*h.shape[:-2], *rows.shape), (merger.linear_fc1,), GELU)
        with operands(hidden[0], wide.ops, merger.linear_fc2) as [own]:
            parts = torch.stack(list(hidden)) if wide.splits else hidden[0]
            found.append(summed(wide, parts, own.matrix, own.bias)[0])
    return torch.cat(found)
