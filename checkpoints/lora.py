"""LoRA files for the tiny Wan and UMT5, in every spelling and of every kind that stock takes for them.

Spellings. A name is prefix + module + suffix. Stock builds its prefixes from the model's own keys, for Wan these:

    diffusion_model.   then the module as it is: `diffusion_model.blocks.0.self_attn.q.lora_A.weight`
    lora_unet_         then the module with dots made underscores: `lora_unet_blocks_0_self_attn_q.lora_down.weight`
    lora_unet__        the same with one underscore too many, from the Fun trainer. Stock looks for the name
                       `lora_unet__blocks_0_cross_attn_k.lora_down.weight`; without it the file is not known
    text_encoders.     then `umt5xxl.transformer.` or just `transformer.`, and the module, for the text encoder

For Wan it does not take `transformer.`, `base_model.model.`, `lycoris_` or a bare module: such keys are left out with a line
in the log each. Seven pairs of suffixes are in use; see SPELLINGS. down is [rank, in], up is [out, rank], the weight gains
up @ down * alpha / rank, with alpha = rank where there is none.

Kinds. Beside low rank: DoRA (with the length of every row), LoHa, LoKr (whole or in factors), GLoRA, OFT, BOFT, low rank for
a convolution, and plain differences (`diff`, `diff_b`, `w_norm`, `b_norm`) and replacements (`set_weight`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .storage import PLAIN, Storage
from .umt5 import Umt5Size
from .wan import CLIP_WIDTH, SIZES, WanSize
from .weights import Spec, Table

RANK = 4
ALPHA = 2.0

# With unit-gain weights this makes a patch a quarter of the weight it is added to, with ALPHA an eighth.
UP_STD = 0.125

Shapes = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Spelling:
    """How one trainer writes the name of a low-rank pair."""

    down: str
    up: str
    prefix: str = "diffusion_model."
    flat: bool = False
    alpha: bool = False

    def module(self, name: str) -> str:
        return self.prefix + (name.replace(".", "_") if self.flat else name)


DOWN_UP = (".lora_down.weight", ".lora_up.weight")

SPELLINGS: dict[str, Spelling] = {
    # PEFT, and with it most trainers of today
    "lora_ab": Spelling(".lora_A.weight", ".lora_B.weight"),
    "lora_ab_default": Spelling(".lora_A.default.weight", ".lora_B.default.weight"),
    "lora_ab_bare": Spelling(".lora_A", ".lora_B"),
    # distillation files such as lightx2v's
    "lora_down_up": Spelling(*DOWN_UP, alpha=True),
    # diffusers, in three ages
    "lora_dot": Spelling(".lora.down.weight", ".lora.up.weight"),
    "lora_joined": Spelling("_lora.down.weight", "_lora.up.weight"),
    "lora_linear_layer": Spelling(".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
    # kohya's, and musubi-tuner's
    "lora_kohya": Spelling(*DOWN_UP, prefix="lora_unet_", flat=True, alpha=True),
    # VideoX-Fun's
    "lora_fun": Spelling(*DOWN_UP, prefix="lora_unet__", flat=True, alpha=True),
}

TEXT_SPELLINGS: dict[str, Spelling] = {
    "lora_text": Spelling(".lora_A.weight", ".lora_B.weight", prefix="text_encoders.umt5xxl.transformer."),
    "lora_text_short": Spelling(*DOWN_UP, prefix="text_encoders.transformer.", alpha=True),
}


def block_shapes(size: WanSize) -> Shapes:
    """Module -> (out, in) of the Linears in a Wan's blocks."""
    out: Shapes = {}
    for index in range(size.layers):
        for attention in ("self_attn", "cross_attn"):
            out |= {f"blocks.{index}.{attention}.{part}": (size.dim, size.dim) for part in "qkvo"}
        out |= {f"blocks.{index}.ffn.0": (size.ffn, size.dim), f"blocks.{index}.ffn.2": (size.dim, size.ffn)}
    return out


def image_shapes(size: WanSize) -> Shapes:
    """The same for what only an I2V has."""
    out = {"img_emb.proj.1": (CLIP_WIDTH, CLIP_WIDTH), "img_emb.proj.3": (size.dim, CLIP_WIDTH)}
    for index in range(size.layers):
        out |= {f"blocks.{index}.cross_attn.{part}": (size.dim, size.dim) for part in ("k_img", "v_img")}
    return out


def text_shapes(size: Umt5Size) -> Shapes:
    """The same for the encoder."""
    inner = size.heads * size.head_width
    out: Shapes = {}
    for index in range(size.layers):
        attention, ffn = (f"encoder.block.{index}.layer.{part}" for part in ("0.SelfAttention", "1.DenseReluDense"))
        out |= {f"{attention}.{part}": (inner, size.width) for part in "qkv"}
        out |= {f"{attention}.o": (size.width, inner), f"{ffn}.wo": (size.width, size.ffn)}
        out |= {f"{ffn}.wi_0": (size.ffn, size.width), f"{ffn}.wi_1": (size.ffn, size.width)}
    return out


def low_rank(spelling: Spelling, modules: Shapes) -> Table:
    """A pair, and an alpha where the trainer writes one, for every module."""
    out: Table = {}
    for name, (rows, columns) in modules.items():
        module = spelling.module(name)
        out[module + spelling.down] = Spec((RANK, columns), columns**-0.5)
        out[module + spelling.up] = Spec((rows, RANK), UP_STD)
        if spelling.alpha:
            out |= _alpha(module)
    return out


def _alpha(module: str, value: float = ALPHA) -> Table:
    return {f"{module}.alpha": Spec((), 0.0, value)}


def _dora(module: str, rows: int, columns: int) -> Table:
    pair = low_rank(Spelling(*DOWN_UP, prefix="", alpha=True), {module: (rows, columns)})
    return pair | {f"{module}.dora_scale": Spec((rows, 1), 0.2, 1.0)}  # unit-gain weights have rows of length one


def _loha(module: str, rows: int, columns: int) -> Table:
    out = _alpha(module)
    for part in ("hada_w1", "hada_w2"):
        out[f"{module}.{part}_a"] = Spec((rows, RANK), 0.3)
        out[f"{module}.{part}_b"] = Spec((RANK, columns), columns**-0.25)
    return out


def _lokr(module: str, rows: int, columns: int) -> Table:
    whole = {
        f"{module}.lokr_w1": Spec((8, 8), 0.25),
        f"{module}.lokr_w2": Spec((rows // 8, columns // 8), columns**-0.5),
    }
    return whole | _alpha(module)  # which nobody reads: it only counts for factors


def _lokr_factors(module: str, rows: int, columns: int) -> Table:
    out = {f"{module}.lokr_w1_a": Spec((8, RANK), 0.5), f"{module}.lokr_w1_b": Spec((RANK, 8), 0.5)}
    out[f"{module}.lokr_w2_a"] = Spec((rows // 8, RANK), 0.5)
    out[f"{module}.lokr_w2_b"] = Spec((RANK, columns // 8), columns**-0.5)
    return out | _alpha(module)


def _glora(module: str, rows: int, columns: int) -> Table:
    out = {
        f"{module}.a1.weight": Spec((columns, RANK), 0.3),
        f"{module}.a2.weight": Spec((RANK, columns), columns**-0.5),
    }
    out |= {f"{module}.b1.weight": Spec((rows, RANK), 0.3), f"{module}.b2.weight": Spec((RANK, columns), columns**-0.5)}
    return out | _alpha(module)


def _oft(module: str, rows: int, columns: int) -> Table:
    blocks = 8
    return {f"{module}.oft_blocks": Spec((blocks, rows // blocks, rows // blocks), 0.05)}


def _boft(module: str, rows: int, columns: int) -> Table:
    # Told from OFT by a fourth axis, the butterfly's stages. Without alpha (the constraint) stock fails on it.
    side = 16
    return {f"{module}.oft_blocks": Spec((2, rows // side, side, side), 0.05)} | _alpha(module, 100.0)


ALGORITHMS: dict[str, Callable[[str, int, int], Table]] = {
    "lora_dora": _dora,
    "lora_loha": _loha,
    "lora_lokr": _lokr,
    "lora_lokr_factors": _lokr_factors,
    "lora_glora": _glora,
    "lora_oft": _oft,
    "lora_boft": _boft,
}


def differences(size: WanSize) -> Table:
    """What distillation files add to their pairs: differences for what is too small for a rank, biases included."""
    first = "diffusion_model.blocks.0"
    out = {
        f"{first}.self_attn.q.diff": Spec((size.dim, size.dim), 0.02),
        f"{first}.self_attn.q.diff_b": Spec((size.dim,), 0.2),
        f"{first}.self_attn.norm_q.diff": Spec((size.dim,), 0.2),
        f"{first}.norm3.diff": Spec((size.dim,), 0.2),
        f"{first}.norm3.diff_b": Spec((size.dim,), 0.2),
        "diffusion_model.blocks.1.norm3.w_norm": Spec((size.dim,), 0.2),
        "diffusion_model.blocks.1.norm3.b_norm": Spec((size.dim,), 0.2),
        "diffusion_model.head.head.diff_b": Spec((4 * size.channels_out,), 0.2),
    }
    return out | {"diffusion_model.patch_embedding.diff": Spec((size.dim, size.channels_in, 1, 2, 2), 0.02)}


def modulations(size: WanSize) -> Table:
    """Differences for parameters that belong to no layer. Stock takes the keys and the patches, and never applies them."""
    out = {"diffusion_model.head.modulation.diff": Spec((1, 2, size.dim), 0.2)}
    for index in range(size.layers):
        out[f"diffusion_model.blocks.{index}.modulation.diff"] = Spec((1, 6, size.dim), 0.2)
    return out


def replacements(size: WanSize) -> Table:
    """New tensors in place of the old ones, whatever the strength."""
    first = "diffusion_model.blocks.0.self_attn"
    return {
        f"{first}.norm_k.set_weight": Spec((size.dim,), 0.2, 1.5),
        f"{first}.v.set_weight": Spec((size.dim, size.dim), size.dim**-0.5),
        f"{first}.v.bias.set_weight": Spec((size.dim,), 0.2),
    }


def convolution(size: WanSize) -> Table:
    """Low rank for the patch embedding (LoCon): down has the kernel, up is 1x1x1."""
    module, into = "diffusion_model.patch_embedding", size.channels_in
    out = {f"{module}.lora_down.weight": Spec((RANK, into, 1, 2, 2), (4 * into) ** -0.5)}
    return out | {f"{module}.lora_up.weight": Spec((size.dim, RANK, 1, 1, 1), UP_STD)} | _alpha(module)


@dataclass(frozen=True)
class Lora:
    """A LoRA file: its tensors, and the kind of checkpoint that it is for."""

    table: Table
    base: str


def _every_lora() -> dict[str, Lora]:
    size = SIZES["wan_t2v"]
    modules = block_shapes(size)
    out = {kind: Lora(low_rank(spelling, modules), "wan_t2v") for kind, spelling in SPELLINGS.items()}
    for kind, algorithm in ALGORITHMS.items():
        rows: Table = {}
        for module, (height, width) in modules.items():
            rows |= algorithm(f"diffusion_model.{module}", height, width)
        out[kind] = Lora(rows, "wan_t2v")
    out["lora_diff"] = Lora(differences(size), "wan_t2v")
    out["lora_modulation"] = Lora(modulations(size), "wan_t2v")
    out["lora_set_weight"] = Lora(replacements(size), "wan_t2v")
    out["lora_conv"] = Lora(convolution(size), "wan_t2v")
    out["lora_i2v"] = Lora(low_rank(SPELLINGS["lora_down_up"], image_shapes(SIZES["wan_i2v"])), "wan_i2v")
    for kind, spelling in TEXT_SPELLINGS.items():
        out[kind] = Lora(low_rank(spelling, text_shapes(Umt5Size())), "umt5")
    return out


LORAS: dict[str, Lora] = _every_lora()
STORAGES: dict[str, Storage] = PLAIN
