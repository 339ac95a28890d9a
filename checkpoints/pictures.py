"""Picture models: Flux.1, Flux.2 and Chroma, Z-Image, Qwen-Image, Krea 2, Anima, Stable Diffusion
3.5 and the U-Nets of SD 1.5 and SDXL.

Tensor names of the published files, without the prefix that whole checkpoints have. Tokens are 2x2
latent pixels; LayerNorms without weights are not in a table, because shift, scale and gate come
from a vector made of the timestep. What stock fixes in its code although the file would tell,
`narrow.py` opens up.
"""

from __future__ import annotations

from dataclasses import dataclass

from .text import CLIP_WIDTH, KREA2_TE, QWEN3, T5_WIDTH
from .video import MODULATION
from .wan import FREQUENCIES, HEAD
from .weights import Rows, Table, Tree, conv, gain, linear, norm, normal, tree

# --------------------------------------------------------------------------------------------- Flux

# Flux.1 sums three vectors before it makes shifts, scales and gates; Chroma's layer is a sum of five.
FLUX_MODULATION = 0.7


@dataclass(frozen=True)
class FluxSize:
    """The sizes of one transformer; what is zero is not there."""

    dim: int = 256
    double: int = 3
    single: int = 3
    text: int = T5_WIDTH
    patch: int = 64
    pooled: int = 0
    guidance: bool = False
    guidance_layer: int = 0
    shared: bool = False  # Flux.2: modulation for all blocks, gated MLP, no biases


# Heads are 128 wide, hence 256 here: with one head no mistake in the order of heads would show.
FLUX: dict[str, FluxSize] = {
    "flux1": FluxSize(pooled=CLIP_WIDTH, guidance=True),
    "flux2": FluxSize(text=3 * QWEN3.width, patch=128, shared=True),  # klein reads three layers, one beside the other
    "chroma": FluxSize(guidance_layer=128),
}


def flux(size: FluxSize) -> Table:
    """Two streams of tokens that attend jointly, then one. Stock renames every `.scale` to
    `.weight`.

    Chroma's distilled_guidance_layer makes the shifts, scales and gates of all blocks at once,
    [344, dim].
    """
    dim, bias, layer = size.dim, not size.shared, size.guidance_layer
    ffn = (3 if size.shared else 4) * dim
    ffn_in = 2 * ffn if size.shared else ffn  # Flux.2 has both halves of a SwiGLU in one
    own = not size.shared and not layer

    def embedder(out: int, into: int) -> Tree:
        return {"in_layer": linear(out, into, bias=bias), "out_layer": linear(out, out, bias=bias)}

    guidance: Tree = {
        "in_proj": linear(layer, 64),  # sinusoids: 16 of the timestep, 16 of the guidance, 32 of the row's number
        "layers.[5]": embedder(layer, layer) if layer else None,
        "norms.[5].scale": gain(layer),
        "out_proj": linear(dim, layer or 1, FLUX_MODULATION),
    }
    norms: Tree = {"(query|key)_norm.scale": gain(HEAD)}
    return tree(
        {
            "img_in": linear(dim, size.patch, bias=bias),
            "txt_in": linear(dim, size.text, bias=bias),
            "distilled_guidance_layer": guidance if layer else None,
            "time_in": None if layer else embedder(dim, FREQUENCIES),
            "vector_in": embedder(dim, size.pooled) if size.pooled else None,  # CLIP's pooled output
            "guidance_in": embedder(dim, FREQUENCIES) if size.guidance else None,
            "double_stream_modulation_(img|txt).lin": linear(6 * dim, dim, MODULATION, bias=False)
            if size.shared
            else None,
            "single_stream_modulation.lin": linear(3 * dim, dim, MODULATION, bias=False) if size.shared else None,
            f"double_blocks.[{size.double}]": {
                "(img|txt)_mod.lin": linear(6 * dim, dim, FLUX_MODULATION) if own else None,
                "(img|txt)_attn": {
                    "qkv": linear(3 * dim, dim, bias=bias),
                    "norm": norms,
                    "proj": linear(dim, dim, bias=bias),
                },
                "(img|txt)_mlp.0": linear(ffn_in, dim, bias=bias),
                "(img|txt)_mlp.2": linear(dim, ffn, bias=bias),
            },
            f"single_blocks.[{size.single}]": {
                "linear1": linear(3 * dim + ffn_in, dim, bias=bias),  # qkv and the MLP's way in
                "linear2": linear(dim, dim + ffn, bias=bias),
                "norm": norms,
                "modulation.lin": linear(3 * dim, dim, FLUX_MODULATION) if own else None,
            },
            "final_layer.linear": linear(size.patch, dim, bias=bias),
            "final_layer.adaLN_modulation.1": None if layer else linear(2 * dim, dim, bias=bias),
        }
    )


# ------------------------------------------------------------------------------------------ Z-Image


@dataclass(frozen=True)
class ZImageSize:
    """The sizes of one transformer."""

    dim: int = 256
    layers: int = 4
    text: int = QWEN3.width


Z_IMAGE = ZImageSize()


def z_image(size: ZImageSize) -> Table:
    """Lumina 2's successor: refiners for pixels and for the prompt alone, then blocks for both, the
    prompt first.

    x += tanh(gate) * norm2(half(norm1(x) * (1 + scale))), with attention_norm1 and 2 for one half,
    ffn_norm1 and 2 for the other. Stock knows the model by its width of 3840, which makes a block
    362 MB; `narrow` tells it by the padding tokens.
    """
    dim, between = size.dim, min(size.dim, 1024)
    ffn = -(-(8 * dim // 3) // 256) * 256
    plain: Rows = {
        "attention.qkv": linear(3 * dim, dim, bias=False),
        "attention.out": linear(dim, dim, bias=False),
        "attention.(q|k)_norm.weight": gain(HEAD),
        "feed_forward.(w1|w3)": linear(ffn, dim, bias=False),
        "feed_forward.w2": linear(dim, ffn, bias=False),
        "(attention_norm1|attention_norm2|ffn_norm1|ffn_norm2).weight": gain(dim),
    }
    block: Rows = plain | {"adaLN_modulation.0": linear(4 * dim, 256)}  # a scale and a gate for either half
    return tree(
        {
            "x_embedder": linear(dim, 64),
            "t_embedder.mlp.0": linear(between, FREQUENCIES),
            "t_embedder.mlp.2": linear(256, between),
            "cap_embedder.0.weight": gain(size.text),  # the prompt: Qwen3's states before its last layer
            "cap_embedder.1": linear(dim, size.text),
            "(x|cap)_pad_token": normal(1.0, 1, dim),  # fill pixels and prompt up to multiples of 32
            "noise_refiner.[2]": block,
            "context_refiner.[2]": plain,
            f"layers.[{size.layers}]": block,
            "final_layer": {"linear": linear(64, dim), "adaLN_modulation.1": linear(dim, 256)},
        }
    )


# --------------------------------------------------------------------------------------- Qwen-Image


@dataclass(frozen=True)
class QwenImageSize:
    """The sizes of one transformer."""

    dim: int = 256
    layers: int = 4
    text: int = 64


QWEN_IMAGE = QwenImageSize()


def qwen_image(size: QwenImageSize) -> Table:
    """Diffusers' names. Nothing reads the prompt's half of the last block, but for keys and values.

    Stock fixes 24 heads of 128 and the prompt's width of 3584, which makes a block 680 MB: smaller
    ones load while `narrow` is open.
    """
    dim = size.dim
    return tree(
        {
            "img_in": linear(dim, 64),
            "txt_norm.weight": gain(size.text),  # the prompt: Qwen2.5-VL's last states
            "txt_in": linear(dim, size.text),
            "time_text_embed.timestep_embedder.linear_1": linear(dim, FREQUENCIES),
            "time_text_embed.timestep_embedder.linear_2": linear(dim, dim),
            f"transformer_blocks.[{size.layers}]": {
                "(img|txt)_mod.1": linear(6 * dim, dim, MODULATION),
                "(img|txt)_mlp.net.0.proj": linear(4 * dim, dim),
                "(img|txt)_mlp.net.2": linear(dim, 4 * dim),
                "attn.(to_q|to_k|to_v|to_out.0)": linear(dim, dim),  # the pixels'
                "attn.(add_q_proj|add_k_proj|add_v_proj|to_add_out)": linear(dim, dim),  # the prompt's
                "attn.(norm_q|norm_k|norm_added_q|norm_added_k).weight": gain(HEAD),
            },
            "norm_out.linear": linear(2 * dim, dim),
            "proj_out": linear(64, dim),
        }
    )


# ----------------------------------------------------------------------------------- Krea 2 and Anima

KREA_HEADS = 20  # of the prompt's own blocks; stock fixes them


@dataclass(frozen=True)
class KreaSize:
    """The sizes of one transformer. text: width of the language model, of which so many layers are
    `read`."""

    dim: int = 256
    layers: int = 3
    text: int = KREA2_TE.language.width
    read: int = 12


KREA = KreaSize()


def krea(size: KreaSize) -> Table:
    """Prompt and pixels in one stream with gated attention, four queries to a key. What a norm's
    `scale` holds is added to one. The modulation of all blocks is one vector, to which each adds its
    own."""
    dim, text = size.dim, size.text
    heads = dim // HEAD
    return tree(
        {
            "first": linear(dim, 64),
            "tmlp.0": linear(dim, FREQUENCIES),
            "tmlp.2": linear(dim, dim),
            "tproj.1": linear(6 * dim, dim, MODULATION),
            "txtfusion.(layerwise|refiner)_blocks.[2]": _krea_block(text, text, text // KREA_HEADS),
            "txtfusion.projector": linear(1, size.read, bias=False),  # one of the layers that were read
            "txtmlp.0.scale": normal(0.1, text),
            "txtmlp.1": linear(dim, text),
            "txtmlp.3": linear(dim, dim),
            f"blocks.[{size.layers}]": {
                **_krea_block(dim, max(heads // 4, 1) * HEAD, HEAD),
                "mod.lin": normal(0.05, 6 * dim),
            },
            "last": {"norm.scale": normal(0.1, dim), "linear": linear(64, dim), "modulation.lin": normal(0.05, 2, dim)},
        }
    )


def _krea_block(width: int, keys: int, head: int) -> Rows:
    ffn = -(-(2 * width // 3 * 4) // 128) * 128
    return {
        "(prenorm|postnorm).scale": normal(0.1, width),
        "attn": {
            "(wq|gate|wo)": linear(width, width, bias=False),
            "(wk|wv)": linear(keys, width, bias=False),
            "qknorm.(qnorm|knorm).scale": normal(0.1, head),
        },
        "mlp": {"(gate|up)": linear(ffn, width, bias=False), "down": linear(width, ffn, bias=False)},
    }


ANIMA_HEAD = 64  # of the adapter
T5_WORDS = 32128  # which stock fixes


@dataclass(frozen=True)
class AnimaSize:
    """The sizes of one transformer. lora: rank of a block's modulation."""

    dim: int = 256
    layers: int = 3
    text: int = 128
    lora: int = 64
    adapter_layers: int = 2


ANIMA = AnimaSize()


def anima(size: AnimaSize) -> Table:
    """Cosmos Predict 2 without biases, and an adapter that reads a language model's states by the
    tokens of T5.

    Stock knows its sizes by the widths of 2048 and 5120; `narrow` counts them.
    """
    dim, text = size.dim, size.text
    adapter: Rows = {
        "(norm_self_attn|norm_cross_attn|norm_mlp).weight": gain(text),
        "(self|cross)_attn.(q|k|v|o)_proj": linear(text, text, bias=False),
        "(self|cross)_attn.(q|k)_norm.weight": gain(ANIMA_HEAD),
        "mlp.0": linear(4 * text, text),
        "mlp.2": linear(text, 4 * text),
    }
    modulation: Tree = {
        "1": linear(size.lora, dim, bias=False),
        "2": linear(3 * dim, size.lora, MODULATION, bias=False),
    }
    return tree(
        {
            "x_embedder.proj.1": linear(dim, 68, bias=False),  # 2x2 pixels of 16 channels and of a mask
            "t_embedder.1.linear_1": linear(dim, dim, bias=False),
            "t_embedder.1.linear_2": linear(3 * dim, dim, bias=False),
            "t_embedding_norm.weight": gain(dim),
            f"blocks.[{size.layers}]": {
                "(self|cross)_attn.(q_proj|output_proj)": linear(dim, dim, bias=False),
                "self_attn.(k|v)_proj": linear(dim, dim, bias=False),
                "cross_attn.(k|v)_proj": linear(dim, text, bias=False),
                "(self|cross)_attn.(q|k)_norm.weight": gain(HEAD),
                "mlp.layer1": linear(4 * dim, dim, bias=False),
                "mlp.layer2": linear(dim, 4 * dim, bias=False),
                "adaln_modulation_(self_attn|cross_attn|mlp)": modulation,
            },
            "final_layer.linear": linear(64, dim, bias=False),
            "final_layer.adaln_modulation.1": linear(size.lora, dim, bias=False),
            "final_layer.adaln_modulation.2": linear(2 * dim, size.lora, MODULATION, bias=False),
            "llm_adapter": {
                "embed.weight": normal(1.0, T5_WORDS, text),
                f"blocks.[{size.adapter_layers}]": adapter,
                "out_proj": linear(text, text),
                "norm.weight": gain(text),
            },
        }
    )


# ----------------------------------------------------------------------------- Stable Diffusion 3.5

SD3_HEAD = 64
SD3_POOLED = 768 + 1280  # of CLIP L and G


@dataclass(frozen=True)
class Sd3Size:
    """The sizes of one transformer. Stock makes the width 64 times the number of blocks."""

    layers: int = 4
    twice: int = 2  # how many blocks have attn2: there the pixels attend to themselves once more
    text: int = T5_WIDTH
    places: int = 16


SD3 = Sd3Size()


def sd3(size: Sd3Size) -> Table:
    """Two halves of a block attend jointly. Of the last one's prompt half only qkv is left."""
    dim, last = SD3_HEAD * size.layers, size.layers - 1
    queries: Rows = {"qkv": linear(3 * dim, dim), "(ln_q|ln_k).weight": gain(SD3_HEAD)}
    attention: Tree = {**queries, "proj": linear(dim, dim)}
    mlp: Tree = {"fc1": linear(4 * dim, dim), "fc2": linear(dim, 4 * dim)}

    def half(rows: int, **attentions: Tree) -> Tree:
        return {**attentions, "mlp": mlp, "adaLN_modulation.1": linear(rows * dim, dim)}

    blocks: Rows = {}
    for index in range(size.layers):
        blocks[f"joint_blocks.{index}"] = {
            "context_block": half(6, attn=attention)
            if index < last
            else {"attn": queries, "adaLN_modulation.1": linear(2 * dim, dim)},
            "x_block": half(9, attn=attention, attn2=attention) if index < size.twice else half(6, attn=attention),
        }
    return tree(
        {
            "x_embedder.proj": conv(dim, 16, 2, 2, fp8=False),
            "pos_embed": normal(0.7, 1, size.places**2, dim),  # sines and cosines, in the published one
            "(t|y)_embedder.mlp.2": linear(dim, dim),
            "t_embedder.mlp.0": linear(dim, FREQUENCIES),
            "y_embedder.mlp.0": linear(dim, SD3_POOLED),
            "context_embedder": linear(dim, size.text),
            **blocks,
            "final_layer": {"linear": linear(64, dim), "adaLN_modulation.1": linear(2 * dim, dim)},
        }
    )


# ------------------------------------------------------------------------------------------- U-Nets

UNET_SMALL = 0.5  # a residual stream through a dozen blocks: each adds less than what is there


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


# Stock takes a net for SD 1.5 or SDXL only if it is 320 wide and the prompt 768 or 2048:
# `sd15_wide` is the smallest that it takes. `sd15` and `sdxl` have everything, and load while
# `narrow` is open.
UNETS = {
    "sd15": UnetSize(64, mult=(1, 2, 2), depth=(1, 1, 0), middle=1),
    "sd15_wide": UnetSize(320, mult=(1, 1), depth=(1, 0), context=768),
    "sdxl": UnetSize(64, mult=(1, 2, 2), depth=(0, 1, 2), middle=2, labels=2816, linear=True),
}


def unet(size: UnetSize) -> Table:
    """CompVis' names. An output block also gets what the input block at its place gave."""
    first, vector, last = size.width, 4 * size.width, len(size.mult) - 1
    rows: Rows = {
        "time_embed": {"0": linear(vector, first), "2": linear(vector, vector)},
        "label_emb.0": {"0": linear(vector, size.labels), "2": linear(vector, vector)} if size.labels else None,
        "input_blocks.0.0": conv(first, 4, 3, 3, fp8=False),
    }
    handed = [first]  # the width of what each input block gives
    for level, mult in enumerate(size.mult):
        for _ in range(size.residuals):
            rows[f"input_blocks.{len(handed)}"] = _unet_block(size, handed[-1], mult * first, size.depth[level])
            handed.append(mult * first)
        if level < last:
            rows[f"input_blocks.{len(handed)}.0.op"] = conv(handed[-1], handed[-1], 3, 3)
            handed.append(handed[-1])
    width = handed[-1]
    if size.middle:
        rows["middle_block"] = {**_unet_block(size, width, width, size.middle), "2": _unet_residual(size, width, width)}
    place = 0
    for level, mult in reversed(list(enumerate(size.mult))):
        for left in reversed(range(size.residuals + 1)):
            block = _unet_block(size, width + handed.pop(), width := mult * first, size.depth[level])
            if level and not left:  # an enlargement
                block[f"{2 if size.depth[level] else 1}.conv"] = conv(width, width, 3, 3)
            rows[f"output_blocks.{place}"] = block
            place += 1
    return tree(rows | {"out.0": norm(first), "out.2": conv(4, first, 3, 3)})


def _unet_block(size: UnetSize, into: int, width: int, depth: int) -> Rows:
    return {"0": _unet_residual(size, into, width), "1": _unet_transformer(size, width, depth) if depth else None}


def _unet_residual(size: UnetSize, into: int, width: int) -> Tree:
    return {
        "in_layers": {"0": norm(into), "2": conv(width, into, 3, 3)},
        "emb_layers.1": linear(width, 4 * size.width),
        "out_layers": {"0": norm(width), "3": conv(width, width, 3, 3, factor=UNET_SMALL)},
        "skip_connection": None if into == width else conv(width, into, 1, 1),
    }


def _unet_transformer(size: UnetSize, width: int, depth: int) -> Tree:
    """SD 1.5 has 8 heads and 1x1 convolutions at its ends, SDXL heads of 64 and Linears."""
    end = linear(width, width) if size.linear else conv(width, width, 1, 1)

    def attention(source: int) -> Tree:
        return {
            "to_q": linear(width, width, bias=False),
            "to_(k|v)": linear(width, source, bias=False),
            "to_out.0": linear(width, width),
        }

    return {
        "norm": norm(width),
        "(proj_in|proj_out)": end,
        f"transformer_blocks.[{depth}]": {
            "(norm1|norm2|norm3)": norm(width),
            "attn1": attention(width),
            "attn2": attention(size.context),  # to the prompt
            "ff.net.0.proj": linear(8 * width, width),  # GEGLU
            "ff.net.2": linear(width, 4 * width, UNET_SMALL),
        },
    }
