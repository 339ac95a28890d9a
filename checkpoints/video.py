"""Other video transformers: LTX-2, HunyuanVideo 1.5 and MiniMax H3, with the tensor names of the
published files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from . import vaes
from .text import GEMMA3, LlamaSize
from .wan import FREQUENCIES, HEAD, SHARP
from .weights import Rows, Table, Tree, conv, gain, linear, norm, normal, tree

# Shifts, scales and gates that come from the timestep's vector alone: two SiLUs have made it small.
MODULATION = 2.0

# -------------------------------------------------------------------------------------------- LTX-2

LTX_CHANNELS = 128
REGISTERS = 128


@dataclass(frozen=True)
class LtxSize:
    """The sizes of one transformer. `gated` is LTX-2.3."""

    heads: int = 2
    video_head: int = 128
    audio_head: int = 64
    layers: int = 4
    caption: int = 128
    connector_layers: int = 2
    gated: bool = False

    @property
    def video(self) -> int:
        return self.heads * self.video_head

    @property
    def audio(self) -> int:
        return self.heads * self.audio_head


LTX = {"ltx2": LtxSize(), "ltx23": LtxSize(gated=True)}


def ltx(size: LtxSize) -> Table:
    """Video and audio in two streams of tokens that listen to each other; the audio's names begin
    with `audio_`.

    A connector's registers fill the prompt up to 1024 tokens. Stock counts the blocks, all else is
    in the metadata.
    """
    video, audio, gated = size.video, size.audio, size.gated
    rows = 9 if gated else 6
    block: Rows = {}
    out: Rows = {}
    for stream, width in (("", video), ("audio_", audio)):
        connected = width if gated else size.caption
        out |= {
            f"{stream}patchify_proj": linear(width, LTX_CHANNELS),
            f"{stream}adaln_single": _ltx_timestep(width, rows),
            f"{stream}prompt_adaln_single": _ltx_timestep(width, 2) if gated else None,
            f"{stream}caption_projection.linear_1": None if gated else linear(width, size.caption),
            f"{stream}caption_projection.linear_2": None if gated else linear(width, width),
            f"{stream or 'video_'}embeddings_connector": {
                "learnable_registers": normal(1.0, REGISTERS, connected),
                f"transformer_1d_blocks.[{size.connector_layers}]": {
                    "attn1": _ltx_attention(size, connected, connected, connected),
                    "ff": _ltx_ffn(connected),
                },
            },
            f"{stream}scale_shift_table": normal(0.05, 2, width),
            f"{stream}proj_out": linear(LTX_CHANNELS, width),
        }
        block |= {
            f"{stream}attn1": _ltx_attention(size, width, width, width),
            # As in Wan: the prompt is a few tokens among a thousand.
            f"{stream}attn2": _ltx_attention(size, width, width, width, SHARP),
            f"{stream}ff": _ltx_ffn(width),
            f"{stream}scale_shift_table": normal(0.05, rows, width),
            f"{stream}prompt_scale_shift_table": normal(0.05, 2, width) if gated else None,
        }
    block |= {
        "audio_to_video_attn": _ltx_attention(size, video, audio, audio),
        "video_to_audio_attn": _ltx_attention(size, audio, audio, video),
        "scale_shift_table_a2v_ca_video": normal(0.05, 5, video),
        "scale_shift_table_a2v_ca_audio": normal(0.05, 5, audio),
    }
    between = {
        "video_scale_shift": _ltx_timestep(video, 4),
        "a2v_gate": _ltx_timestep(video, 1),
        "audio_scale_shift": _ltx_timestep(audio, 4),
        "v2a_gate": _ltx_timestep(audio, 1),
    }
    out |= {f"av_ca_{name}_adaln_single": row for name, row in between.items()}
    return tree(out | {f"transformer_blocks.[{size.layers}]": block})


def _ltx_timestep(width: int, rows: int) -> Tree:
    return {
        "emb.timestep_embedder.linear_1": linear(width, FREQUENCIES),
        "emb.timestep_embedder.linear_2": linear(width, width),
        "linear": linear(rows * width, width),
    }


def _ltx_attention(size: LtxSize, width: int, inner: int, source: int, mean: float = 1.0) -> Tree:
    """From `width` channels over `inner` to `width`; keys and values are of `source` channels."""
    return {
        "to_q": linear(inner, width),
        "to_(k|v)": linear(inner, source),
        "to_out.0": linear(width, inner),
        "(q|k)_norm.weight": gain(inner, mean=mean),
        "to_gate_logits": linear(size.heads, width) if size.gated else None,
    }


def _ltx_ffn(width: int) -> Tree:
    return {"net.0.proj": linear(4 * width, width), "net.2": linear(width, 4 * width)}


def ltx_metadata(size: LtxSize) -> dict[str, str]:
    """The configuration that stock reads, under the names of the published files."""
    config: dict[str, object] = {
        "attention_head_dim": size.video_head,
        "audio_attention_head_dim": size.audio_head,
        "audio_cross_attention_dim": size.audio,
        "audio_num_attention_heads": size.heads,
        "caption_channels": size.caption,
        "connector_attention_head_dim": (size.video if size.gated else size.caption) // size.heads,
        "connector_num_attention_heads": size.heads,
        "connector_num_layers": size.connector_layers,
        "cross_attention_dim": size.video,
        "frequencies_precision": "float64",
        "num_attention_heads": size.heads,
        "rope_type": "split",
        "use_middle_indices_grid": True,
    }
    if size.gated:
        config |= {
            "apply_gated_attention": True,
            "audio_connector_attention_head_dim": size.audio_head,
            "audio_connector_num_attention_heads": size.heads,
            "caption_proj_before_connector": True,
            "caption_projection_first_linear": False,
            "connector_apply_gated_attention": True,
            "cross_attention_adaln": True,
        }
    return {"config": json.dumps({"transformer": config})}


def ltx_text_projection(size: LtxSize, language: LlamaSize = GEMMA3.language) -> Table:
    """What LTX-2.3 makes of the prompt, in a file of its own: all layers of Gemma 3 and its
    embedding, one beside the other, become an encoding for each stream. Stock knows it by the
    audio's bias. language: of Gemma 3.
    """
    read = (language.layers + 1) * language.width
    return tree(
        {
            "text_embedding_projection.audio_aggregate_embed": linear(size.audio, read),
            "text_embedding_projection.video_aggregate_embed": linear(size.video, read),
        }
    )


def ltx_checkpoint(size: LtxSize) -> Table:
    """The release: the transformer, what it makes of the prompt, and the VAEs in one file."""
    model = {f"model.diffusion_model.{name}": spec for name, spec in ltx(size).items()}
    return model | ltx_text_projection(size) | vaes.ltx_vaes()


def ltx_checkpoint_metadata(size: LtxSize) -> dict[str, str]:
    """The configuration of all parts."""
    return {"config": json.dumps({**json.loads(ltx_metadata(size)["config"]), **vaes.ltx_vae_config()})}


# --------------------------------------------------------------------------------- HunyuanVideo 1.5

VISION = 1152  # SigLIP's width, by which stock tells 1.5
GLYPHS, GLYPHS_BETWEEN = 1472, 2048  # ByT5's, which stock fixes: 19 MB of this file


@dataclass(frozen=True)
class HunyuanVideoSize:
    """The sizes of one transformer."""

    dim: int = 256
    layers: int = 3
    text: int = 64


HUNYUAN_VIDEO = HunyuanVideoSize()


def hunyuan_video(size: HunyuanVideoSize) -> Table:
    """Tencent's names. Nothing reads the prompt's half of the last block."""
    dim = size.dim
    embedder = {"0": linear(dim, FREQUENCIES), "2": linear(dim, dim)}
    return tree(
        {
            "img_in.proj": conv(dim, 65, 1, 1, 1, fp8=False),  # noise 32, picture 32, mask 1
            "time_in.mlp": embedder,
            "txt_in": {
                "input_embedder": linear(dim, size.text),
                "t_embedder.mlp": embedder,
                "c_embedder": {"linear_1": linear(dim, size.text), "linear_2": linear(dim, dim)},
                "individual_token_refiner.blocks.[2]": {
                    "(norm1|norm2)": norm(dim),
                    "self_attn_qkv": linear(3 * dim, dim),
                    "self_attn_proj": linear(dim, dim),
                    "mlp": {"fc1": linear(4 * dim, dim), "fc2": linear(dim, 4 * dim)},
                    "adaLN_modulation.1": linear(2 * dim, dim),
                },
            },
            "byt5_in": {  # writing in the picture
                "layernorm": norm(GLYPHS),
                "fc1": linear(GLYPHS_BETWEEN, GLYPHS),
                "fc2": linear(GLYPHS_BETWEEN, GLYPHS_BETWEEN),
                "fc3": linear(dim, GLYPHS_BETWEEN),
            },
            "vision_in.proj": {  # the first picture
                "0": norm(VISION),
                "1": linear(VISION, VISION),
                "3": linear(dim, VISION),
                "4": norm(dim),
            },
            "cond_type_embedding.weight": normal(0.5, 3, dim),  # which of these three a token comes from
            f"double_blocks.[{size.layers}]": {
                "(img|txt)_mod.linear": linear(6 * dim, dim, MODULATION),
                "(img|txt)_attn_qkv": linear(3 * dim, dim),
                "(img|txt)_attn_proj": linear(dim, dim),
                "(img|txt)_attn_(q|k)_norm.weight": gain(HEAD),
                "(img|txt)_mlp": {"fc1": linear(4 * dim, dim), "fc2": linear(dim, 4 * dim)},
            },
            "final_layer": {"linear": linear(32, dim), "adaLN_modulation.1": linear(2 * dim, dim)},
        }
    )


# --------------------------------------------------------------------------------------- MiniMax H3


@dataclass(frozen=True)
class MiniMaxSize:
    """The sizes of one transformer; `steps` are the rows of a pruned file's table."""

    dim: int = 192
    heads: int = 2
    head: int = 128
    ffn: int = 384
    layers: int = 4
    text: int = 64
    between: int = 192
    time: int = 96
    steps: int = 0


MINIMAX = {"minimax_h3": MiniMaxSize(), "minimax_h3_pruned": MiniMaxSize(steps=65, time=8)}


def minimax(size: MiniMaxSize) -> Table:
    """Prompt, audio and video in one stream of tokens, with a modulation for each of the three
    sorts. Stock reads all sizes.

    A pruned file looks the timestep's vector up, between two rows of adaln_t_table, and has no
    time_embedder.
    """
    dim, inner, time = size.dim, size.heads * size.head, size.time
    block: Rows = {
        "(norm1|norm2).weight": gain(dim),
        "attn.qkv_proj": linear(3 * inner, dim, bias=False),
        "attn.out_proj": linear(dim, inner, bias=False),
        "attn.(q|k)_norm.weight": gain(size.head),
        "mlp.fc1": linear(2 * size.ffn, dim, bias=False),  # both halves of a SwiGLU
        "mlp.fc2": linear(dim, size.ffn, bias=False),
    }
    embedder: Tree = {"proj_in": linear(size.between, FREQUENCIES), "proj_out": linear(time, size.between)}
    return tree(
        {
            "video_patch_proj": linear(dim, 4 * 24),  # 2x2 pixels of 24 channels
            "audio_patch_proj": linear(dim, 32),
            "condition_proj": linear(dim, size.text),
            "adaln_t_table": normal(0.5, size.steps, time) if size.steps else None,
            "time_embedder": None if size.steps else embedder,
            "rope.inv_freq": normal(0.1, 16, mean=0.3),  # powers of a base, in the published ones
            "token_refiner.blocks.[2]": block,
            "token_refiner.final_norm.weight": gain(dim),
            f"blocks.[{size.layers}]": {**block, "adaln_proj.linear": linear(18 * dim, time)},
            "final_layer.norm.weight": gain(dim),
            "final_layer.adaln_proj.linear": linear(2 * dim, time),
            "final_layer.video_out": linear(4 * 24, dim),
            "final_layer.audio_out": linear(32, dim),
        }
    )
