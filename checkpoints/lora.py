"""LoRA files for the tiny Wan and UMT5, in every spelling and of every kind that stock takes for
them.

Spellings. A name is prefix + module + suffix. Stock builds its prefixes from the model's own keys,
for Wan these:

    diffusion_model.   then the module as it is:
    `diffusion_model.blocks.0.self_attn.q.lora_A.weight`
    lora_unet_         then the module with dots made underscores:
                       `lora_unet_blocks_0_self_attn_q.lora_down.weight`
    lora_unet__        the same with one underscore too many, from the Fun trainer. Stock looks for
                       the name `lora_unet__blocks_0_cross_attn_k.lora_down.weight`; without it the
                       file is not known
    text_encoders.     then `umt5xxl.transformer.` or just `transformer.`, and the module, for the
    text encoder

For Wan it does not take `transformer.`, `base_model.model.`, `lycoris_` or a bare module: such keys
are left out with a line in the log each. Seven pairs of suffixes are in use; see SPELLINGS. down is
[rank, in], up is [out, rank], the weight gains up @ down * alpha / rank, with alpha = rank where
there is none.

Kinds. Beside low rank: DoRA (with the length of every row), LoHa, LoKr (whole or in factors),
GLoRA, OFT, BOFT, low rank for a convolution, and plain differences (`diff`, `diff_b`, `w_norm`,
`b_norm`) and replacements (`set_weight`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from . import text, wan
from .weights import Spec, Table, Tree, normal, tree

RANK = 4
ALPHA = 2.0

# With unit-gain weights this makes a patch a quarter of the weight it is added to, with ALPHA an
# eighth.
UP_STD = 0.125

Shapes = dict[str, tuple[int, int]]
ANY = "diffusion_model."


@dataclass(frozen=True)
class Spelling:
    """How one trainer writes the name of a low-rank pair."""

    down: str
    up: str
    prefix: str = ANY
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


def shapes_of(table: Table, *prefixes: str) -> Shapes:
    """Module -> (out, in) of the Linears whose names begin so."""
    return {
        name.removesuffix(".weight"): (spec.shape[0], spec.shape[1])
        for name, spec in table.items()
        if name.startswith(prefixes) and spec.fp8 and len(spec.shape) == 2
    }


def text_shapes(size: text.Umt5Size) -> Shapes:
    """The same of all Linears of an encoder."""
    return shapes_of(text.umt5(size), "encoder.")


def low_rank(spelling: Spelling, shapes: Shapes) -> Table:
    """A pair, and an alpha where the trainer writes one, for every module."""
    out: Table = {}
    for name, (rows, columns) in shapes.items():
        module = spelling.module(name)
        out[module + spelling.down] = normal(columns**-0.5, RANK, columns)
        out[module + spelling.up] = normal(UP_STD, rows, RANK)
        if spelling.alpha:
            out[f"{module}.alpha"] = _constant(ALPHA)
    return out


def _constant(value: float) -> Spec:
    return normal(0.0, mean=value)


def _low_rank(rows: int, columns: int) -> Tree:
    return {
        "lora_down.weight": normal(columns**-0.5, RANK, columns),
        "lora_up.weight": normal(UP_STD, rows, RANK),
        "alpha": _constant(ALPHA),
    }


# By kind, what there is of a module of `rows` times `columns`.
ALGORITHMS: dict[str, Callable[[int, int], Tree]] = {
    # Unit-gain weights have rows of length one.
    "lora_dora": lambda rows, columns: {**_low_rank(rows, columns), "dora_scale": normal(0.2, rows, 1, mean=1.0)},
    "lora_loha": lambda rows, columns: {
        "alpha": _constant(ALPHA),
        "(hada_w1|hada_w2)_a": normal(0.3, rows, RANK),
        "(hada_w1|hada_w2)_b": normal(columns**-0.25, RANK, columns),
    },
    "lora_lokr": lambda rows, columns: {
        "lokr_w1": normal(0.25, 8, 8),
        "lokr_w2": normal(columns**-0.5, rows // 8, columns // 8),
        "alpha": _constant(ALPHA),  # which nobody reads: it only counts for factors
    },
    "lora_lokr_factors": lambda rows, columns: {
        "lokr_w1_a": normal(0.5, 8, RANK),
        "lokr_w1_b": normal(0.5, RANK, 8),
        "lokr_w2_a": normal(0.5, rows // 8, RANK),
        "lokr_w2_b": normal(columns**-0.5, RANK, columns // 8),
        "alpha": _constant(ALPHA),
    },
    "lora_glora": lambda rows, columns: {
        "a1.weight": normal(0.3, columns, RANK),
        "(a2|b2).weight": normal(columns**-0.5, RANK, columns),
        "b1.weight": normal(0.3, rows, RANK),
        "alpha": _constant(ALPHA),
    },
    "lora_oft": lambda rows, _columns: {"oft_blocks": normal(0.05, 8, rows // 8, rows // 8)},
    # Told from OFT by a fourth axis, the butterfly's stages. Without alpha (the constraint) stock
    # fails on it.
    "lora_boft": lambda rows, _columns: {"oft_blocks": normal(0.05, 2, rows // 16, 16, 16), "alpha": _constant(100.0)},
}


def _differences(size: wan.WanSize) -> Tree:
    """Differences for what is too small for a rank, biases included, as distillation files have."""
    dim = size.dim
    return {
        "blocks.0": {
            "self_attn.q.diff": normal(0.02, dim, dim),
            "self_attn.q.diff_b": normal(0.2, dim),
            "self_attn.norm_q.diff": normal(0.2, dim),
            "norm3.(diff|diff_b)": normal(0.2, dim),
        },
        "blocks.1.norm3.(w_norm|b_norm)": normal(0.2, dim),
        "head.head.diff_b": normal(0.2, 4 * size.channels_out),
        "patch_embedding.diff": normal(0.02, dim, size.channels_in, *wan.PATCH),
    }


def _modulations(size: wan.WanSize) -> Tree:
    """Of parameters that belong to no layer: stock takes the patches and never applies them."""
    return {
        "head.modulation.diff": normal(0.2, 1, 2, size.dim),
        f"blocks.[{size.layers}].modulation.diff": normal(0.2, 1, 6, size.dim),
    }


def _replacements(size: wan.WanSize) -> Tree:
    """New tensors in place of the old ones, whatever the strength."""
    return {
        "blocks.0.self_attn": {
            "norm_k.set_weight": normal(0.2, size.dim, mean=1.5),
            "v.set_weight": normal(size.dim**-0.5, size.dim, size.dim),
            "v.bias.set_weight": normal(0.2, size.dim),
        }
    }


def _convolution(size: wan.WanSize) -> Tree:
    """Low rank for the patch embedding (LoCon): down has the kernel, up is 1x1x1."""
    return {
        "patch_embedding": {
            "lora_down.weight": normal((4 * size.channels_in) ** -0.5, RANK, size.channels_in, *wan.PATCH),
            "lora_up.weight": normal(UP_STD, size.dim, RANK, 1, 1, 1),
            "alpha": _constant(ALPHA),
        }
    }


PARTS = {
    "lora_diff": _differences,
    "lora_modulation": _modulations,
    "lora_set_weight": _replacements,
    "lora_conv": _convolution,
}


@dataclass(frozen=True)
class Lora:
    """A LoRA file: what makes its tensors, and the kind of checkpoint that it is for."""

    make: Callable[[], Table]
    base: str = "wan_t2v"


def table_of(one: Lora) -> Table:
    return one.make()


def modules() -> Shapes:
    """The Linears in a T2V's blocks."""
    return shapes_of(wan.table(wan.SIZES["wan_t2v"]), "blocks.")


def image_modules() -> Shapes:
    """What only an I2V has."""
    found = shapes_of(wan.table(wan.SIZES["wan_i2v"]), "img_emb.", "blocks.")
    return {name: shape for name, shape in found.items() if name.startswith("img_emb.") or name.endswith("_img")}


def _spelt(spelling: Spelling) -> Table:
    return low_rank(spelling, modules())


def _of_algorithm(algorithm: Callable[[int, int], Tree]) -> Table:
    return tree({ANY + name: algorithm(*shape) for name, shape in modules().items()})


def _of_parts(parts: Callable[[wan.WanSize], Tree]) -> Table:
    return tree({ANY + name: row for name, row in parts(wan.SIZES["wan_t2v"]).items()})


def _of_text(spelling: Spelling) -> Table:
    return low_rank(spelling, text_shapes(text.UMT5))


LORAS: dict[str, Lora] = {
    **{kind: Lora(partial(_spelt, spelling)) for kind, spelling in SPELLINGS.items()},
    **{kind: Lora(partial(_of_algorithm, algorithm)) for kind, algorithm in ALGORITHMS.items()},
    **{kind: Lora(partial(_of_parts, parts)) for kind, parts in PARTS.items()},
    "lora_i2v": Lora(lambda: low_rank(SPELLINGS["lora_down_up"], image_modules()), "wan_i2v"),
    **{kind: Lora(partial(_of_text, spelling), "umt5") for kind, spelling in TEXT_SPELLINGS.items()},
}
