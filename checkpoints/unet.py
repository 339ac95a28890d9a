"""The U-Nets of SD 1.5 and SDXL, with CompVis' tensor names, without the prefix that whole checkpoints have.

    time_embed.0, .2      Linear  c -> 4*c -> 4*c      SiLU between, after a sinusoid of c
    label_emb.0.0, .0.2   Linear  2816 -> 4*c -> 4*c   SDXL: CLIP G's pooled output (1280) and sinusoids of six sizes
    input_blocks.0.0      Conv2d  [c, 4, 3, 3]
    input_blocks.{n}      .0 a residual block, .1 a transformer where the level has one; or .0.op, a convolution with stride 2
    middle_block          .0 a residual block, .1 a transformer, .2 a residual block
    output_blocks.{n}     as input_blocks, and .1.conv or .2.conv in the last of a level, behind an enlargement. Each gets what
                          the input block at its place gave beside what comes in, hence more channels in than out
    out.0, .2             GroupNorm, Conv2d [4, c, 3, 3]

    residual block   .in_layers.0 (GroupNorm), .2 (3x3), .emb_layers.1 (4*c -> width), .out_layers.0, .3, SiLU before each
                     convolution; .skip_connection (1x1) where the width changes
    transformer      .norm (GroupNorm); .proj_in, .proj_out: 1x1 convolutions in SD 1.5, Linears in SDXL; .transformer_blocks.{d}
                     with norm1, attn1 (to itself), norm2, attn2 (to the prompt), norm3, ff.net.0.proj (GEGLU: 8*width),
                     ff.net.2. An attention has to_q, to_k, to_v without biases, to_out.0 with one

Level l is c * mult[l] wide; GroupNorms have 32 groups. SD 1.5 splits every width into 8 heads, SDXL into heads of 64.

Stock reads the shape of the net from the file, but takes it for one of these two only if c is 320 and the prompt 768 or 2048 wide,
for SDXL only with transformers 0, 2 and 10 blocks deep. The smallest such SDXL has 240 MB. `sd15_wide` is what stock takes for an
SD 1.5 below 60 MB: two levels, no middle block. `sd15` and `sdxl` have everything, and load while `narrow` is open.
"""

from __future__ import annotations

from dataclasses import dataclass

from .clip_l import WIDTH as CLIP_WIDTH
from .storage import PLAIN, Cast, Storage
from .weights import Table, conv, layer_norm, linear

CHANNELS = 4

# A residual stream through a dozen blocks: each adds less than what is there.
SMALL = 0.5


@dataclass(frozen=True)
class UnetSize:
    """The sizes of one net, level by level."""

    width: int
    mult: tuple[int, ...]
    depth: tuple[int, ...]  # transformer blocks behind each residual block of a level
    residuals: int = 1
    middle: int = 0  # transformer blocks in the middle; without any, there is no middle block
    context: int = CLIP_WIDTH
    labels: int = 0
    linear: bool = False


SIZES = {
    "sd15": UnetSize(64, mult=(1, 2, 2), depth=(1, 1, 0), middle=1),
    "sd15_wide": UnetSize(320, mult=(1, 1), depth=(1, 0), context=768),
    "sdxl": UnetSize(64, mult=(1, 2, 2), depth=(0, 1, 2), middle=2, labels=2816, linear=True),
}


def table(size: UnetSize) -> Table:
    """Every tensor of one net."""
    first, vector = size.width, 4 * size.width
    out = linear("time_embed.0", vector, first) | linear("time_embed.2", vector, vector)
    if size.labels:
        out |= linear("label_emb.0.0", vector, size.labels) | linear("label_emb.0.2", vector, vector)
    out |= conv("input_blocks.0.0", first, CHANNELS, (3, 3), fp8=False)
    handed = [first]  # the width of what each input block gives
    place = 1
    for level, mult in enumerate(size.mult):
        for _ in range(size.residuals):
            out |= _residual(f"input_blocks.{place}.0", size, handed[-1], mult * first)
            out |= _transformer(f"input_blocks.{place}.1", size, mult * first, size.depth[level])
            handed.append(mult * first)
            place += 1
        if level < len(size.mult) - 1:
            out |= conv(f"input_blocks.{place}.0.op", handed[-1], handed[-1], (3, 3))
            handed.append(handed[-1])
            place += 1
    width = handed[-1]
    if size.middle:
        out |= _residual("middle_block.0", size, width, width) | _residual("middle_block.2", size, width, width)
        out |= _transformer("middle_block.1", size, width, size.middle)
    place = 0
    for level, mult in reversed(list(enumerate(size.mult))):
        for left in reversed(range(size.residuals + 1)):
            name = f"output_blocks.{place}"
            out |= _residual(f"{name}.0", size, width + handed.pop(), mult * first)
            width = mult * first
            out |= _transformer(f"{name}.1", size, width, size.depth[level])
            if level and not left:
                out |= conv(f"{name}.{2 if size.depth[level] else 1}.conv", width, width, (3, 3))
            place += 1
    return out | layer_norm("out.0", first) | conv("out.2", CHANNELS, first, (3, 3))


def _residual(name: str, size: UnetSize, into: int, width: int) -> Table:
    out = layer_norm(f"{name}.in_layers.0", into) | conv(f"{name}.in_layers.2", width, into, (3, 3))
    out |= linear(f"{name}.emb_layers.1", width, 4 * size.width)
    out |= layer_norm(f"{name}.out_layers.0", width) | conv(f"{name}.out_layers.3", width, width, (3, 3), gain=SMALL)
    return out if into == width else out | conv(f"{name}.skip_connection", width, into, (1, 1))


def _transformer(name: str, size: UnetSize, width: int, depth: int) -> Table:
    if not depth:
        return {}
    out = layer_norm(f"{name}.norm", width)
    for end in ("proj_in", "proj_out"):
        out |= linear(f"{name}.{end}", width, width) if size.linear else conv(f"{name}.{end}", width, width, (1, 1))
    for index in range(depth):
        block = f"{name}.transformer_blocks.{index}"
        for norm in ("norm1", "norm2", "norm3"):
            out |= layer_norm(f"{block}.{norm}", width)
        out |= _attention(f"{block}.attn1", width, width) | _attention(f"{block}.attn2", width, size.context)
        out |= linear(f"{block}.ff.net.0.proj", 8 * width, width)
        out |= linear(f"{block}.ff.net.2", width, 4 * width, gain=SMALL)
    return out


def _attention(name: str, width: int, source: int) -> Table:
    out = linear(f"{name}.to_q", width, width, bias=False)
    for part in ("to_k", "to_v"):
        out |= linear(f"{name}.{part}", width, source, bias=False)
    return out | linear(f"{name}.to_out.0", width, width)


STORAGES: dict[str, Storage] = PLAIN | {"fp8_e4m3fn": Cast()}
