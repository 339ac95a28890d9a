"""The kernels that are predicted and kept: torch's attention, our own, comfy-kitchen's; and what their code does not say.

torch on Turing: the memory-efficient attention (aten/src/ATen/native/transformers/cuda/mem_eff_attention), up to heads of
64 by 64x64, up to 128 by 32x128, both with the output in registers. Launch and shared memory follow from its
kernel_forward.h: one warp for 32 x 32 scores; scaling factors, the tile of scores (8 halves of padding), two stages of V.
torch on RTX 30 and 40: flash attention (flash_fwd_launch_template.h). With 100 KB of shared memory 128 queries and 32 keys
for heads of 128, 64 for 96, 128 for 64; on an A100 64 keys for heads of 128. Four warps; queries, one tile of keys and one
of values in shared memory. Both sum in FP32.

comfy-kitchen's attention: both products of 8-bit numbers. A warp has 16 queries of heads of 128, 32 of heads of 64. A tile
of 64 queries is taken for heads of 128 on RTX 30 up to 40960 keys, and on RTX 50 from 4096 to 4608. A mask of more than
1024 keys has a kernel of its own, in which every tile is taken to be one that the mask touches. Its products are CUTLASS':
tiles, warps and stages are in their names. Which shape gets which is in `predicted/kitchen.py`.

Walks through our attention leave out the search for new maxima, which long inputs meet once or twice a row, and the cut at
the last key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from . import machine
from .cards import runs
from .flow import Rules, find_loops, loop_around, main_loop, split, walk
from .machine import LANES, Card
from .sass import Instruction

LONGEST = 30_000  # instructions of an iteration
OTHER_NAMES = ("VisitorAuxLoad",)  # of CUTLASS' products: those that read something besides


@dataclass(frozen=True)
class Kernel:
    """pattern: of its mangled name. flops: of a block, for one tile of keys or one step in depth. shared: dynamic bytes."""

    label: str
    variant: str
    pattern: str
    threads: int
    shared: int
    flops: int
    rules: Rules = field(default_factory=Rules)

    def work(self, instruction: Instruction) -> int:
        """Operations of a warp's instruction, as far as the kernel is for them."""
        if machine.FFMA in self.rules.work:
            return 2 * LANES if instruction.base == machine.FFMA else 0
        return machine.flops(instruction)

    def names(self, name: str) -> bool:
        """Whether a mangled name is this kernel's."""
        whole = name.split("SelectBase", maxsplit=1)[0]
        return re.search(self.pattern, whole) is not None and not any(word in whole for word in OTHER_NAMES)


def path_of(code: list[Instruction], kernel: Kernel) -> list[Instruction]:
    """One iteration, which must be one tile.

    A loop with several heads is no natural loop: there the walk begins at each block with IMMA in turn, and the shortest
    of the walks that are one tile is taken.
    """
    blocks = split(code)
    loops = find_loops(blocks)
    main = main_loop(code, blocks, loops, kernel.rules.work)
    starts = [
        at for at, block in enumerate(blocks) if any(i.base == machine.IMMA for i in code[block.start : block.end])
    ]
    around = [loop for at in starts if (loop := loop_around(blocks, at))]
    if main:  # or one around it, where a tile takes several rounds
        around = [loop for loop in loops if main.blocks <= loop.blocks]
    found = []
    for loop in around:
        try:
            path = walk(code, blocks, loops, loop, kernel.rules, limit=LONGEST)
        except ValueError:  # it went round without coming back to where it began
            continue
        if sum(map(kernel.work, path)) * kernel.threads // LANES == kernel.flops:
            found.append(path)
    if not found:
        raise ValueError(f"{kernel.variant} {kernel.label}: no walk is that of one tile")
    return min(found, key=len)


# ------------------------------------------------------------------------------------------------------------- torch's


def _efficient(head: int, queries: int, keys: int) -> Kernel:
    """Of half precision on tensor cores: tiles of 32 in depth, two stages. A plain attention leaves branches out."""
    symbol = f"fmha_cutlassF_f16_aligned_{queries}x{keys}_rf_sm75"
    factors = 4 * (4 * queries + queries * keys // 32)
    second, first = 2 * queries * (keys + 8) + 2 * 2 * 32 * head, 2 * 2 * 32 * (queries + keys)
    rules = Rules(default_trips=keys // 32, skip=("LDG", "FSEL:8", "DFMA|I2F"))
    flops = 4 * queries * keys * head
    return Kernel(symbol, "sm_75", symbol, queries * keys // 32, factors + max(second, first), flops, rules)


def _efficient_fp32(head: int, queries: int, keys: int) -> Kernel:
    """Of FP32, which no tensor core of Turing multiplies: the FP32 cores do, in tiles of 8 in depth. Scores lie in shared memory as
    they are."""
    symbol = f"fmha_cutlassF_f32_aligned_{queries}x{keys}_rf_sm75"
    factors = 4 * (4 * queries + queries * keys // 32)
    second, first = 4 * queries * keys + 4 * 2 * 8 * head, 4 * 2 * 8 * (queries + keys)
    rules = Rules(default_trips=keys // 8, skip=("LDG:40", "FSEL:8", "DFMA|I2F"), work=(machine.FFMA,), least=64)
    flops = 4 * queries * keys * head
    return Kernel(symbol, "sm_75", symbol, queries * keys // 32, factors + max(second, first), flops, rules)


def _flash(head: int, keys: int, capability: int) -> Kernel:
    """Whole tiles; no dropout, causal edge, window, slopes, cap of scores, probabilities kept."""
    sizes = f"ILi{head}ELi128ELi{keys}ELi4E"
    flags = "".join(f"Lb{flag}E" for flag in (0, 0, 0, 0, 1, 1, 0, 0))
    traits = f"23Flash_fwd_kernel_traits{sizes}Lb0ELb0EN7cutlass6half_tE19Flash_kernel_traits{sizes}S3_EE"
    label = f"flash sm_{capability} head {head}, 128x{keys}"
    shared, flops = 2 * head * (128 + 2 * keys), 4 * 128 * keys * head
    return Kernel(label, f"sm_{capability}", f"flash_fwd_kernelI{traits}{flags}EE", 128, shared, flops)


TORCH = (
    _efficient(head=64, queries=64, keys=64),
    _efficient(head=128, queries=32, keys=128),
    _efficient_fp32(head=128, queries=32, keys=128),
    *(_flash(head, keys, 86) for head, keys in ((64, 128), (96, 64), (128, 32))),
    *(_flash(head, keys, 80) for head, keys in ((64, 128), (128, 64))),
)


def torch_serves(kernel: Kernel, card: Card) -> bool:
    """Whether this is the code of torch's that the card gets: the newest that it runs."""
    built = (capability for capability in (75, 80, 86) if runs(card, capability))
    return kernel.variant == f"sm_{max(built, default=0)}"


# ------------------------------------------------------------------------------------------------------------ our own

HEADS, TIERS = (64, 96, 128), ("precise", "fast", "turbo", "turbo_half", "turbo_int8")
# By the folder of what was compiled: the cards.
VARIANTS = {"sm_75": ("2060s",), "sm_86": ("3060ti", "4060"), "sm_120": ("5060",)}
# Lists are for models of many tokens, whose heads have 128 elements.
OURS = (*((head, tier, "") for head in HEADS for tier in TIERS), *((128, tier, " listed") for tier in TIERS))


def our_unit(tier: str) -> str:
    return "attention_int8.cubin" if tier == "turbo_int8" else "attention.cubin"


def our_label(head: int, tier: str, listed: str) -> str:
    return f"attention {head} {tier}{listed}"


def our_attention(variant: str, head: int, tier: str, listed: str, cut: tuple[int, ...]) -> Kernel:
    """cut: rows, threads and shared bytes, as the unit says them. A tile has 32 keys, or 64 where values are in 8 bits: there
    the walk leaves out the step that takes the magic number away, too, which stands behind every sixteenth tile."""
    rows, threads, shared = cut
    label = our_label(head, tier, listed)
    keys, skip = (64, ("FMUL:40", "SEL:30", "FFMA:60")) if tier == "turbo_int8" else (32, ("SHFL", "FSEL:16"))
    return Kernel(label, variant, label.replace(" ", "_"), threads, shared, 4 * rows * keys * head, Rules(skip=skip))


# Rows and columns of the tiles of `linear_int8` that Pascal runs; each takes 64 bytes of k at a time, its sums 16.
PASCAL_PRODUCTS = ((64, 128), (128, 128), (128, 256))
PASCAL_ATTENTION = (*((head, "") for head in HEADS), (128, " listed"))
PASCAL_CARDS = ("1060", "1070", "1080", "1080ti", "p40")


def pascal_product(rows: int, columns: int, cut: tuple[int, ...]) -> Kernel:
    """cut: threads and shared bytes."""
    threads, shared = cut
    name = f"linear_int8_{rows}x{columns}"
    label = f"linear_int8 {rows}x{columns}"
    return Kernel(label, "sm_61", f"^{name}$", threads, shared, 2 * rows * columns * 64, Rules(default_trips=4))


def pascal_attention(head: int, listed: str, cut: tuple[int, ...]) -> Kernel:
    """As our_attention, but scores take 16 bytes of d at a time."""
    kernel = our_attention("sm_61", head, "turbo_int8", listed, cut)
    rules = replace(kernel.rules, default_trips=head // 16)
    return replace(kernel, pattern=f"^{kernel.label.replace(' ', '_')}$", rules=rules)


# ----------------------------------------------------------------------------------------------------- comfy-kitchen's

VERSION = "0.2.40"
# By what was compiled for: the card. RTX 30 run the code for sm_80.
KITCHEN_CARDS = {"sm_75": "2060s", "sm_80": "3060ti", "sm_89": "4060", "sm_120": "5060"}
_MASKS = {"": 0, "dense": 2, "short keys": 3, "keys": 4}
# Of cuBLAS' kernels for INT8 on Turing the fastest, by the same model. Which of them it takes was not read.
CUBLAS = "cuBLAS 13.1.0.3 INT8 128x256"
Sizes = tuple[int, int, int]


def stored_label(variant: str, label: str) -> str:
    """Under which a prediction is kept."""
    return f"comfy-kitchen {VERSION} {variant} {label}"


def kitchen_attention(variant: str, head: int, queries: int, keys: int, mask: str = "") -> Kernel:
    """Of halves and of sizes below 2^32. mask: over keys alone, of at most 1024 (short) or more, or over pairs (dense)."""
    rows = 32 if head == 64 else 16  # of a warp
    sizes = "".join(f"ELj{n}" for n in (queries, keys, rows, keys, head))[1:]
    tail = f"6__halfL11ComputeUnit1EL8MaskMode{_MASKS[mask]}ELb0ELb1ELb0ELb0ELb1EjEv"
    label = f"attention {head} {queries}x{keys}" + (f", mask {mask}" if mask else "")
    shared = max(head * (queries + 2 * keys), 2 * head * queries)
    # A tile that the long mask does not touch has a path of its own, which this leaves out.
    rules = Rules(skip=("MUFU:20",)) if mask == "keys" else Rules()
    pattern = f"qk_int_sv_i8_attn_kernelI{sizes}E.*{tail}"
    return Kernel(label, variant, pattern, 32 * queries // rows, shared, 4 * queries * keys * head, rules)


def kitchen_product(variant: str, bits: int, tile: Sizes, warp: Sizes, stages: int, streams: bool = False) -> Kernel:
    """Into halves. tile, warp: rows, columns, depth of a block and of a warp. streams: tiles that do not fill the card are
    shared out between its multiprocessors ("stream K")."""
    instruction = (8, 8, 128 // bits) if variant == "sm_75" else (16, 8, 256 // bits)
    shapes = r"EEENS\w{1,3}_I".join("".join(f"Li{n}E" for n in size)[:-1] for size in (tile, warp, instruction))
    shared_out = "(?=.*StreamK)" if streams else "(?!.*StreamK)"
    pattern = rf"^{shared_out}.*6half_tES\w+_Li8Eif.*GemmShapeI{shapes}EEE"
    label = f"product INT{bits} {'x'.join(map(str, tile))}" + (", stream K" if streams else "")
    m, n, k = tile
    threads = 32 * (m // warp[0]) * (n // warp[1])
    return Kernel(label, variant, pattern, threads, stages * (m + n) * k * bits // 8, 2 * m * n * k)


def _kitchen(variant: str) -> tuple[Kernel, ...]:
    """Its attention, less the dense mask's kernel for heads of 64, which keeps its loop in parts that the walk does not
    follow; and the products that shapes of more than a few rows get, on RTX 30 and 40 those of 4 bits for which a
    multiprocessor has the room."""
    tiles = [
        (128, 128, 128),
        *([(128, 64, 128)] if variant in ("sm_80", "sm_120") else []),
        (128, 128, 64),
        (64, 128, 64),
    ]
    attention = [kitchen_attention(variant, *tile) for tile in tiles]
    masked = (*((128, 128, 128, "keys"), (128, 128, 64, "short keys"), (128, 128, 64, "dense"), (64, 128, 64, "keys")),)
    attention += [kitchen_attention(variant, *tile) for tile in masked]
    large, small, four = (128, 256, 64), (64, 128, 64), (128, 256, 128)
    square, narrow = (64, 64, 64), (32, 64, 64)
    if variant == "sm_75":
        products: list[tuple[int, Sizes, Sizes, int, bool]] = [
            *((8, large, square, 2, False), (8, small, narrow, 2, False)),
            *((4, four, (64, 64, 128), 2, False), (4, (64, 64, 128), (32, 32, 128), 2, False)),
        ]
    else:
        pairs = ((large, 3), ((128, 128, 64), 4))
        products = [(8, tile, square, stages, streams) for tile, stages in pairs for streams in (False, True)]
        products += [(8, small, narrow, 4, False)]
        if variant != "sm_120":
            products += [(4, four, (64, 64, 128), 3, False), (4, (128, 128, 256), (64, 64, 256), 3, False)]
    return (*attention, *(kitchen_product(variant, *each) for each in products))


KITCHEN = {variant: _kitchen(variant) for variant in KITCHEN_CARDS}
